"""The client's half of an evaluation: its predictions on whole splits, and the numbers made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from potluck.core.client import Client, SplitName
from potluck.core.method import Method
from potluck.core.own_metrics import MetricFailed, OwnMetric
from potluck.core.task import Batch, Task
from potluck.training.collect import collect

# What is gathered for metrics beside those of the task, and for predictions.
RAW = ("raw scores", "raw labels")


def measure(
    method: Method,
    client: Client,
    modes: tuple[str, ...],
    on: str,
    own: Sequence[OwnMetric] = (),
    predictions: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The numbers of the client's task per mode and split, on the device: `mode/split/correct`.

    Metrics beside those of the task are computed on the host, from the scores of the whole split; only then are
    scores gathered at all. Second, where predictions are asked for, scores and labels: `mode/split/scores`.
    """
    numbers: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    whole = bool(own) or predictions
    splits: tuple[SplitName, ...] = ("validation", "test")
    for split in splits:
        rows = "global" if on == "global" and split == "test" else split
        if not len(client.rows[rows]):
            continue
        parts = collect(client, partial(_measure_batch, method, client, modes, whole), rows)  # type: ignore[arg-type]
        for mode, found in zip(modes, _put_together(client.task, parts, len(modes), whole), strict=False):
            place = f"{mode}/{split}"
            scores, labels = (found.pop(name) for name in RAW) if whole else (None, None)
            concluded = client.task.rules.conclude(found)
            numbers |= {f"{place}/{name}": value.double() for name, value in concluded.items()}
            if own and scores is not None and labels is not None:
                numbers |= _own_numbers(own, scores, labels, client, place)
            if predictions and scores is not None and labels is not None:
                seen |= {f"{place}/scores": scores, f"{place}/labels": labels}
    return numbers, seen


def _own_numbers(
    own: Sequence[OwnMetric], scores: Tensor, labels: Tensor, client: Client, place: str
) -> dict[str, Tensor]:
    """The values of metrics beside those of the task. Here the host waits for the device."""
    here = scores.cpu(), labels.cpu()
    values = {f"{place}/{metric.facts.name}": _value(metric, *here, client) for metric in own}
    return {
        name: torch.tensor(value, dtype=torch.float64, device=client.device) for name, value in values.items()
    }


def _value(metric: OwnMetric, scores: Tensor, labels: Tensor, client: Client) -> float:
    """The value of one metric; NaN if it fails, and then the report has the error."""
    try:
        return metric.value(scores, labels, client.task)
    except MetricFailed as error:
        client.report.errors[metric.facts.name] = str(error)
        return math.nan


def _measure_batch(method: Method, client: Client, modes: tuple[str, ...], whole: bool, batch: Batch) -> Any:
    """What a batch contributes in all modes: its sums as one tensor, then tensors that have a row per sample.

    With `whole` these include the scores and labels themselves.
    """
    scores = [method.predict(client, batch, mode).float() for mode in modes]
    found = [client.task.measure(one, batch.y) for one in scores]
    if whole:
        found = [
            one | dict(zip(RAW, (given, batch.y), strict=True))
            for one, given in zip(found, scores, strict=True)
        ]
    added, rows = client.task.rules.sums(client.task.classes), _rows(client.task, whole)
    sums = torch.cat([one[name].double().reshape(-1) for one in found for name in added])
    return (sums, *(one[name] for one in found for name in rows)) if rows else sums


def _rows(task: Task, whole: bool) -> tuple[str, ...]:
    """What a batch gives one row per sample of."""
    return (*task.rules.whole, *RAW) if whole else task.rules.whole


def _put_together(task: Task, parts: Sequence[Any], modes: int, raw: bool = False) -> list[dict[str, Tensor]]:
    """What all batches contributed, one mapping per mode; an empty list without batches."""
    if not parts:
        return []
    added, whole = task.rules.sums(task.classes), _rows(task, raw)
    columns = list(zip(*parts, strict=True)) if whole else [parts]
    sums = columns[0][0] if len(parts) == 1 else torch.stack(list(columns[0])).sum(0)
    pieces = iter(_pieces(sums, [*added.values()] * modes))
    rows = iter([torch.cat(list(column)) for column in columns[1:]])
    return [
        {name: next(pieces) for name in added} | {name: next(rows) for name in whole} for _ in range(modes)
    ]


def _pieces(sums: Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
    """The sums of a batch, each in its shape; single numbers are taken apart in one operation."""
    if not any(shapes):
        return sums.unbind()
    pieces = torch.split(sums, [math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
