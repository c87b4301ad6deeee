"""Observers of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RoundEnd:
    """What a watcher is told after a round."""

    round: int
    rounds: int
    accuracy: float | None
    loss: float | None
    seconds: float
    measure: str = "accuracy"  # what `accuracy` is a mean of: another measure, or scores of several tasks


class Watcher:
    """Somebody who looks on: a progress bar, a test. Does nothing by itself."""

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """A run starts, or goes on after `done` rounds."""

    def round(self, end: RoundEnd) -> None:
        """A round is over."""

    def advise(self, sentence: str) -> None:
        """Something the user should know before the run begins; others of a comparison may say the same."""
        self.notice(sentence)

    def notice(self, sentence: str) -> None:
        """Something the user should know."""

    def end(self, folder: Path) -> None:
        """The run is complete."""
