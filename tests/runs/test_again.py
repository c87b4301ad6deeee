"""What a report says under "Again" works as it stands, for every way a run can be made."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import potluck
import potluck.core.method
from potluck.cli.app import app
from potluck.errors import RunError
from potluck.experiment.schema import Experiment
from potluck.methods import Local
from potluck.report.again import again, to_go_on
from potluck.runs.folder import RunFolder

VALUES: dict[str, Any] = {
    "name": "tiny",
    "data": {"name": "digits", "samples": 200},
    "partition": {"kind": "iid", "clients": 2},
    "models": ["mlp-small"],
    "method": "local",
    "training": {"rounds": 1},
    "engine": {"device": "cpu"},
}
PLUGIN = """
from potluck.methods import Local

class Again(Local):
    name = "again"
"""


def shown(folder: Path) -> list[str]:
    """The lines under "Again" in the report of a run, without their comments."""
    text = (folder / "report.html").read_text()
    block = re.search(r"<pre[^>]*>.*?</pre>", text[text.index("Typed where") :], re.DOTALL)
    assert block is not None
    lines = []
    for line in ElementTree.fromstring(block[0]):
        comment = line.find("i")
        if comment is not None:
            line.remove(comment)
        lines.append("".join(line.itertext()))
    return [line for line in lines if line.strip()]


def type_all(lines: list[str]) -> None:
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "potluck"
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}: {result.output}"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))


def test_a_run_of_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    potluck.run(**VALUES, out="my results/first run")
    type_all(shown(Path("my results/first run")))
    assert potluck.resume("runs/tiny").summary["rounds"] == 1


@pytest.mark.usefixtures("registry")
def test_a_run_with_a_plugin_and_an_index_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    Path("again.py").write_text(PLUGIN)
    experiment = Experiment.make(**VALUES)
    experiment.make_split(experiment.load_data()).save("split.json")
    values = VALUES | {"method": "again", "plugins": ["again.py"], "partition": {"file": "split.json"}}
    folder = potluck.run(**values).folder
    monkeypatch.chdir(tmp_path)
    type_all([line.replace(str(folder), f"home/{folder}") for line in shown(home / folder)])


def test_a_run_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)
    )
    experiment = potluck.Experiment.make(**VALUES | {"models": [net]})
    folder = potluck.run(experiment).folder
    lines = shown(folder)
    assert any("experiment=experiment" in line for line in lines)
    exec("\n".join(lines), {"experiment": experiment})
    assert len((folder / "timing.jsonl").read_text().splitlines()) == 2
    assert Path("runs/tiny-again/report.html").exists()
    with pytest.raises(
        RunError, match=r"exists; .* go on with it: potluck\.resume\('runs/tiny', experiment="
    ):
        potluck.run(experiment, out=folder)
    with pytest.raises(RunError, match="was run from Python with models or data of its own"):
        potluck.resume(folder)


@pytest.mark.usefixtures("registry")
def test_a_run_of_names_that_a_program_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Local):
        name = "mine-alone"

    monkeypatch.chdir(tmp_path)
    folder = potluck.run(**VALUES | {"method": "mine-alone"}).folder
    exec("\n".join(shown(folder)), {})
    assert len((folder / "timing.jsonl").read_text().splitlines()) == 2
    potluck.core.method._registry.pop("mine-alone")
    with pytest.raises(RunError, match="uses the method mine-alone, which a Python program registered"):
        potluck.resume(folder)


def test_a_federation_of_sites_is_served(tmp_path: Path) -> None:
    lines = again(tmp_path, {"partition": {"sites": ["north", "south"]}}, {})
    assert [line for line, _ in lines] == [f"potluck resume {tmp_path}"]


def test_advice_with_a_path_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, typed in {"my data *": "'my data *'", "-rf": "./-rf", "a $(b)": "'a $(b)'"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
        with pytest.raises(RunError, match=re.escape(f"(rm -r {typed})")):
            RunFolder.begun(Path(name))
        assert to_go_on(Path(name), portable=True) == f"potluck resume {typed}"
