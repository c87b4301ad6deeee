"""Code that a run folder names: the same as when the run began, and never somebody else's without asking."""

from __future__ import annotations

import hashlib
import importlib
import json
import linecache
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import potluck
import potluck.core.method
from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.experiment.schema import Experiment
from potluck.plugins import module_name
from potluck.report.page import write_report
from potluck.runs.api import resume, run
from potluck.runs.own_code import check_trusted, own_code

VALUES: dict[str, Any] = {
    "data": {"name": "digits", "samples": 200},
    "partition": {"kind": "iid", "clients": 2},
    "models": ["mlp-small"],
    "method": "local",
    "training": {"rounds": 1},
    "engine": {"device": "cpu"},
}
PLUGIN = """
from pathlib import Path
from potluck.methods import Local

class Mine(Local):
    name = "{name}"

with (Path(__file__).parent / "executed").open("a") as file:
    file.write("x")
"""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PLUGIN.format(name=tmp_path.name))
    return tmp_path / "mine.py"


def begun(plugin: Path) -> Path:
    """A finished run with a method of one's own."""
    values = VALUES | {"method": plugin.parent.name, "plugins": [str(plugin)]}
    return run(Experiment.make(**values), out=plugin.parent / "run").folder


def edit(plugin: Path) -> None:
    """Change a plug-in, then go on as a new process would, which has not loaded it."""
    plugin.write_text(plugin.read_text() + "\n# another thought\n")
    sys.modules.pop(module_name(str(plugin)))
    potluck.core.method._registry.pop(plugin.parent.name)


def handed_over(folder: Path, code: Path) -> None:
    """What somebody would send who wants their code run: a folder that agrees with itself."""
    values = yaml.safe_load((folder / "config.yaml").read_text()) | {"plugins": [str(code)]}
    about = json.loads((folder / "environment.json").read_text())
    about |= {"settings": about["settings"] | {"plugins": [str(code)]}, "code": own_code(values)}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "environment.json").write_text(json.dumps(about))


def test_the_same_code_goes_on_and_changed_code_does_not(plugin: Path) -> None:
    folder = begun(plugin)
    assert json.loads((folder / "environment.json").read_text())["code"].keys() == {str(plugin)}
    resume(folder)
    edit(plugin)
    with pytest.raises(RunError, match=r"mine\.py is not the code that .* was begun with"):
        resume(folder)
    with pytest.raises(RunError, match=r"mine\.py is not the code"):
        resume(folder, experiment=Experiment.load(folder / "config.yaml"))


def test_code_in_the_folder_is_not_run_until_it_is_trusted(plugin: Path) -> None:
    folder = begun(plugin)
    evil = folder / "evil.py"
    evil.write_text(PLUGIN.format(name=plugin.parent.name))
    handed_over(folder, evil)
    write_report(folder)
    with pytest.raises(RunError, match=r"the code .*evil\.py comes with the run folder.*--trust"):
        resume(folder)
    assert not (folder / "executed").exists()
    resume(folder, trust=True)
    assert (folder / "executed").read_text() == "x"


def test_a_path_that_potluck_would_not_write_is_not_followed(plugin: Path, monkeypatch: Any) -> None:
    folder = begun(plugin)
    (plugin.parent / "evil.py").write_text(PLUGIN.format(name=plugin.parent.name))
    monkeypatch.chdir(folder)
    handed_over(folder, Path("../evil.py"))
    (plugin.parent / "executed").unlink()
    with pytest.raises(RunError, match=r"the code \.\./evil\.py comes with the run folder"):
        resume(folder)
    assert not (plugin.parent / "executed").exists()


def test_a_plugin_written_into_the_configuration_is_not_run(plugin: Path) -> None:
    folder = run(Experiment.make(**VALUES), out=plugin.parent / "plain").folder
    values = yaml.safe_load((folder / "config.yaml").read_text()) | {"plugins": [str(plugin)]}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(RunError, match=r"config\.yaml was edited after the run began: plugins"):
        resume(folder)
    assert not (plugin.parent / "executed").exists()


def test_code_that_another_user_names_is_not_run(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(plugin)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(RunError, match=r"another user's run folder names the code .*mine\.py.*--trust"):
        resume(folder)
    resume(folder, trust=True)
    check_trusted(folder, VALUES | {"plugins": []}, {})


def test_functions_and_modules_count_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules_of_mine").mkdir()
    (tmp_path / "rules_of_mine/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "rules_of_mine/halves.py").write_text("def half(report): return 0.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {
        "name": "tiny",
        "method": {"name": "fedmrl", "weight_small": "rules_of_mine.halves:half"},
        "engine": {"device": ["cuda:0"]},
        "plugins": ["nowhere_to_be_found"],
    }
    assert own_code(settings).keys() == {"rules_of_mine.halves"}
    with pytest.raises(RunError, match=r"rules_of_mine\.halves comes with the run folder"):
        check_trusted(tmp_path, settings, {})


NETS = """
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        return x * {factor}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.body = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.body(x.flatten(1))


def unused():
    return {unused}
"""


def nets(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: int = 1, unused: int = 0) -> Any:
    """The model class in a file of one's own, as a new process would import it."""
    (folder / "nets_of_mine.py").write_text(NETS.format(factor=factor, unused=unused))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("nets_of_mine", None)
    linecache.clearcache()
    return importlib.import_module("nets_of_mine").Net


@pytest.mark.parametrize("given", ["class", "lambda", "module"])
def test_models_from_python_are_known_by_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The start of the weights is the same, so only the text tells an edited `forward`."""

    def values(net: Any) -> dict[str, Any]:
        with Rng(0).as_default():
            source = {"class": net, "lambda": lambda: net(), "module": net()}[given]
        return VALUES | {"models": [source]}

    net = nets(tmp_path, monkeypatch)
    folder = run(Experiment.make(**values(net)), out=tmp_path / "run").folder
    compare = partial(potluck.compare, methods=["local"], out=tmp_path / "compared", progress=False)
    if given == "class":
        compare(**values(net))
    same = values(nets(tmp_path, monkeypatch, unused=1))
    resume(folder, experiment=Experiment.make(**same), rounds=2)
    if given == "class":
        compare(**same)
    edited = values(nets(tmp_path, monkeypatch, factor=2))
    with pytest.raises(RunError, match=r"Block is not the code that .*run was begun with.*--out"):
        resume(folder, experiment=Experiment.make(**edited), rounds=3)
    if given == "class":
        with pytest.raises(RunError, match=r"Block is not the code that .*local-seed0 was begun with"):
            compare(**edited)


def test_an_edited_plugin_leaves_runs_alone_that_do_not_use_it(plugin: Path) -> None:
    values = VALUES | {"plugins": [str(plugin)]}
    mine = plugin.parent.name
    compare = partial(potluck.compare, out=plugin.parent / "compared", progress=False)
    compare(methods=["fedavg", mine], **values)
    edit(plugin)
    (plugin.parent / "compared/fedavg-seed0/summary.json").unlink()  # as if it had been stopped
    assert compare(methods=["fedavg"], **values)
    with pytest.raises(RunError, match=rf"mine\.py is not the code that .*{mine}-seed0 .*--out"):
        compare(methods=[mine], **values)


def test_a_plugin_that_was_edited_after_it_was_loaded_is_not_run_under_its_new_name(plugin: Path) -> None:
    (plugin.parent / "beside.py").write_text("A = 1\n")
    plugin.write_text("import beside\n" + plugin.read_text())
    begun(plugin)
    (plugin.parent / "beside.py").write_text("A = 2\n")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be loaded: .*was edited .*start a new process"):
        run(Experiment.make(**VALUES, plugins=[str(plugin)]), out=plugin.parent / "another")
    assert not (plugin.parent / "another").exists()


def test_a_plugin_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^plugins: there is no file .*nowhere\.py; check the path$"):
        Experiment.make(**VALUES, plugins=[str(tmp_path / "nowhere.py")])


def test_code_that_moves_from_one_file_to_another_is_other_code(tmp_path: Path) -> None:
    mine, helper = tmp_path / "mine.py", tmp_path / "helper.py"
    mine.write_text("import helper\nlr = 1\n")
    helper.write_text("lr = 2\n")
    settings = {"plugins": [str(mine)]}
    joined = hashlib.sha256(mine.read_bytes() + helper.read_bytes()).hexdigest()
    before = own_code(settings)
    assert own_code(settings, {str(mine): joined}) == {str(mine): joined}  # as the version before wrote it
    mine.write_text("import helper\nlr = 1\nlr = 2\n")
    helper.write_text("")
    assert own_code(settings) != before
    mine.write_text("lr = 1\n")
    assert own_code(settings) == {str(mine): hashlib.sha256(b"lr = 1\n").hexdigest()}
