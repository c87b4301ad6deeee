"""What a site was asked to measure in each round of a run, counted on its disk; a repeated question counts once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.deploy.record_files import read_own, write_own
from potluck.errors import RunError
from potluck.files import with_checksum, without_checksum

SUFFIX = ".evaluations"  # of the file beside a record
KEYS = ("counted", "known")
REMEMBERED = 8  # rounds, the latest ones, whose questions are known; of others their number is

Counts = tuple[dict[int, int], dict[int, list[str]]]  # how many questions a round had, and the latest ones


class Evaluations:
    """Counts the questions of a run by their rounds; the file is written with the first one.

    What counts is what the disk has: where a question could not be written down, the file is read again.
    """

    def __init__(self, record: Path) -> None:
        self._file = record.with_suffix(SUFFIX)
        self._read: Counts | None = _read(self._file)

    def number(self, round_: int, question: str) -> int:
        """The number of a question in a round: 0 if it was answered before."""
        counted, known = self._counts()
        return 0 if question in known.get(round_, ()) else counted.get(round_, 0) + 1

    def note(self, round_: int, question: str) -> None:
        """Count a question, unless it is known; it is on disk when this returns."""
        number = self.number(round_, question)
        if number == 0:
            return
        counted, known = self._counts()
        asked = {**known, round_: [*known.get(round_, ()), question]}
        latest = sorted(asked)[-REMEMBERED:]
        counts = {**counted, round_: number}, {one: asked[one] for one in latest}
        self._read = None
        write_own(self._file, json.dumps(with_checksum(dict(zip(KEYS, counts, strict=True)))).encode())
        self._read = counts

    def _counts(self) -> Counts:
        """What the disk has. Where it was not sure, it is written again before anything is answered."""
        if self._read is None:
            counts = _read(self._file)
            if counts[0]:
                write_own(self._file, read_own(self._file))
            self._read = counts
        return self._read


def _read(file: Path) -> Counts:
    if not file.exists() and not file.is_symlink():
        return {}, {}
    try:
        values = _checked(json.loads(read_own(file)))
        counted = {int(round_): int(number) for round_, number in values["counted"].items()}
        return counted, {int(round_): [*map(str, known)] for round_, known in values["known"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise RunError(f"{file} cannot be read: {error}; restore it, or start a new run") from error


def _checked(values: Any) -> Mapping[str, Any]:
    """What was counted. Earlier versions wrote no checksum: such a file has these two keys alone."""
    return values if isinstance(values, dict) and values.keys() == {*KEYS} else without_checksum(values)
