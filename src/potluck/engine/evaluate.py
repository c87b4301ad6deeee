"""Evaluation: one read-only step, the same for every method, and what to log of it.

Every value is logged per client, round, moment and mode; means, spreads and "best" are views of that log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from potluck.core.client import Client, SplitName
from potluck.core.settings import Settings
from potluck.core.task import Batch, Task
from potluck.training.collect import collect

if TYPE_CHECKING:
    from potluck.core.method import Method

Moment = Literal["before", "after_training", "after_aggregation"]


class EvaluateSettings(Settings):
    """When clients are measured, and on what.

    `before`: with the newest downlink, before training. `after_training`: the clients that trained, as they are
    then, before the server combines. `after_aggregation`: with the new downlink. `who` chooses between all
    clients and the round's cohort for the first and the last.
    """

    every: int = Field(default=1, ge=1)
    who: Literal["all", "sampled"] = "all"
    when: tuple[Moment, ...] = ("after_training", "after_aggregation")
    on: Literal["own", "global"] = "own"
    modes: Literal["first", "all"] | tuple[str, ...] = "first"  # ways to predict; "first": the reported one


def measure(method: Method, client: Client, modes: tuple[str, ...], on: str) -> dict[str, Tensor]:
    """The numbers of the client's task per mode and split, on the device: `mode/split/correct`."""
    numbers: dict[str, Tensor] = {}
    splits: tuple[SplitName, ...] = ("validation", "test")
    for split in splits:
        rows = "global" if on == "global" and split == "test" else split
        parts = collect(client, partial(_gathered, method, client, modes), rows)  # type: ignore[arg-type]
        for mode, found in zip(modes, _put_together(client.task, parts, len(modes)), strict=False):
            concluded = client.task.rules.conclude(found)
            numbers |= {f"{mode}/{split}/{name}": value.double() for name, value in concluded.items()}
    return numbers


def _gathered(method: Method, client: Client, modes: tuple[str, ...], batch: Batch) -> Any:
    """What a batch contributes in every mode: all sums in one tensor, and after it what goes row by row."""
    found = [client.task.measure(method.predict(client, batch, mode).float(), batch.y) for mode in modes]
    added, whole = client.task.rules.sums(client.task.classes), client.task.rules.whole
    sums = torch.cat([one[name].double().reshape(-1) for one in found for name in added])
    return (sums, *(one[name] for one in found for name in whole)) if whole else sums


def _put_together(task: Task, parts: Sequence[Any], modes: int) -> list[dict[str, Tensor]]:
    """What all batches contributed, a mapping per mode; nothing without batches."""
    if not parts:
        return []
    added, whole = task.rules.sums(task.classes), task.rules.whole
    columns = list(zip(*parts, strict=True)) if whole else [parts]
    sums = columns[0][0] if len(parts) == 1 else torch.stack(list(columns[0])).sum(0)
    pieces = iter(sums.split([math.prod(shape) for shape in added.values()] * modes))
    rows = iter([torch.cat(list(column)) for column in columns[1:]])
    return [
        {name: next(pieces).view(shape) for name, shape in added.items()}
        | {name: next(rows) for name in whole}
        for _ in range(modes)
    ]


def metric_lines(
    round_: int,
    when: Moment,
    client: str,
    sums: Mapping[str, float],
    samples: Mapping[str, int],
    modes: tuple[str, ...],
    held_out: bool,
) -> list[dict[str, Any]]:
    """The log's lines of one client at one moment, one per mode."""
    lines = []
    for mode in modes:
        line: dict[str, Any] = {"round": round_, "client": client, "when": when, "mode": mode}
        for split, count in samples.items():
            if count:
                prefix = f"{mode}/{split}/"
                own = {key.removeprefix(prefix): sums[key] for key in sums if key.startswith(prefix)}
                line[split] = _measured(own, count)
        if held_out:
            line["held_out"] = True
        lines.append(line)
    return lines


def _measured(numbers: Mapping[str, float], count: int) -> dict[str, Any]:
    """One split in the log. Tasks without an accuracy have a `score`, which is the one of their own they name."""
    closing = {"loss": _finite(numbers["loss"] / count), "samples": count}
    if "correct" in numbers:
        return {"accuracy": round(numbers["correct"] / count, 6), **closing}
    own = {name: _finite(value) for name, value in numbers.items() if name != "loss"}
    metric = next(iter(own))
    return {"score": own[metric], "metric": metric, **own, **closing}


def _finite(value: float) -> float | None:
    """Six digits; JSON has no infinity."""
    return round(value, 6) if math.isfinite(value) else None


def score_of(part: Mapping[str, Any]) -> float | None:
    """What a client is judged by in one split of the log: its task's score, which may be the accuracy."""
    value: float | None = part.get("score", part.get("accuracy"))
    return value
