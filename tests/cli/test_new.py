"""`potluck new method`: what it writes works as it is, and it overwrites nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck.cli.app import app
from potluck.core.method import registered

EXPERIMENT = """\
plugins: [my_method.py]
partition: {kind: iid, clients: 2}
models: [mlp-small]
method: my-method
training: {rounds: 1}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def potluck(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_what_is_written_passes_its_test_and_runs_as_a_plugin(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = potluck("new", "method", "my-method")
    assert made.exit_code == 0, made.output
    assert "python -m pytest test_my_method.py" in made.stdout
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_method.py"]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    (place / "mine.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr("potluck.core.method._registry", dict(registered()))
    assert potluck("run", "mine.yaml").exit_code == 0
    options = json.loads(potluck("explain", "my-method", "mine.yaml", "--options", "--json").stdout)
    assert {one["name"]: one["source"] for one in options["options"]}["weight"] == "ours"


def test_capitals_name_the_class_and_explain_finds_it_as_a_plugin(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert potluck("new", "method", "FedOurs").exit_code == 0
    text = (place / "fedours.py").read_text()
    assert "class FedOurs(Method):" in text
    assert 'name = "fedours"' in text
    assert "--plugin FILE.py" in potluck("explain", "fedours").stderr
    monkeypatch.setattr("potluck.core.method._registry", dict(registered()))
    listed = json.loads(potluck("methods", "--plugin", "fedours.py", "--json").stdout)
    assert "fedours" in [one["name"] for one in listed]
    explained = potluck("explain", "fedours", "--plugin", "fedours.py", "--json")
    assert json.loads(explained.stdout)["method"] == "fedours"


def test_a_plugin_that_is_not_there_is_told(place: Path) -> None:
    result = potluck("methods", "--plugin", "gone.py")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: plugins: there is no file gone.py; check the path\n",
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("method", "My Method"), "'My Method' cannot be a method's name; use letters"),
        (("method", "class"), "'class' cannot be a method's name"),
        (("method", "../escape"), "cannot be a method's name"),
        (("method", "\u017ftuff"), "cannot be a method's name"),  # a long s, an s in capitals
        (("method", "FedAvg"), "there is a method 'FedAvg' already"),
        (("method", "fedavg"), "there is a method 'fedavg' already"),
        (("method", "torch"), "torch.py would hide the module 'torch'"),
        (("model", "mine"), "potluck new makes methods, not 'model'; write: potluck new method NAME"),
    ],
)
def test_bad_names_are_refused(place: Path, words: tuple[str, str], sentence: str) -> None:
    result = potluck("new", *words)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("there", ["mine_too.py", "test_mine_too.py"])
def test_nothing_is_overwritten(place: Path, there: str) -> None:
    (place / there).write_text("kept")
    result = potluck("new", "method", "mine-too")
    assert result.exit_code == 2
    assert f"{there} is there already" in result.stderr
    assert [path.read_text() for path in place.iterdir()] == ["kept"]
