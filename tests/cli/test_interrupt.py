"""Runs that are stopped: by Ctrl-C at any point, by a polite signal, by a cut of the power."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from potluck.cli import app as cli
from potluck.cli.exits import end_on_signals, explained
from potluck.engine.runner import StoringEngine, TransactionRunner
from potluck.experiment.schema import Experiment
from potluck.live.status_file import read_status
from potluck.runs.api import resume, run
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted
from potluck.runs.observers import Observer
from potluck.signals import held_back

SMALL = """\
name: small
data: digits
partition: {kind: iid, clients: 2, test: 0.9}
models: [mlp-small]
method: fedavg
training: {rounds: 20, batch_size: 16}
checkpoint: {every: 0}
"""
LOGS = ("metrics.jsonl", "ledger.jsonl")


def logs(folder: Path) -> list[bytes]:
    return [(folder / log).read_bytes() for log in LOGS]


# --- signals held back ----------------------------------------------------------------------------------


def work(steps: list[str], depth: int = 1) -> None:
    """Something that must not be cut in two, with Ctrl-C pressed in the middle."""
    with held_back():
        if depth > 1:
            work(steps, depth - 1)
        else:
            signal.raise_signal(signal.SIGINT)
        steps.append("still here")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_signal_waits_until_the_outermost_block_is_done(depth: int) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work(steps, depth)
    assert steps == ["still here"] * depth
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_can_be_forgotten() -> None:
    with held_back(forget=True):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_ends_a_command_waits(number: signal.Signals) -> None:
    """A terminal that is closed sends SIGHUP; half a round in the logs would be the end of the run."""
    came, before = list[int](), signal.signal(number, lambda received, frame: came.append(received))
    try:
        with held_back():
            signal.raise_signal(number)
            assert came == []
        assert came == [number]
        with held_back(forget=True):
            signal.raise_signal(number)
        assert came == [number]
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so_and_takes_no_other_away() -> None:
    """Under nohup a closed terminal changes nothing; a SIGTERM after it must still end the run."""
    came, before = list[int](), {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda received, frame: came.append(received))
    try:
        with held_back():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # a process started here inherits this
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_of_two_signals_that_waited_both_come() -> None:
    came, numbers = list[int](), (signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.signal(one, lambda received, frame: came.append(received)) for one in numbers}
    try:
        with held_back():
            for one in (*numbers, *numbers):
                signal.raise_signal(one)
        assert came == [*numbers]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_no_signal_is_lost_when_another_comes_while_handlers_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, came = signal.signal, list[int]()
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    real(signal.SIGTERM, lambda received, frame: came.append(received))

    def put(number: signal.Signals, handler: Any) -> Any:
        done = real(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            signal.raise_signal(number)
        return done

    monkeypatch.setattr(signal, "signal", put)
    try:
        with pytest.raises(KeyboardInterrupt), held_back():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        for one, handler in before.items():
            real(one, handler)


class Removed:
    """Gets a signal while it is removed, where Python drops exceptions."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_falls_into_the_removal_of_an_object_comes_again(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    end_on_signals()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT012
            Removed(number)
            time.sleep(10)
        assert explained(caught.value) == ("stopped", 128 + number)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


# --- Ctrl-C inside a run --------------------------------------------------------------------------------


class Interrupter:
    """Presses Ctrl-C before or after the n-th of some calls."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._count()
            result = function(*arguments, **options)
            self._count()
            return result

        return counted


def test_wherever_ctrl_c_falls_the_end_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment.make(
        data="digits",
        partition={"kind": "iid", "clients": 2, "test": 0.9},
        models=["mlp-small"],
        method="local",
        training={"rounds": 2, "batch_size": 64},
    )
    presser = Interrupter()
    steps = [
        (TransactionRunner, "serve"),
        (StoringEngine, "settle"),
        (RunFolder, "append"),
    ]
    for owner, name in steps:
        monkeypatch.setattr(owner, name, presser.around(getattr(owner, name)))
    whole = logs(run(experiment, out=tmp_path / "whole").folder)
    points = presser.calls
    assert points > 30
    for at in range(1, points + 1, 4):
        presser.calls, presser.at = 0, at
        with pytest.raises(Interrupted):
            run(experiment, out=tmp_path / str(at))
        presser.at = 0
        resume(tmp_path / str(at))
        assert logs(tmp_path / str(at)) == whole, f"stopped at call {at} of {points}"


@pytest.mark.parametrize("log", ["ledger.jsonl", "timing.jsonl"])
def test_a_terminal_that_is_closed_leaves_no_half_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    experiment = Experiment.make(
        data="digits",
        partition={"kind": "iid", "clients": 2, "test": 0.9},
        models=["mlp-small"],
        method="fedavg",
        training={"rounds": 2, "batch_size": 64},
    )
    whole = logs(run(experiment, out=tmp_path / "whole").folder)
    append = RunFolder.append

    def closed(self: RunFolder, name: str, lines: Any) -> None:
        append(self, name, lines)
        if name == log and self.rounds_logged() == (2 if log == "timing.jsonl" else 1):
            signal.raise_signal(signal.SIGHUP)

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(RunFolder, "append", closed)
    try:
        end_on_signals()
        with pytest.raises(Interrupted):
            run(experiment, out=tmp_path / "closed")
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    monkeypatch.undo()
    resume(tmp_path / "closed")
    assert logs(tmp_path / "closed") == whole


# --- processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The logs of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.yaml").write_text(SMALL)
    assert potluck("run", str(folder / "small.yaml"), "--out", str(folder / "run")) == 0
    return logs(folder / "run")


def potluck(*words: str) -> int:
    return CliRunner().invoke(cli.app, list(words)).exit_code


def stopped_by(number: signal.Signals, folder: Path) -> tuple[int, str]:
    """Begin a run in a process of its own and stop it after its first round; its exit code and last words.

    Ctrl-C is pressed once more when the last words are said, while the process ends.
    """
    (folder / "small.yaml").write_text(SMALL)
    words = [sys.executable, "-m", "potluck", "run", "small.yaml", "--out", "a run"]
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = folder / "a run" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.01)
    process.send_signal(number)
    assert process.stderr is not None
    last = next((line.strip() for line in process.stderr if line.startswith("stopped")), "")
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (out, err) == ("", "")
    return process.returncode, last


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_process_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[bytes], number: signal.Signals, code: int
) -> None:
    ended, words = stopped_by(number, tmp_path)
    assert ended == code
    assert words == "stopped; continue with: potluck resume 'a run'"
    monkeypatch.chdir(tmp_path)
    assert potluck(*shlex.split(words.partition("potluck ")[2])) == 0
    assert logs(tmp_path / "a run") == whole


@pytest.mark.parametrize("place", ["_show", "conclude"])
def test_a_run_that_was_complete_is_not_to_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C falls into the printing, or into what trackers do at the end."""

    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    if place == "_show":
        monkeypatch.setattr("potluck.cli.run._show", stopped)
    else:
        monkeypatch.setattr("potluck.cli.run._with_end", lambda watcher, end: Stopping())
    done = CliRunner().invoke(cli.app, ["run", "small.yaml", "training.rounds=1", "--out", "a"])
    assert done.exit_code == 130
    assert done.output.splitlines()[-1] == "stopped; the run is complete, see a"
    assert read_status(tmp_path / "a")["state"] == "finished"


class Stopping(Observer):
    """Ctrl-C is pressed while an observer is told of the end."""

    def end(self, folder: Path) -> None:
        raise KeyboardInterrupt


def test_a_killed_process_can_be_resumed(tmp_path: Path, whole: list[bytes]) -> None:
    ended, _ = stopped_by(signal.SIGKILL, tmp_path)
    assert ended == -signal.SIGKILL
    assert potluck("resume", str(tmp_path / "a run")) == 0
    assert logs(tmp_path / "a run") == whole


def test_sigterm_between_the_runs_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SMALL)
    words = ["compare", "small.yaml", "training.rounds=1", "--methods", "fedavg,fedprox", "--out"]
    command = [sys.executable, "-m", "potluck", *words, "stopped"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not Path("stopped/local-seed0/summary.json").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (143, "")
    assert err.splitlines()[-1] == f"stopped; continue with: potluck {shlex.join([*words, 'stopped'])}"
    assert time.monotonic() - asked < 30  # a few seconds where nothing else runs
    assert not Path("stopped/comparison.json").exists()
    for folder in ("stopped", "whole"):
        assert potluck(*words, folder) == 0
    runs = sorted(path.name for path in Path("whole").glob("*-seed*"))
    assert len(runs) == 3
    for run_ in runs:
        assert logs(Path("stopped", run_)) == logs(Path("whole", run_)), run_
