"""Losses, errors and R² that strangers tell of themselves: they have no end, so that one lie decides a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from potluck.core.card import ClientId
from potluck.core.metrics import MetricFacts, metric_facts
from potluck.engine.evaluation.examined import Line
from potluck.engine.evaluation.settings import SPLITS

TIMES = 1e9  # the median, or 1, of those with the same measures; a diverged model's loss is below
ENOUGH = 3  # measured clients, so that one of them does not decide the median
LARGEST = torch.finfo(torch.float32).max  # a mean over samples, each of which a model computes in float32
BESIDE = ("score", "metric", "samples")  # what a split has beside its measures
ABOUT = ("round", "client")  # what a line of `observations.jsonl` has beside its numbers


class _Found(NamedTuple):
    """A number in a log line, and the numbers that it is compared with."""

    client: ClientId
    part: dict[str, Any]
    name: str
    peers: tuple[Any, ...]
    undefined: bool = False  # whether it may be null


class UnboundedNumbers:
    """Takes numbers out of log lines that are far beyond those of all others, and says whose were not finite."""

    def __init__(self, facts: Mapping[str, MetricFacts], notice: Callable[[str], None]) -> None:
        self.facts, self.notice = facts, notice
        self._told: set[tuple[ClientId, str]] = set()

    def judge(self, round_: int, lines: Sequence[Line]) -> list[Line]:
        """The lines with null in the place of what has no part in a mean; the user hears of each client once."""
        copies = [{**line, **{split: {**line[split]} for split in SPLITS if split in line}} for line in lines]
        self._judge(round_, [*self._numbers(copies)])
        return copies

    def judge_observed(self, round_: int, lines: Sequence[Line]) -> list[Line]:
        """The same of the lines of `observations.jsonl`."""
        copies = [{**line} for line in lines]
        found = [
            _Found(line["client"], line, name, (name,))
            for line in copies
            for name in line
            if name not in ABOUT
        ]
        self._judge(round_, found)
        return copies

    def _judge(self, round_: int, found: Sequence[_Found]) -> None:
        bounds = _bounds(found)
        for one in found:
            value = one.part[one.name]
            if value is None and not one.undefined:
                self._say(round_, one, "not finite")
            elif value is not None and abs(value) > bounds[one.peers]:
                self._say(round_, one, f"{value:.3g}, far beyond all others")
                self._take_out(one)

    def _numbers(self, lines: Sequence[Line]) -> Iterator[_Found]:
        for line in lines:
            for split in SPLITS:
                part = line.get(split, {})
                kind = tuple(sorted(part))  # tasks that measure other things have losses of other sizes
                for name in (name for name in part if self._is_open(name)):
                    peers, undefined = (line["mode"], split, kind, name), not self._should_be_finite(name)
                    yield _Found(line["client"], part, name, peers, undefined)

    def _is_open(self, name: str) -> bool:
        facts = self.facts.get(name) or metric_facts(name)
        return name not in BESIDE and not (math.isfinite(facts.low) and math.isfinite(facts.high))

    def _should_be_finite(self, name: str) -> bool:
        """R² is undefined for some samples; of own metrics it is said elsewhere."""
        return name not in self.facts and math.isfinite(metric_facts(name).low)

    def _take_out(self, one: _Found) -> None:
        one.part[one.name] = None
        if one.part.get("metric") == one.name:
            one.part["score"] = None

    def _say(self, round_: int, one: _Found, what: str) -> None:
        if (one.client, one.name) not in self._told:
            self._told.add((one.client, one.name))
            self.notice(
                f"round {round_}: the {one.name} of client {one.client} is {what}: it is null in the log and has "
                "no part in means"
            )


def _bounds(found: Sequence[_Found]) -> dict[tuple[Any, ...], float]:
    """The largest number of each measure that is believed."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for one in found:
        known = values.setdefault(one.peers, [])
        if one.part[one.name] is not None:
            known.append(abs(one.part[one.name]))
    return {
        peers: min(LARGEST, TIMES * max(1.0, median(known)) if len(known) >= ENOUGH else LARGEST)
        for peers, known in values.items()
    }
