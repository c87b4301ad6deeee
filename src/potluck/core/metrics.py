"""What is known of a metric by its name: which way is better, and which values it can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from potluck.errors import ConfigError
from potluck.front_door import front_door

F = TypeVar("F", bound=Callable[..., Any])
Takes = Literal["scores", "probabilities", "answers"]
SLACK = 1e-5  # by how much rounding may take a metric out of its range
DECLARED = "potluck_metric"  # the attribute of a function that `metric` has decorated


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

    def holds(self, value: float) -> bool:
        """Whether a value is in the range, up to rounding."""
        return self.low - SLACK <= value <= self.high + SLACK

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target, or better."""
        return value >= target if self.higher_is_better else value <= target

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON can hold them: an end that is open is None."""
        ends = {
            name: end if math.isfinite(end) else None
            for name, end in (("low", self.low), ("high", self.high))
        }
        return {"higher_is_better": self.higher_is_better, **ends}

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> MetricFacts:
        """The inverse of `to_json`."""
        low, high = value.get("low"), value.get("high")
        return cls(
            name,
            bool(value["higher_is_better"]),
            -math.inf if low is None else float(low),
            math.inf if high is None else float(high),
        )


ACCURACY = MetricFacts("accuracy")

# Every metric that is not named here is a share, and higher is better: accuracy, recall, F1, IoU and their kin.
KNOWN = {
    facts.name: facts
    for facts in (
        *(
            MetricFacts(name, higher_is_better=False, high=math.inf)
            for name in (
                "loss",
                "log_loss",
                "mse",
                "mae",
                "rmse",
                "median_absolute_error",
                "max_error",
                "mean_absolute_percentage_error",
            )
        ),
        MetricFacts("r2", low=-math.inf),
        MetricFacts("explained_variance", low=-math.inf),
        MetricFacts("cohen_kappa", low=-1.0),
        MetricFacts("matthews_corrcoef", low=-1.0),
        MetricFacts("expected_calibration_error", higher_is_better=False),
    )
}


def metric_facts(name: str, stored: Mapping[str, Mapping[str, Any]] | None = None) -> MetricFacts:
    """The facts of a metric: as a run folder has `stored` them, else as this library knows them.

    Those of an experiment's own metrics are not known here: they come with its federation and its run folder.
    """
    if stored and name in stored:
        return MetricFacts.from_json(name, stored[name])
    return KNOWN.get(name) or MetricFacts(name)


def common_facts(each: Sequence[MetricFacts]) -> MetricFacts:
    """The facts of a mean over clients: those of their metric, or of a score where they have several.

    Metrics of both directions have no such mean: `check_evaluation` refuses them before a run.
    """
    several = list(dict.fromkeys(each))
    if len(several) == 1:
        return several[0]
    shares = all(facts.is_share for facts in several)
    lower = bool(several) and not any(facts.higher_is_better for facts in several)
    return MetricFacts("score", not lower, *((0.0, 1.0) if shares else (-math.inf, math.inf)))


@dataclass(frozen=True)
class Declared:
    """What the decorator `metric` says of a function."""

    higher_is_better: bool
    low: float
    high: float
    takes: Takes


@front_door()
def metric(
    *, higher_is_better: bool = True, low: float = 0.0, high: float = 1.0, takes: Takes = "scores"
) -> Callable[[F], F]:
    """Declare the direction and the range of a metric of one's own: a function of scores and labels.

    `takes` says what the function wants in place of the model's scores: `probabilities`, or `answers` (the class
    with the highest score). A function without this decorator is a metric from 0 to 1 where higher is better.

    >>> @metric(higher_is_better=False)
    ... def error(scores, labels):
    ...     return float((scores.argmax(1) != labels).mean())
    """
    if not low < high:
        raise ConfigError(
            f"metric: low={low} is not below high={high}; give the lowest and the highest value"
        )

    def decorate(function: F) -> F:
        setattr(function, DECLARED, Declared(higher_is_better, low, high, takes))
        return function

    return decorate
