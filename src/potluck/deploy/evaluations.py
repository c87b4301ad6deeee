"""What a site was asked to measure in each round of a run, counted on its disk; a repeated question counts once."""

from __future__ import annotations

import json
from pathlib import Path

from potluck.deploy.record_files import read_own, write_own
from potluck.errors import RunError

SUFFIX = ".evaluations"  # of the file beside a record
REMEMBERED = 8  # rounds, the latest ones, whose questions are known; of others their number is


class Evaluations:
    """Counts the questions of a run by their rounds; the file is written with the first one."""

    def __init__(self, record: Path) -> None:
        self._file = record.with_suffix(SUFFIX)
        self._counted, self._known = _read(self._file)

    def number(self, round_: int, question: str) -> int:
        """The number of a question in a round: 0 if it was answered before."""
        if question in self._known.get(round_, ()):
            return 0
        return self._counted.get(round_, 0) + 1

    def note(self, round_: int, question: str) -> None:
        """Count a question, unless it is known; it is on disk when this returns."""
        if self.number(round_, question) == 0:
            return
        self._counted[round_] = self._counted.get(round_, 0) + 1
        self._known.setdefault(round_, []).append(question)
        latest = sorted(self._known)[-REMEMBERED:]
        self._known = {one: self._known[one] for one in latest}
        write_own(self._file, json.dumps({"counted": self._counted, "known": self._known}).encode())


def _read(file: Path) -> tuple[dict[int, int], dict[int, list[str]]]:
    if not file.exists() and not file.is_symlink():
        return {}, {}
    try:
        values = json.loads(read_own(file))
        counted = {int(round_): int(number) for round_, number in values["counted"].items()}
        return counted, {int(round_): [*map(str, known)] for round_, known in values["known"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{file} cannot be read: {error}; restore it, or start a new run") from error
