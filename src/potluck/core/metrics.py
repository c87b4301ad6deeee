"""What is known of a metric by its name: which way is better, and which values it can have."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MetricFacts:
    """The direction and the range of a metric. A share (0 to 1) is shown in per cent, any other as a number."""

    name: str
    higher_is_better: bool = True
    low: float = 0.0
    high: float = 1.0

    @property
    def is_share(self) -> bool:
        """Whether it is a fraction that can be shown in per cent."""
        return (self.low, self.high) == (0.0, 1.0)


# Every metric that is not named here is a share, and higher is better: accuracy, recall, F1, IoU and their kin.
KNOWN = {
    facts.name: facts
    for facts in (
        MetricFacts("loss", higher_is_better=False, high=math.inf),
        MetricFacts("mse", higher_is_better=False, high=math.inf),
        MetricFacts("mae", higher_is_better=False, high=math.inf),
        MetricFacts("r2", low=-math.inf),
    )
}


def metric_facts(name: str) -> MetricFacts:
    """The facts of a metric of this library."""
    return KNOWN.get(name, MetricFacts(name))
