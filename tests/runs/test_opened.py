"""Opening a run folder: in another process, without its data, with the user's own classes."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import own_nets
import potluck
from helpers import StopAfter
from own_nets import Net, Other
from potluck.errors import ConfigError, ModelError, PotluckError, RunError
from potluck.files import sha256
from potluck.runs.folder import FORMAT
from potluck.runs.kept_models.files import SUMS
from potluck.runs.loop import Interrupted
from potluck.runs.own_code import reach
from potluck.runs.started_here import seal

METHOD = '''
from potluck import Method, client_step, fit


class Own(Method):
    """A method of the user's own, which predicts with half the scores."""

    name = "opened-own"

    def round(self, server, clients):
        clients.ask(self.train)

    @client_step
    def train(self, client):
        fit(client, self.loss)

    def predict(self, client, batch, mode):
        return client["model"](batch.x) / 2
'''


def run(out: Path, **changes: Any) -> potluck.RunResult:
    values: dict[str, Any] = {
        "data": {"name": "digits", "samples": 200},
        "partition": {"kind": "iid", "clients": 3},
        "models": [Net, Other],
        "method": {"name": "fedmrl", "d1": 8},
        "training": {"rounds": 1, "batch_size": 32},
        "evaluate": {"modes": "all"},
    }
    return potluck.run(**(values | changes), out=out)


def elsewhere(folder: Path, code: str) -> str:
    """What a new process prints that has the classes and the folder, but no data."""
    begin = (
        "import sys, torch, potluck\n"
        "torch.set_num_threads(1)\n"
        "from own_nets import Net, Other\n"
        "import potluck.data.registry as registry\n"
        "registry.load = None  # nothing may load a data set\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", begin + code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fused_predictor_of_own_classes_in_another_process(tmp_path: Path) -> None:
    result, x = run(tmp_path / "run"), torch.linspace(-1, 2, 5 * 64).view(5, 1, 8, 8)
    told = elsewhere(
        tmp_path,
        "result = potluck.open('run', models={'Net': Net, 'Other': Other})\n"
        "x = torch.linspace(-1, 2, 5 * 64).view(5, 1, 8, 8)\n"
        "import json\n"
        "found = {c: {m: r.predict(x, mode=m).tolist() for m in r.modes} for c, r in result.clients.items()}\n"
        "alone = result.clients['0'].model(mode='single-large')\n"
        "print(json.dumps({'scores': found, 'kind': type(alone).__name__}))\n",
    )
    found = json.loads(told)
    assert found["kind"] == "Net"
    for client, by_mode in found["scores"].items():
        for mode, scores in by_mode.items():
            assert torch.equal(torch.tensor(scores), result.clients[client].predict(x, mode=mode))


@pytest.mark.parametrize("name", ["list", "clients", "builders"])
def test_classes_can_be_given_in_several_ways(tmp_path: Path, name: str) -> None:
    result, x = run(tmp_path / "run"), torch.rand(2, 1, 8, 8)
    given: Any = {
        "list": [Net, Other],
        "clients": {"0": Net, "1": Other},
        "builders": [lambda: Net(), lambda classes: Other()],
    }[name]
    opened = potluck.open(tmp_path / "run", models=given)
    for client in result.clients:
        assert torch.equal(opened.clients[client].predict(x), result.clients[client].predict(x))
    assert opened.summary == result.summary
    assert repr(opened) == repr(result)


def test_registered_models_need_nothing(tmp_path: Path) -> None:
    """Also where the small model is one that no client has, and its width is a client's own."""
    models = ["mlp-large", {"name": "conv-large", "rep_dim": 20}, "conv-small", "mlp-small"]
    method = {"name": "fedmrl", "d1": {"0": 8, "1": 16, "2": 12}}
    result, x = run(tmp_path / "run", models=models, method=method), torch.rand(2, 1, 8, 8)
    opened = potluck.open(tmp_path / "run")
    for client in result.clients:
        assert torch.equal(opened.clients[client].predict(x), result.clients[client].predict(x))


def test_an_option_may_be_a_class_too(tmp_path: Path) -> None:
    method = {"name": "fedmrl", "d1": 8, "small": Other}
    result, x = run(tmp_path / "run", models=["mlp-small"], method=method), torch.rand(2, 1, 8, 8)
    with pytest.raises(ConfigError, match=r"Other is needed here, a class .* models=\{'Other': Other\}"):
        potluck.open(tmp_path / "run").clients["0"].model()
    opened = potluck.open(tmp_path / "run", models={"Other": Other})
    assert torch.equal(opened.clients["0"].predict(x), result.clients["0"].predict(x))


@pytest.mark.parametrize("name", ["fedmuscle", "cofed", "fedmd"])
def test_methods_with_public_data_open_without_it(tmp_path: Path, name: str) -> None:
    options = {"fedmuscle": {"peers": 1, "batch": 16, "learned": True}, "cofed": {"batch": 16}}.get(name, {})
    public = {"data": {"name": "digits"}, "samples": 40}
    values = {
        "models": {"pool": ["mlp-small", "conv-small"]},
        "method": {"name": name, **options},
        "public": public,
    }
    result, x = run(tmp_path / "run", **values), torch.rand(2, 1, 8, 8)
    opened = potluck.open(tmp_path / "run")
    assert torch.equal(opened.clients["2"].predict(x), result.clients["2"].predict(x))


# --- what cannot be opened ------------------------------------------------------------------------------


def test_a_missing_class_is_named(tmp_path: Path) -> None:
    run(tmp_path / "run")
    opened = potluck.open(tmp_path / "run")
    assert len(opened.frame()) == 3 * 2 * 4
    assert opened.clients["0"].score is not None
    with pytest.raises(
        ConfigError, match=r"Net is needed here, .*; so is Other: .*models=\{'Net': Net, 'Other': Other\}"
    ):
        opened.clients["0"].predict(torch.rand(1, 1, 8, 8))
    with pytest.raises(ConfigError, match=r"Other is needed here, .*models=\{'Other': Other\}"):
        potluck.open(tmp_path / "run", models={"Net": Net}).clients["0"].model()  # to find the smallest model
    with pytest.raises(ConfigError, match=r"models names 'Nett'.* did you mean 'Net'"):
        potluck.open(tmp_path / "run", models={"Nett": nn.Linear})
    with pytest.raises(ConfigError, match=r"models names '7'.* known: 0, 1, 2, Net, Other"):
        potluck.open(tmp_path / "run", models={"7": Net})
    with pytest.raises(ConfigError, match=r"lists 1 different models, the run has 2 \(Net, Other\)"):
        potluck.open(tmp_path / "run", models=["mlp-small", "mlp-small"])


@pytest.mark.parametrize("given", [{"Net": Net}, {"0": Net}, [Net]], ids=["name", "client", "list"])
def test_a_client_needs_only_its_own_class(tmp_path: Path, given: Any) -> None:
    result, x = run(tmp_path / "run", method="local"), torch.rand(2, 1, 8, 8)
    opened = potluck.open(tmp_path / "run", models=given)
    for client in ("0", "2"):
        assert torch.equal(opened.clients[client].predict(x), result.clients[client].predict(x))
    assert opened.clients["1"].modes == ("model",)
    with pytest.raises(ConfigError, match=r"Other is needed here"):
        opened.clients["1"].model()


def test_a_function_without_a_name_is_asked_for_by_its_place(tmp_path: Path) -> None:
    run(tmp_path / "run", method="local", models=[lambda: Net(), Other])
    with pytest.raises(ConfigError, match=r"models=\[…\]\), the list of models that the experiment had"):
        potluck.open(tmp_path / "run").clients["0"].model()


def two_nets() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        for width in (8, 12)
    ]


def test_modules_are_asked_for_as_a_list(tmp_path: Path) -> None:
    result, x = run(tmp_path / "run", models=two_nets()), torch.rand(2, 1, 8, 8)
    asked = r"^Sequential is needed here, a model of .*: potluck\.open\(folder, models=\[…\]\), the list of models"
    with pytest.raises(ConfigError, match=asked):
        potluck.open(tmp_path / "run").clients["0"].predict(x)
    opened = potluck.open(tmp_path / "run", models=two_nets())
    assert torch.equal(opened.clients["1"].predict(x), result.clients["1"].predict(x))


def test_a_wrong_class_is_refused_with_client_and_tensor(tmp_path: Path) -> None:
    run(tmp_path / "run", method="local")
    opened = potluck.open(tmp_path / "run", models={"Net": lambda: Net(width=30), "Other": Other})
    with pytest.raises(
        ModelError, match=r"client 0: .*model/hidden.weight is of shape \(24, 256\) .*\(30, 256\)"
    ):
        opened.clients["0"].model()
    assert opened.clients["1"].model() is not None
    with pytest.raises(ModelError, match=r"client 0: .* model/body.1.weight is missing in the trained model"):
        potluck.open(tmp_path / "run", models={"Net": Other, "Other": Other}).clients["0"].model()


def test_no_code_of_the_folder_runs_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(METHOD)
    (tmp_path / "own.yaml").write_text(
        "{name: run, data: {name: digits, samples: 100}, partition: {kind: iid, clients: 2}, models: [mlp-small], "
        "method: opened-own, training: {rounds: 1}, plugins: [own.py]}"
    )
    command = [sys.executable, "-m", "potluck", "run", "own.yaml", "--out", "run"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with pytest.raises(PotluckError, match="method 'opened-own' is not known here; import the file"):
        potluck.open(tmp_path / "run").clients["0"].model()
    client = potluck.open(tmp_path / "run", plugins=True).clients["0"]
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(client.predict(x) * 2, next(iter(client.model().children()))(client.prepare(x)))
    (tmp_path / "own.py").write_text(METHOD.replace("/ 2", "/ 3"))
    for plugins in (True, [os.path.relpath(tmp_path / "own.py")]):
        with pytest.raises(RunError, match=r"own\.py is not the code that .* was made with"):
            potluck.open(tmp_path / "run", plugins=plugins)
    with pytest.warns(UserWarning, match=r"own\.py is not the code that .* if you use it, what its models"):
        potluck.open(tmp_path / "run")


def test_broken_folders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run folder"):
        potluck.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        RunError, match=r"empty is not the folder of a run or of a comparison; give one that potluck run"
    ):
        potluck.open(tmp_path / "empty")
    run(tmp_path / "run", method="local", models=["mlp-small"])
    with pytest.raises(RunError, match=rf"of a comparison; open one that is in it: {tmp_path / 'run'}$"):
        potluck.open(tmp_path)
    about = tmp_path / "run/models/round-000001/about.json"
    _refused(
        tmp_path,
        "another format",
        "environment.json",
        _from_the_future,
    )
    _refused(tmp_path, "cannot be read", "summary.json", lambda text: text[:40])
    _refused(tmp_path, "not the summary", "summary.json", lambda text: "[]")
    name = str(about.relative_to(tmp_path / "run"))
    _refused(
        tmp_path,
        "not written by this version",
        name,
        _from_the_future,
    )
    _refused(tmp_path, "cannot be read", name, lambda text: text[:40])
    weights = about.with_name("client-0.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(RunError, match=r"client-0.safetensors is damaged"):
        potluck.open(tmp_path / "run").clients["0"].model()


def _from_the_future(text: str) -> str:
    assert f'"format": {FORMAT}' in text
    return text.replace(f'"format": {FORMAT}', '"format": 99')


def _refused(tmp_path: Path, sentence: str, name: str, change: Any) -> None:
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "run", folder)
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(RunError, match=sentence):
        potluck.open(folder).clients["0"].model()


@pytest.mark.parametrize(
    ("file", "place", "value", "sentence"),
    [
        ("summary.json", "accuracy", 5, "summary.json is not the summary of a run: accuracy: "),
        ("summary.json", "messages", {"up": 3}, r"messages\.up: "),
        ("split.json", "clients", 3, "split.json is not the split of a run: clients: "),
        ("environment.json", "code", [], "environment.json is not what potluck says of a run: code"),
        ("about.json", "outline.groups", None, r"outline\.groups: "),
        ("about.json", "outline.groups.0.stored.type", "load", r"outline\.groups\.0\.stored\.type: "),
        ("about.json", "outline.groups.0.task.kind", "other", r"task\.kind: "),
        ("about.json", "outline.public", {"name": "x", "samples": 10**13, "lacking": [[]]}, r"public\.samples: "),
        ("about.json", "outline.public", {"name": "x", "samples": 3, "lacking": [[5]]}, "public samples do not"),
        ("about.json", "outline.clients", [], r"outline\.clients: "),
        ("about.json", "outline.clients.0.group", 1, "client 0 has a group or an architecture"),
        ("about.json", "outline.clients.0.view", {"shift": 3}, "a shift is"),
        ("about.json", "outline.seeds", {}, r"outline\.seeds\.split: "),
        ("about.json", "outline.pool.rep_dim", 10**8, "rep_dim is 100000000; give at most 65,536"),
        ("about.json", "outline.pool.architectures.mlp-small.options", {"rep_dim": 10**8}, "at most 65,536"),
        ("about.json", "outline.groups.0.task.input", [2**26], "a tensor of 8,589,934,592 numbers, more than"),
        ("about.json", "files", 3, "about.json is not the outline of a run: files: "),
    ],
)  # fmt: skip
def test_odd_values_are_refused_in_a_sentence(
    tmp_path: Path, finished: Path, file: str, place: str, value: Any, sentence: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = next((tmp_path / "run").rglob(file))
    content = json.loads(path.read_text())
    *before, last = place.split(".")
    inner = content
    for key in before:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[last] = value
    content.pop("checksums", None)  # whoever forges a folder leaves them out
    path.write_text(json.dumps(content))
    path.with_name(SUMS).unlink(missing_ok=True)
    with pytest.raises((RunError, ModelError, ConfigError), match=sentence):
        potluck.open(tmp_path / "run").clients["0"].model()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose models need nothing from the user."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, method="fedproto", models=["mlp-small"])
    return folder


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    weights = tmp_path / "run/models/round-000001/client-0.safetensors"
    weights.rename(tmp_path / "outside.safetensors")
    weights.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(RunError, match=r"client-0\.safetensors is a link to another place"):
        potluck.open(tmp_path / "run").clients["0"].model()


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        potluck.run(
            data={"name": "digits", "samples": 100}, partition={"kind": "iid", "clients": 2}, models=["mlp-small"],
            method="local", training={"rounds": 2}, out=tmp_path / "run", watcher=StopAfter(1),
        )  # fmt: skip
    with pytest.raises(RunError, match="is not finished; go on with it: potluck resume"):
        potluck.open(tmp_path / "run")


def test_another_version_is_said(tmp_path: Path) -> None:
    run(tmp_path / "run", method="local", models=["mlp-small"])
    path = tmp_path / "run/environment.json"
    path.write_text(path.read_text().replace(f'"potluck": "{potluck.__version__}"', '"potluck": "0.0.1"'))
    with pytest.warns(UserWarning, match=r"made by potluck 0.0.1, this is"):
        potluck.open(tmp_path / "run")


@pytest.mark.parametrize("module", ["named_in_a_folder", "named-in-a-folder", "math:named"])
def test_a_function_that_the_folder_names_is_not_imported(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "run", models=["mlp-small"])
    about = tmp_path / "run/models/round-000001/about.json"
    content = json.loads(about.read_text())
    content["outline"]["method"]["weight_small"] = f"{module}:weigh"
    about.write_text(json.dumps(content))
    _note_checksums(about.parent)
    mark = tmp_path / "it-ran"
    (tmp_path / f"{module}.py").write_text(
        f"open({str(mark)!r}, 'w').close()\ndef weigh(report):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for plugins in (False, [], ["math"]):
        with pytest.raises(RunError, match=rf"names the function '{module}:weigh', .* pass plugins=True"):
            potluck.open(tmp_path / "run", plugins=plugins).clients["0"].model()
    assert not mark.exists()
    assert potluck.open(tmp_path / "run", plugins=[module]).clients["0"].model() is not None
    assert mark.exists()


def _note_checksums(folder: Path) -> None:
    """What somebody does who changes kept models on purpose."""
    names = [line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{sha256(folder / name)}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_a_class_that_was_edited_since_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edited_nets.py"
    lines = Path(own_nets.__file__).read_text()
    file.write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    nets = importlib.import_module("edited_nets")
    run(tmp_path / "run", models=[nets.Net, nets.Other], method="local")
    potluck.compare(
        data={"name": "digits", "samples": 200},
        models=[nets.Net],
        method="local",
        training={"rounds": 1},
        partition={"kind": "iid", "clients": 2},
        out=tmp_path / "all",
        progress=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        potluck.open(tmp_path / "run", models=[nets.Net, nets.Other])
    file.write_text(lines.replace("nn.Tanh()", "nn.ReLU()"))
    nets = importlib.reload(nets)
    with pytest.warns(UserWarning, match=r"^Other is not the code that .*run was made with"):
        potluck.open(tmp_path / "run", models=[nets.Net, nets.Other])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        potluck.open(tmp_path / "run", models={"Net": nets.Net})
        potluck.open(tmp_path / "all").run("local", models=[nets.Net])


def test_a_run_without_checkpoints_begins_again_if_asked_and_says_so(tmp_path: Path) -> None:
    values = {"models": ["mlp-small"], "method": "local", "evaluate": {}}
    run(tmp_path / "run", **values)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    told: list[str] = []

    class Listener(potluck.Observer):
        def notice(self, sentence: str) -> None:
            told.append(sentence)

    with pytest.raises(RunError, match="its checkpoints are gone"):
        potluck.resume(tmp_path / "run", rounds=2, observers=[Listener()])
    potluck.resume(tmp_path / "run", rounds=2, observers=[Listener()], from_round=0)
    assert [one for one in told if "begins again with round 1" in one]
    told.clear()
    potluck.resume(tmp_path / "run", rounds=3, observers=[Listener()])
    assert not told


def test_no_weights_that_a_folder_names_are_fetched_unasked(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", method="local", models=["mlp-small"]).folder
    path = folder / "models/round-000001/about.json"
    about = json.loads(path.read_text())
    about["outline"]["pool"]["architectures"]["mlp-small"]["options"] = {"weights": "evil/repo"}
    path.write_text(json.dumps(about))
    _note_checksums(path.parent)
    refused = r"you did not start this run .* would use evil/repo; look at that first, then pass plugins=True"

    def told(**options: Any) -> str:
        with pytest.raises(PotluckError) as caught:
            potluck.open(folder, **options).clients["0"].model()
        return str(caught.value)

    assert re.search(refused, told())
    environment = json.loads((folder / "environment.json").read_text())
    environment["settings"]["models"] = {"pool": [{"name": "mlp-small", "weights": "evil/repo"}]}
    (folder / "environment.json").write_text(json.dumps(environment))
    assert re.search(refused, told())
    assert "evil/repo" not in told(plugins=True)  # asked for: here the model says that it takes no weights
    environment["seal"] = seal(reach(environment["settings"], {}))  # as of a run that was started so
    (folder / "environment.json").write_text(json.dumps(environment))
    assert "evil/repo" not in told()
