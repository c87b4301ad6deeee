"""What the log of a served run says."""

from __future__ import annotations

from pathlib import Path

from potluck.deploy.logs import Log
from potluck.report.format import counted, percent
from potluck.runs.observers import Observer, RoundEnd


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
