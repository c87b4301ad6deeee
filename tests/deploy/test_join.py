"""`potluck join` before it meets anybody: what would leave, and options that do not go together."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

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
        ("--server 127.0.0.1:1 --only half", "'half' is neither worker nor node"),
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
