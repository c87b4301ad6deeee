"""Code of one's own in a whole comparison: `plugins` and `models` when it is made, opened and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import potluck
import potluck.core.method
import potluck.methods
import potluck.models.registry
from helpers import TINY
from potluck.cli.app import app
from potluck.errors import ConfigError, PotluckError, RunError

METHOD = """
from potluck.methods.fedavg import FedAvg


class Compared(FedAvg):
    '''FedAvg under another name.'''

    name = "compared-own"
"""
MODEL = """
from torch import nn
from potluck.models import register


@register("compared-net", takes=("image",))
def net(input, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))
"""
FILE = """
name: small
data: {name: digits, samples: 100}
partition: {kind: iid, clients: 2}
models: [mlp-small]
method: fedavg
training: {rounds: 1, batch_size: 64}
"""


class Net(nn.Module):
    """A model that a folder can only name."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 8)
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(x.flatten(1))))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an experiment, and beside it, in another folder, a method and a model."""
    (tmp_path / "own").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "own" / "method.py").write_text(METHOD)
    (tmp_path / "own" / "net.py").write_text(MODEL)
    (tmp_path / "files" / "small.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget(tmp_path)


def forget(place: Path) -> None:
    """Unload the plug-ins of a folder, as if another process had loaded them."""
    for name in [name for name in sys.modules if str(place) in name]:
        del sys.modules[name]
    potluck.core.method._registry.pop("compared-own", None)
    potluck.models.registry._registry.pop("compared-net", None)


def compare(place: Path) -> None:
    """Compare Local with the method of the plug-in; nothing of it stays loaded."""
    words = ["compare", "files/small.yaml", "--out", "all", "--methods", "compared-own"]
    done = CliRunner().invoke(app, [*words, "--plugin", "own/method.py"])
    assert done.exit_code == 0, done.stderr
    forget(place)


# --- making ---------------------------------------------------------------------------------------------


def test_a_plug_in_is_named_behind_any_command(place: Path) -> None:
    call = CliRunner().invoke
    own = ["--plugin", "own/method.py", "--plugin", "own/net.py"]
    done = call(app, ["compare", "files/small.yaml", "--methods", "compared-own", *own, "--json"])
    assert done.exit_code == 0, done.stderr
    assert [entry["method"] for entry in json.loads(done.stdout)["methods"]] == ["local", "compared-own"]
    config = Path("runs/small-compare/compared-own-seed0/config.yaml").read_text()
    assert str(place / "own" / "method.py") in config
    played = call(app, ["run", "files/small.yaml", "method=compared-own", "models=[compared-net]", *own])
    assert played.exit_code == 0, played.stderr
    shown = call(app, ["split", "files/small.yaml", "models=[compared-net]", *own])
    assert shown.exit_code == 0, shown.stderr
    absent = call(app, ["compare", "files/small.yaml", "--plugin", "own/nothing.py"])
    assert (absent.exit_code, absent.stdout) == (2, "")
    assert "plugins: there is no file" in absent.stderr


def test_plug_ins_come_beside_those_of_the_file(place: Path) -> None:
    Path("files/small.yaml").write_text(
        FILE + "plugins: [../own/net.py]\nvariants: {own: {method: compared-own}}\n"
    )
    found = potluck.compare(
        "files/small.yaml", plugins=["own/method.py"], overrides=["models=[compared-net]"]
    )
    assert [entry["method"] for entry in found.comparison["methods"]] == ["local", "own"]  # type: ignore[union-attr]
    potluck.run("files/small.yaml", plugins="own/method.py", out="one")
    listed = potluck.Experiment.load("one/config.yaml").plugins
    assert listed == (str(place / "own" / "net.py"), str(place / "own" / "method.py"))


def test_an_experiment_made_in_python_takes_plug_ins_too(place: Path) -> None:
    values: dict[str, Any] = {**TINY, "data": {"name": "digits", "samples": 100}}
    made = potluck.Experiment.make(**{**values, "method": "fedavg"})
    for given in ((made,), ()):
        more = {} if given else {key: value for key, value in values.items() if key != "method"}
        found = potluck.compare(
            *given, methods=["compared-own"], plugins=["own/method.py"], out=f"all{len(given)}", **more
        )
        assert isinstance(found, potluck.Comparison)
        assert found.run("compared-own").summary["method"] == "compared-own"


@pytest.mark.parametrize("plugins", [3, True, [3], {"a": 1}])
def test_what_is_no_list_of_plug_ins_is_refused(plugins: Any, place: Path) -> None:
    for call in (potluck.compare, potluck.run):
        with pytest.raises(
            ConfigError, match=r"plugins: give a list of files or modules, such as \['mine.py'\]"
        ):
            call("files/small.yaml", plugins=plugins)
    assert not Path("runs").exists()


def test_runs_of_before_are_taken_when_a_plug_in_is_added(place: Path) -> None:
    call = CliRunner().invoke
    command = ["compare", "files/small.yaml", "--methods", "fedavg"]
    assert call(app, command).exit_code == 0
    log = Path("runs/small-compare/fedavg-seed0/metrics.jsonl")
    before = log.stat().st_mtime_ns
    command = ["compare", "files/small.yaml", "--methods", "fedavg,compared-own", "--plugin", "own/method.py"]
    done = call(app, command)
    assert done.exit_code == 0, done.stderr
    assert log.stat().st_mtime_ns == before


# --- opening --------------------------------------------------------------------------------------------


def test_plug_ins_of_a_comparison_are_loaded_when_one_of_its_runs_is(place: Path) -> None:
    compare(place)
    run = potluck.open("all").run("compared-own")  # type: ignore[union-attr]
    with pytest.raises(PotluckError, match="method 'compared-own' is not known here"):
        run.clients["0"].model()
    given = potluck.open("all").run("compared-own", plugins=True)  # type: ignore[union-attr]
    assert given.clients["0"].model() is not None


@pytest.mark.parametrize("plugins", [True, ["own/method.py"], Path("own/method.py")])
def test_a_comparison_is_opened_with_its_plug_ins(plugins: Any, place: Path) -> None:
    compare(place)
    found = potluck.open("all", plugins=plugins)
    assert isinstance(found, potluck.Comparison)
    assert found.run("compared-own").clients["0"].model() is not None
    Path("own/method.py").write_text(METHOD + "\nEDITED = True\n")
    with pytest.raises(RunError, match=r"method\.py is not the code that .*compared-own-seed0 was made with"):
        potluck.open("all", plugins=True).run("compared-own")  # type: ignore[union-attr]


def test_classes_of_ones_own_are_brought_to_all_runs(tmp_path: Path) -> None:
    values: dict[str, Any] = {**TINY, "data": {"name": "digits", "samples": 100}, "models": Net}
    sweep = {"training.batch_size": [32, 64]}
    del values["method"]
    potluck.compare(methods=["fedavg"], sweep=sweep, out=tmp_path / "all", **values)
    found = potluck.open(tmp_path / "all", models={"Net": Net})
    assert isinstance(found, potluck.Sweep)
    assert isinstance(found["batch_size=64"].run("fedavg").clients["1"].model(), Net)
    assert isinstance(
        potluck.open(tmp_path / "all" / "batch_size=32", models=[Net]).run("local").clients["0"].model(), Net
    )  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="models names 'Nett', which is neither a client nor a class of any of these"
    ):
        potluck.open(tmp_path / "all", models={"Nett": Net})


def test_a_class_that_one_method_needs_is_left_out_for_the_others(tmp_path: Path) -> None:
    values: dict[str, Any] = {**TINY, "data": {"name": "digits", "samples": 100}}
    del values["method"]
    method = {"name": "fedmrl", "d1": 4, "small": Net}
    potluck.compare(methods=[method], out=tmp_path / "all", **values)
    found = potluck.open(tmp_path / "all", models={"Net": Net})
    assert isinstance(found, potluck.Comparison)
    for name in ("local", "fedmrl"):
        assert found.run(name).clients["0"].model() is not None


# --- drawing --------------------------------------------------------------------------------------------


def test_pictures_of_logs_need_no_plug_ins_and_those_of_models_load_them(place: Path) -> None:
    compare(place)
    call = CliRunner().invoke
    Path("own/method.py").rename("own/gone.py")
    for words in (["curves", "all"], ["gains", "all"], ["wire", "all/compared-own-seed0"]):
        done = call(app, ["plot", *words, "--plugins"])
        assert done.exit_code == 0, done.stderr
    several = call(app, ["plot", "cka", "all", "--plugins"])
    assert several.exit_code == 2
    assert "cka shows one run, and these are 2; give one of them" in several.stderr
    Path("own/gone.py").rename("own/method.py")
    run = "all/compared-own-seed0"
    with pytest.raises(PotluckError, match=r"'compared-own' is not known here; .*plugins=True"):
        potluck.plot("cka", run)
    assert call(app, ["plot", "cka", run, "--plugins"]).exit_code == 0
    potluck.plot("pca", run, plugins=True, out="pca.png")


def test_a_picture_takes_classes_of_ones_own(tmp_path: Path) -> None:
    values: dict[str, Any] = {**TINY, "data": {"name": "digits", "samples": 100}, "models": Net}
    potluck.run(**values, out=tmp_path / "run")
    data = potluck.Experiment.make(**values).load_data()
    with pytest.raises(ConfigError, match="Net is needed here"):
        potluck.plot("pca", tmp_path / "run", data=data)  # type: ignore[arg-type]
    potluck.plot("pca", tmp_path / "run", data=data, models={"Net": Net})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cka", "tsne", "pca", "confusion"])
def test_pictures_of_models_wait_for_the_end_of_a_run(kind: Any, place: Path) -> None:
    compare(place)
    run = place / "all" / "compared-own-seed0"
    (run / "summary.json").unlink()
    done = CliRunner().invoke(app, ["plot", kind, str(run), "--plugins"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{kind} looks into the models of a finished run, and the run in" in done.stderr
    assert "potluck resume" in done.stderr
    drawn = CliRunner().invoke(app, ["plot", "curves", str(run), "--plugins"])
    assert drawn.exit_code == 0, drawn.stderr
