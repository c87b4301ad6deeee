"""How the values of a metric are shown: a share in percent, any other as a number; and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from potluck.core.metrics import common_facts, metric_facts
from potluck.report.format import hundredths, measured, metric_name, number, percent, points, signed

Stored = Mapping[str, Mapping[str, Any]]  # metric → its facts as a run folder keeps them


@dataclass(frozen=True)
class Measure:
    """What clients are judged by, in words, and how its values look."""

    name: str = "accuracy"
    is_share: bool = True
    higher_is_better: bool = True
    # Decimals of a value that is no share; None shows each with four digits.
    places: int | None = None

    @property
    def head(self) -> str:
        """The name as the head of a column: `accuracy %`, `R²`, `MSE ↓`; the arrow says that lower is better."""
        return f"{self.name}{' %' * self.is_share}{' ↓' * (not self.higher_is_better)}"

    @property
    def in_unit(self) -> str:
        """For titles of tables: `, in percent`, or nothing."""
        return ", in percent" if self.is_share else ""

    @property
    def with_unit(self) -> str:
        """The name in a sentence about numbers without a unit: `accuracy in percent`, `R²`."""
        return f"{self.name}{' in percent' * self.is_share}"

    @property
    def in_points(self) -> str:
        """For differences: ` in points`, or nothing."""
        return " in points" if self.is_share else ""

    @property
    def scale(self) -> float:
        """What a value is multiplied by in a picture."""
        return 100.0 if self.is_share else 1.0

    def value(self, value: float | None) -> str:
        """A value under a head that has the unit: 91.23, or 0.4123."""
        return hundredths(value) if self.is_share else number(value, self.places)

    def full(self, value: float | None) -> str:
        """A value with its unit: 91.23 %, or 0.4123."""
        return percent(value) if self.is_share else number(value, self.places)

    def difference(self, value: float | None) -> str:
        """A signed difference: +1.24 points, or +0.0124."""
        return points(value) if self.is_share else signed(value, self.places)

    def fitted(
        self, values: Iterable[float | None], deviations: Iterable[float | None], widths: Iterable[float] = ()
    ) -> Measure:
        """With as many decimals as two digits of the smallest deviation need, or of the smallest interval.

        Without either, the largest value has four digits. No value has more than five.
        """
        largest = max((abs(value) for value in values if value), default=0.0)
        if self.is_share or not math.isfinite(largest) or not largest:
            return self
        before = math.floor(math.log10(largest))
        spreads = [one for one in deviations if one] or [one for one in widths if one]
        wanted = 1 - math.floor(math.log10(min(spreads))) if spreads else 3 - before
        return replace(self, places=max(0, min(wanted, 4 - before)))

    def rank(self, value: float | None) -> float:
        """A sorting key that puts the best value first and None last."""
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self.higher_is_better else value

    def is_gain(self, difference: float) -> bool:
        """Whether a difference is one for the better."""
        return difference > 0 if self.higher_is_better else difference < 0


ACCURACY = Measure()


def measure_named(name: str, stored: Stored | None = None) -> Measure:
    """One metric; `stored` are the facts of metrics that this library does not know."""
    facts = metric_facts(name, stored)
    return Measure(metric_name(name), facts.is_share, facts.higher_is_better)


def measure_of(metrics: Mapping[str, str] | None, stored: Stored | None = None) -> Measure:
    """What all clients are judged by: `metrics` by client; where they differ, a share if all are."""
    names = sorted({*(metrics or {}).values()}) or ["accuracy"]
    facts = common_facts([metric_facts(name, stored) for name in names])
    return Measure(measured(metrics), facts.is_share, facts.higher_is_better)
