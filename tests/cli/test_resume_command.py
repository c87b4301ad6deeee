"""`potluck resume` with more rounds, on other hardware, of foreign folders; `potluck explain` with plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import potluck.core.method
from potluck.cli.app import app

FILE = """
name: tiny
data: {name: digits, samples: 200}
partition: {kind: iid, clients: 2}
models: [mlp-small]
method: local
training: {rounds: 1}
engine: {device: cpu}
"""
PLUGIN = """
import potluck
from pydantic import Field
from potluck.methods import Local

class Mine(Local):
    name = "mine-to-explain"

    class Config(Local.Config):
        strength: float = Field(default=1.0, description="how strong")
"""


def potluck_command(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))
    Path("tiny.yaml").write_text(FILE)


def refused(*words: Any) -> str:
    result = potluck_command(*words)
    assert result.exit_code == 2, result.output
    return result.output


def test_resume_takes_rounds_and_engine_settings() -> None:
    assert potluck_command("run", "tiny.yaml").exit_code == 0
    assert potluck_command("run", "tiny.yaml", "training.rounds=2", "--out", "long").exit_code == 0
    already = "the run was finished already; --rounds N gives it more rounds"
    assert already in potluck_command("resume", "runs/tiny").stderr
    result = potluck_command("resume", "runs/tiny", "engine.workers=1", "--rounds", 2, "--json")
    assert result.exit_code == 0, result.output
    assert already not in result.stderr
    assert json.loads(result.stdout)["rounds"] == 2
    for log in ("metrics.jsonl", "ledger.jsonl"):
        assert Path("runs/tiny", log).read_bytes() == Path("long", log).read_bytes()
    assert "has 2 rounds already" in refused("resume", "runs/tiny", "--rounds", 1)
    assert "another training.optimizer.lr: 0.01 there, 1.0 now" in refused(
        "resume", "runs/tiny", "training.optimizer.lr=1"
    )
    assert "it has no environment.json" in refused("resume", "runs")


def test_explain_knows_the_methods_of_a_file() -> None:
    Path("mine.py").write_text(PLUGIN)
    Path("tiny.yaml").write_text(FILE + "plugins: [mine.py]\n")
    result = potluck_command("explain", "mine-to-explain", "tiny.yaml", "method.strength=2")
    assert result.exit_code == 0, result.output
    assert "mine-to-explain" in result.output


def test_plugins_that_are_no_list_are_refused() -> None:
    Path("tiny.yaml").write_text(FILE + "plugins: mine.py\n")
    assert "plugins: give a list of files or modules" in refused("run", "tiny.yaml")
