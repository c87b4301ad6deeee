"""The logs of a run, followed as they grow: every line is read once, and only sums are kept."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from potluck.core.plain_values import printable
from potluck.errors import first_line
from potluck.files import opened
from potluck.live.status_file import LARGEST

CHUNK = 8 << 20  # bytes read at once
LONGEST = 1 << 20  # bytes of a line
SEAM = 64  # bytes before the place read last, by which a log is known again
RECENT = 20  # rounds, whose median says how long one takes: the first is slower
MOMENTS = ("after_aggregation", "after_training", "before")  # the headline is the first one logged
FAULTS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
MOST_ROUNDS = 10**9
LARGEST_SCORE = 1e100  # what is beyond is left out of a mean, as what is not finite
Key = tuple[str, str]  # moment, mode


class LogTail:
    """Hands on the lines that were added to a log since it was last read.

    A log that was cut, as when a run is resumed, or replaced is read again from its start, after `anew` was called.
    A line that cannot be understood is left out; `problem` names the first one.
    """

    def __init__(self, path: Path, take: Callable[[dict[str, Any]], None], anew: Callable[[], None]) -> None:
        self.path, self.take, self.anew = path, take, anew
        self.problem = ""
        self._place = self._line = 0
        self._seam = b""

    def read(self) -> None:
        """Read all whole lines that are new; the last one may still be on its way."""
        try:
            with opened(self.path, os.O_RDONLY) as handle:
                if not self._is_known(handle):
                    self._restart()
                while self._read_chunk(handle):
                    pass
        except FileNotFoundError:
            self._restart()
        except OSError as error:
            self.problem = f"{self.path} cannot be read: {error.strerror or error}"

    def _is_known(self, handle: int) -> bool:
        """Whether the log still has what was read of it."""
        return os.pread(handle, len(self._seam), self._place - len(self._seam)) == self._seam

    def _restart(self) -> None:
        if self._place:
            self.anew()
        self._place = self._line = 0
        self._seam, self.problem = b"", ""

    def _read_chunk(self, handle: int) -> bool:
        """Read some whole lines; False when there are no more."""
        data = os.pread(handle, CHUNK, self._place)
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            self._line += 1
            self._understand(line)
        self._place += end
        self._seam = (self._seam + data[:end])[-SEAM:]
        if not end and len(data) == CHUNK:  # no line of a log is so long
            self._blame("it is longer than any line of a log")
        return bool(end)

    def _understand(self, line: bytes) -> None:
        try:
            if len(line) > LONGEST:
                raise ValueError("it is longer than any line of a log")
            self.take(json.loads(line))
        except FAULTS as error:
            self._blame(f"{type(error).__name__}: {first_line(error)}")

    def _blame(self, why: str) -> None:
        self.problem = self.problem or printable(
            f"{self.path}, line {self._line} is damaged ({why}): repair or remove it", 300
        )


@dataclass
class Means:
    """The sums of one evaluated round, from which its means over clients follow."""

    scores: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum, clients
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, score: float | None, loss: float | None) -> None:
        """Add a client."""
        for sums, value in ((self.scores, score), (self.losses, loss)):
            if _counts(value):
                sums[0], sums[1] = sums[0] + value, sums[1] + 1

    @property
    def score(self) -> float | None:
        """The mean score; None where no client has one."""
        return self.scores[0] / self.scores[1] if self.scores[1] else None

    @property
    def loss(self) -> float | None:
        """The mean loss."""
        return self.losses[0] / self.losses[1] if self.losses[1] else None


class Evaluations:
    """What `metrics.jsonl` says: the mean over clients per round, and every client in the last one."""

    def __init__(self) -> None:
        self.rounds: dict[Key, dict[int, Means]] = {}
        self.last: dict[Key, tuple[int, dict[str, float]]] = {}
        self.metrics: set[str] = set()

    def take(self, line: Mapping[str, Any]) -> None:
        """Count a line; clients that were held out or not measured have no part in the mean."""
        if line.get("held_out") or "missing" in line:
            return
        key, round_ = (str(line["when"]), str(line.get("mode", "default"))), round_of(line["round"])
        test = line.get("test") or {}  # a client may have no test samples
        score = test.get("score", test.get("accuracy"))
        if score is not None:
            self.metrics.add(printable(str(test.get("metric", "accuracy"))))
        self.rounds.setdefault(key, {}).setdefault(round_, Means()).add(score, test.get("loss"))
        if _counts(score):
            if self.last.get(key, (0, {}))[0] != round_:
                self.last[key] = round_, {}
            self.last[key][1][printable(str(line["client"]))] = float(score)

    @property
    def headline(self) -> Key | None:
        """The moment and mode that a run is judged by, as in its report."""
        return min(self.rounds, key=lambda key: _rank(key[0]), default=None)


def round_of(value: Any) -> int:
    """A number of rounds, if a run can have so many."""
    if not 0 <= value <= MOST_ROUNDS:
        raise ValueError(f"no run has {str(value)[:20]} rounds")
    return int(value)


def _measured(value: Any) -> Any:
    """A number of bytes or seconds, if there can be so many; not a number is none."""
    if not 0 <= value < LARGEST:
        raise ValueError(f"{str(value)[:20]} is beyond all that is measured")
    return value


def _counts(value: Any) -> TypeGuard[float]:
    """Whether a score or loss has a part in a mean."""
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST_SCORE


def _rank(moment: str) -> int:
    return MOMENTS.index(moment) if moment in MOMENTS else len(MOMENTS)


class Traffic:
    """What `ledger.jsonl` says: bytes in each direction."""

    def __init__(self) -> None:
        self.bytes = {"up": 0, "down": 0}

    def take(self, line: Mapping[str, Any]) -> None:
        """Count a message."""
        self.bytes[line["direction"]] += int(_measured(line["bytes"]))


class Times:
    """What `timing.jsonl` says: how far the run is, and how long its rounds take."""

    def __init__(self) -> None:
        self.round = 0
        self.total = 0.0
        self.recent: list[float] = []

    def take(self, line: Mapping[str, Any]) -> None:
        """Count a round."""
        self.round, seconds = round_of(line["round"]), float(_measured(line["seconds"]))
        self.total += seconds
        self.recent = [*self.recent, seconds][-RECENT:]

    @property
    def seconds_per_round(self) -> float | None:
        """The median of the last rounds."""
        return statistics.median(self.recent) if self.recent else None


class RunLogs:
    """The three logs of a run folder, as far as they have grown."""

    def __init__(self, folder: Path) -> None:
        self.evaluations, self.traffic, self.times = Evaluations(), Traffic(), Times()
        self._tails = [
            self._tail(folder / "metrics.jsonl", "evaluations", Evaluations),
            self._tail(folder / "ledger.jsonl", "traffic", Traffic),
            self._tail(folder / "timing.jsonl", "times", Times),
        ]

    def _tail(self, path: Path, name: str, make: Callable[[], Any]) -> LogTail:
        return LogTail(path, lambda line: getattr(self, name).take(line), lambda: setattr(self, name, make()))

    def read(self) -> None:
        """Read what is new."""
        for tail in self._tails:
            tail.read()

    @property
    def problem(self) -> str:
        """What is wrong with the first log that is damaged."""
        return next((tail.problem for tail in self._tails if tail.problem), "")


def thinned(values: Iterable[tuple[int, Means]], most: int) -> list[tuple[int, Means]]:
    """At most so many rounds: the first, the last, and the best and the worst of every stretch between."""
    known = [*values]
    if len(known) <= most:
        return known
    kept = {0, len(known) - 1}
    step = 2 * len(known) / (most - 2)
    for place in range((most - 2) // 2):
        stretch = range(int(place * step), min(int((place + 1) * step), len(known)))
        kept |= {pick(stretch, key=lambda at: known[at][1].score or 0.0) for pick in (min, max)}
    return [known[place] for place in sorted(kept)]
