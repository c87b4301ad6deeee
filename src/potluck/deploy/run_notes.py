"""Observers of a served run: what its status shows, and what its log says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from potluck.deploy.logs import Log
from potluck.deploy.status import Board
from potluck.report.format import counted, percent
from potluck.runs.observers import Observer, RoundEnd


class BoardNotes(Observer):
    """Writes on the board how far the run is, and what was said last."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """The rounds begin."""
        board = self.board
        board.state, board.name, board.method, board.rounds, board.round = (
            "playing",
            name,
            method,
            rounds,
            done,
        )

    def round(self, end: RoundEnd) -> None:
        """Count the round; who dropped out after its answer had come is known only now."""
        self.board.round = end.round
        for client, reason in end.failures.items():
            self.board.dropped(client, reason)

    def notice(self, sentence: str) -> None:
        """Keep it."""
        self.board.say(sentence)


@contextlib.contextmanager
def lasting(board: Board) -> Iterator[None]:
    """Note how a run ends: by itself, or before its end."""
    try:
        yield
    except BaseException:
        board.state = "stopped"
        raise
    board.state = "finished"


class LogLines(Observer):
    """Tells of a run in lines of a log, each with the time and the round."""

    def __init__(self, log: Log) -> None:
        self.log, self._round = log, 0

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """The rounds begin, or go on."""
        self._round = done
        onward = f", going on after round {done}" if done else ""
        self.log(
            f"{name} ({method}): {counted(rounds, 'round')}{onward}", round=done, rounds=rounds, method=method
        )

    def round(self, end: RoundEnd) -> None:
        """A round is over."""
        self._round = end.round
        score = end.accuracy
        known = ""
        if score is not None:
            known = f", {end.measure} {percent(score) if end.is_share else format(score, '.4g')}"
        out = f", without {', '.join(end.failures)}" if end.failures else ""
        self.log(
            f"round {end.round}/{end.rounds}{known}, {end.seconds:.1f} s{out}",
            round=end.round,
            rounds=end.rounds,
            score=score,
            seconds=round(end.seconds, 3),
            without=sorted(end.failures) or None,
        )

    def notice(self, sentence: str) -> None:
        """Something the operator should know."""
        self.log(sentence, round=self._round)

    def end(self, folder: Path) -> None:
        """The run is complete."""
        self.log(f"finished: {folder}", round=self._round)
