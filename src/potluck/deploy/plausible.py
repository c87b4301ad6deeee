"""Whether a client's report can be true: its metrics lie in their ranges, its counts below its samples.

Only of strangers: a simulation measures its clients itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from potluck.core.metrics import MetricFacts, metric_facts
from potluck.deploy.wire import Enrolment
from potluck.engine.protocol import Answer, Examination, Request

LARGEST = 1e100  # of any number in a report: what float32 can overflow to squared, and means stay finite
MEASURED = ("validation", "test")
NONE_ASKED = "it did not answer with the metrics asked for"


def implausible(
    order: Request | Examination,
    reply: Answer,
    enrolment: Enrolment,
    facts: Mapping[str, MetricFacts] | None = None,
) -> str:
    """A sentence if a reply's report cannot be true, else an empty string; `facts` are those of own metrics.

    Losses of training are not looked at here: `Acceptance` refuses those that are not finite, as it does tensors.
    """
    if isinstance(order, Examination):
        return _examined(order, reply, enrolment, facts or {})
    numbers = reply.report.metrics
    wrong = next((name for name, value in numbers.items() if not abs(value.item()) <= LARGEST), None)
    return "" if wrong is None else f"its report has {wrong!r}, which is not finite, or beyond all bounds"


def _examined(
    order: Examination, reply: Answer, enrolment: Enrolment, facts: Mapping[str, MetricFacts]
) -> str:
    """Every metric asked for and no other must be there, each in its range; all but `correct` may be undefined."""
    counts, told = enrolment.samples, enrolment.card.task.rules.told
    places = {f"{mode}/{split}": counts[split] for mode in order.modes for split in MEASURED if counts[split]}
    wanted = {f"{place}/{name}" for place in places for name in (*told, *order.metrics)}
    if set(reply.report.metrics) != wanted or reply.up:
        return NONE_ASKED
    for place, samples in places.items():
        for name in (*told, *order.metrics):
            value = reply.report.metrics[f"{place}/{name}"].item()
            known = facts.get(name) or metric_facts(name)
            if not _in_range(name, value, samples, known):
                return f"its {name} of {place} is {value:g}, which cannot be with {samples:,} samples"
    return ""


def _in_range(name: str, value: float, samples: int, facts: MetricFacts) -> bool:
    """Whether a number can be this metric. A sum of losses and a diverged model's errors may overflow."""
    if name == "correct":
        return 0 <= value <= samples and value == round(value)
    if math.isnan(value) or (value == math.inf and facts.high == math.inf):
        return True  # null in the log
    return facts.holds(value) and abs(value) <= LARGEST
