"""What clients measured at one moment of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.core.card import ClientId
from potluck.core.metrics import MetricFacts, common_facts, metric_facts
from potluck.engine.evaluation.predictions import Predictions
from potluck.engine.evaluation.settings import SPLITS, Moment

Line = dict[str, Any]  # one line of a log


@dataclass(frozen=True)
class Examined:
    """What clients measured at one moment of a round.

    `lines` are those of `metrics.jsonl`: one per client and mode, the reported mode first.
    """

    round: int
    when: Moment
    lines: tuple[Line, ...]
    predictions: tuple[Predictions, ...] = ()  # where the settings keep them
    own: Mapping[str, MetricFacts] = field(default_factory=dict)  # facts of the experiment's own metrics
    missing: tuple[Line, ...] = ()  # a line for every client and mode that was to be measured and was not

    @property
    def absent(self) -> dict[ClientId, str]:
        """Who was to be measured and was not, and why."""
        return {line["client"]: line["missing"] for line in self.missing}

    def facts(self, metric: str | None = None) -> MetricFacts:
        """Direction and range of a metric, by default of what the clients are judged by."""
        parts = [line[split] for line in self.lines for split in SPLITS if split in line]
        judges = dict.fromkeys(str(part.get("metric", "accuracy")) for part in parts)
        names = judges if metric is None else [metric]
        return common_facts([self.own.get(name) or metric_facts(name) for name in names])

    def parts(self, split: str = "test", mode: str | None = None) -> dict[ClientId, Line]:
        """The measures of each client that has rows of a split, in the reported mode or another one."""
        mode = self.lines[0]["mode"] if mode is None and self.lines else mode
        return {line["client"]: line[split] for line in self.lines if line["mode"] == mode and split in line}

    def scores(self, split: str = "test", mode: str | None = None) -> dict[ClientId, float]:
        """The score of each client that has one: its accuracy, or what its task is judged by."""
        found = {client: score_of(part) for client, part in self.parts(split, mode).items()}
        return {client: score for client, score in found.items() if score is not None}


def score_of(part: Mapping[str, Any]) -> float | None:
    """What a client is judged by in one split of the log: its accuracy, or the score of its task."""
    value: float | None = part.get("score", part.get("accuracy"))
    return value
