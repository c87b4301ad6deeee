"""The logs of a run, written round by round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from potluck.engine.evaluation.examined import Examined
from potluck.runs.folder import RunFolder
from potluck.runs.observers.base import Observer, RoundEnd
from potluck.runs.predictions import write_predictions


class RoundLogs(Observer):
    """Adds a round to `metrics.jsonl`, `ledger.jsonl`, `timing.jsonl` and `observations.jsonl`.

    Predictions, where they are kept, are files of their own; `only_last` leaves those of the newest round alone.
    """

    def __init__(self, folder: RunFolder, only_last: bool = True) -> None:
        self.folder, self.only_last = folder, only_last

    def round(self, end: RoundEnd) -> None:
        """Write all lines of a round; few methods observe anything, so that file may never come to be."""
        self.evaluation(end.round, end.examined, end.ledger)
        timing = {name: round(seconds, 6) for name, seconds in end.timing.items()}
        self.folder.append("timing.jsonl", [{"round": end.round, **timing}])
        if end.observations:
            self.folder.append("observations.jsonl", end.observations)

    def evaluation(
        self, round_: int, examined: Sequence[Examined], ledger: Iterable[Mapping[str, Any]]
    ) -> None:
        """Write what clients measured in a round, and what was sent."""
        write_predictions(self.folder.path, round_, examined, self.only_last)
        lines = [line for found in examined for line in (*found.lines, *found.missing)]
        self.folder.append("metrics.jsonl", lines)
        self.folder.append("ledger.jsonl", ledger)
