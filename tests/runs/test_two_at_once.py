"""Two processes in one folder: one of them has it, and the other changes nothing there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import TINY, changed_experiment
from potluck.errors import RunError
from potluck.experiment.schema import Experiment
from potluck.files import read_json
from potluck.runs import api
from potluck.runs.api import resume, run
from potluck.runs.folder import LOCK, RunFolder

SHORT: dict[str, Any] = {"training": {"rounds": 2}, "checkpoint": {"every": 0}}


def experiment(**changes: Any) -> Experiment:
    return changed_experiment(TINY, SHORT | changes)


def at_first(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], Any]) -> None:
    """Let another process act when a function is called for the first time."""
    usual, done = getattr(where, name), list[bool]()

    def call(*given: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return usual(*given, **named)

    monkeypatch.setattr(where, name, call)


def test_a_run_that_another_process_began_meanwhile_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = experiment(method="fedproto", seed=7)
    usual = RunFolder.locked
    at_first(monkeypatch, RunFolder, "locked", lambda: run(other, out=tmp_path / "run"))
    with pytest.raises(RunError, match="exists; choose another folder, or go on with it"):
        run(experiment(), out=tmp_path / "run")
    monkeypatch.setattr(RunFolder, "locked", usual)
    assert read_json(tmp_path / "run" / "environment.json")["settings"]["method"]["name"] == "fedproto"
    assert RunFolder(tmp_path / "run").rounds_logged() == 2


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()

    def replaced() -> None:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / LOCK).touch()

    at_first(monkeypatch, RunFolder, "_lock", replaced)
    with pytest.raises(RunError, match="was removed or replaced by another process"):
        run(experiment(), out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


def test_a_run_that_goes_on_reads_nothing_before_it_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(experiment(), out=tmp_path / "run").folder

    def meanwhile() -> None:
        with pytest.raises(RunError, match="another process is at work"):
            resume(folder, rounds=5)

    at_first(monkeypatch, api, "check_trackers", meanwhile)
    resume(folder, rounds=3)
    assert read_json(folder / "environment.json")["settings"]["training"]["rounds"] == 3
    assert RunFolder(folder).rounds_logged() == 3
