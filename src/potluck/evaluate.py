"""Evaluation: one read-only step, the same for every method, and what to log of it.

Every value is logged per client, round, moment and mode; means, spreads and "best" are views of that log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from potluck.client import Client, SplitName
from potluck.settings import Settings
from potluck.task import Batch
from potluck.training import collect

if TYPE_CHECKING:
    from potluck.method import Method

SUMS = ("correct", "loss")  # what a task's measure gives
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
    """Sums of correct answers and losses per mode and split, on the device: `mode/split/correct`."""
    sums: dict[str, Tensor] = {}
    splits: tuple[SplitName, ...] = ("validation", "test")
    for split in splits:
        rows = "global" if on == "global" and split == "test" else split

        def score(batch: Batch) -> Tensor:
            found = [
                client.task.measure(method.predict(client, batch, mode).float(), batch.y) for mode in modes
            ]
            return torch.stack([one[name].double() for one in found for name in SUMS])

        parts = collect(client, score, rows)  # type: ignore[arg-type]
        if parts:
            total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            names = [f"{mode}/{split}/{name}" for mode in modes for name in SUMS]
            sums |= dict(zip(names, total.unbind(), strict=True))
    return sums


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
                loss = sums[f"{mode}/{split}/loss"] / count
                line[split] = {
                    "accuracy": round(sums[f"{mode}/{split}/correct"] / count, 6),
                    "loss": round(loss, 6) if math.isfinite(loss) else None,  # JSON has no infinity
                    "samples": count,
                }
        if held_out:
            line["held_out"] = True
        lines.append(line)
    return lines
