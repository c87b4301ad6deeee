"""The numbers that clients measured, as they stand in `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from potluck.core.metrics import metric_facts
from potluck.engine.evaluation.examined import Line


def read_together(numbers: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Several mappings of single numbers as floats, read from the device at once."""
    values = [value for one in numbers for value in one.values()]
    read = iter(torch.stack(values).tolist() if values else [])
    return [{name: next(read) for name in one} for one in numbers]


def split_parts(
    mode: str,
    numbers: Mapping[str, float],
    sizes: Mapping[str, int],
    judge: str | None,
    told: Sequence[str],
    further: Sequence[str],
) -> Line:
    """The splits of one log line; one without samples is left out.

    The order is that of what the task tells and of the `further` metrics: a client's own would decide what it is
    judged by.
    """
    line: Line = {}
    for split, size in sizes.items():
        if size:
            prefix = f"{mode}/{split}/"
            own = {name: numbers[prefix + name] for name in (*told, *further) if prefix + name in numbers}
            line[split] = _measures(own, size, judge, further)
    return line


def _measures(
    numbers: Mapping[str, float], size: int, judge: str | None = None, further: Collection[str] = ()
) -> Line:
    """One split in the log. A client that is not judged by accuracy has a `score`; `metric` names what that is."""
    digits = _finite if metric_facts(next(iter(numbers))).is_share else _significant
    own = {
        name: (_significant if name in further else digits)(value)
        for name, value in numbers.items()
        if name not in ("correct", "loss")
    }
    if "correct" in numbers:
        own = {"accuracy": round(numbers["correct"] / size, 6), **own}
    found = {**own, "loss": digits(numbers["loss"] / size)}
    metric = judge if judge in found else next(iter(found))
    told = {} if metric == "accuracy" else {"score": found[metric], "metric": metric}
    return {**told, **found, "samples": size}


def _finite(value: float) -> float | None:
    """Six digits after the point; None for infinity and NaN, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def _significant(value: float) -> float | None:
    """Eight digits wherever the point is: the errors of a regression have the unit of its numbers."""
    return float(f"{value:.8g}") if math.isfinite(value) else None
