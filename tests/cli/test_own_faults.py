"""Faults in the user's own method or metric, met in the middle of a run: one sentence that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import potluck.core.method
from potluck.cli import app as cli

RUN = """\
data: {name: digits, samples: 100}
partition: {kind: iid, clients: 2}
models: [mlp-small]
method: METHOD
training: {rounds: 1, batch_size: 64}
engine: {device: cpu}
"""
METHOD = """\
import sys
from potluck import client_step
from potluck.methods import Local

class Mine(Local):
    name = "faulty"

    def round(self, server, clients):
        ROUND

    @client_step
    def work(self, client):
        STEP
"""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.core.method, "_registry", dict(potluck.core.method._registry))


def said(folder: Path, method: str, *words: str) -> tuple[int, str]:
    """The exit code and the last line of a run."""
    (folder / "small.yaml").write_text(RUN.replace("METHOD", method))
    command = ["run", str(folder / "small.yaml"), "--out", str(folder / "run"), *words]
    result = CliRunner().invoke(cli.app, command)
    return result.exit_code, result.stderr.strip().splitlines()[-1] if result.stderr else ""


@pytest.mark.parametrize(
    ("round_", "step", "sentence"),
    [
        ("sys.exit(3)", "pass", "line 9, in round: sys.exit ended the run in the middle"),
        ("clients.ask(self.work)", "sys.exit()", "line 13, in work: sys.exit ended the run in the middle"),
        (
            "clients.ask('work')",
            "pass",
            "clients.ask('work'): give a method under @client_step, such as self.",
        ),
        ("clients.ask(self.setup)", "pass", "setup): give a method under @client_step"),
        ("clients.ask([])", "pass", "clients.ask([]): name at least one step"),
    ],
)
def test_a_fault_in_a_method(tmp_path: Path, round_: str, step: str, sentence: str) -> None:
    (tmp_path / "mine.py").write_text(METHOD.replace("ROUND", round_).replace("STEP", step))
    code, words = said(tmp_path, "faulty", f"plugins=[{tmp_path / 'mine.py'}]")
    assert code == 2
    assert words.startswith(f"error: {tmp_path / 'mine.py'}, line ")
    assert sentence in words


def test_an_exit_in_a_metric(tmp_path: Path) -> None:
    counted = "import sys\ncalls = []\ndef mine(scores, labels):\n    calls.append(1)\n"
    (tmp_path / "metric.py").write_text(counted + "    return sys.exit() if len(calls) > 4 else 0.5\n")
    code, words = said(tmp_path, "local", f"metrics=[{tmp_path / 'metric.py'}:mine]")
    assert code == 2
    assert "in mine: sys.exit ended the run in the middle" in words
