"""`potluck join` before it meets anybody: what would leave, and options that do not go together."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import potluck.core.method
import potluck.methods  # registers them, before a test keeps its own to itself
from potluck.cli.app import app

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals"


def join(*words: str) -> Result:
    return CliRunner().invoke(app, ["join", "--client", "north", *words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--server is missing"),
        ("--server 127.0.0.1:1", "--model and --data are missing"),
        ("--server 127.0.0.1:1 --only node", "--only needs --socket"),
        ("--server 127.0.0.1:1 --only half", "'half' is no half of a site; give worker or node"),
        ("--check none.yaml --model a.py:f --data a.py:g", "there is no experiment file none.yaml"),
        ("--server 127.0.0.1:1 --write contract.json", "--write goes with --check"),
    ],
)
def test_wrong_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = join(*words.split())
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_check_joins_nobody_and_writes_what_it_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shutil.copytree(HOSPITALS, tmp_path / "h")
    monkeypatch.chdir(here)
    runpy.run_path("make_data.py", run_name="__main__")
    site = ["--model", "north/site.py:build", "--data", "north/site.py:load"]
    done = join("--check", "experiment.yaml", *site, "--write", "contract.json", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)
    assert json.loads((here / "contract.json").read_text())["method"] == "fedmrl"
    (here / "contract.json").write_text("edited")
    again = join("--check", "experiment.yaml", *site, "--write", "contract.json")
    assert (again.exit_code, (here / "contract.json").read_text()) == (2, "edited")
    assert "contract.json exists; move it away, or write the agreement to another file" in again.stderr


OFFER = """
partition: {sites: [north, east], classes: 10}
models: {pool: {north: conv-small, east: conv-small}, rep_dim: 16}
"""
THEIRS = "from potluck.methods import Local\n\n\nclass Theirs(Local):\n    name = 'theirs'\n"
OWN = "def build():\n    pass\n\n\ndef load():\n    raise ValueError('the offer is taken')\n"


@pytest.mark.parametrize(
    ("offer", "own", "sentence"),
    [
        (
            "plugins: [evil.py]\nmethod: theirs",
            OWN,
            "then import a copy of it in the file of --model",
        ),
        ("plugins: [evil.py]\nmethod: theirs", f"import theirs\n\n\n{OWN}", "the offer is taken"),
        ("plugins: [evil.py]\nmethod: fedmrl", OWN, "the offer is taken"),
        (
            "method: {name: fedmrl, weight_small: 'evil:weigh'}",
            OWN,
            "a site runs no code but its own",
        ),
    ],
    ids=["unknown", "brought", "idle", "option"],
)
def test_a_check_runs_no_code_that_the_operator_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offer: str, own: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))
    files = {"experiment.yaml": OFFER + offer, "evil.py": "open('ran', 'w').close()", "theirs.py": THEIRS}
    for name, text in {**files, "own.py": own}.items():
        Path(name).write_text(text)
    site = ["--client", "north", "--model", "own.py:build", "--data", "own.py:load"]
    done = CliRunner().invoke(app, ["join", *site, "--check", "experiment.yaml"])
    assert not Path("ran").exists()
    assert done.exit_code == 2
    assert sentence in done.output
