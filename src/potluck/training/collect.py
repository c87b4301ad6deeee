"""One pass over a whole split: calls a function on every batch and collects the results."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.client import Client, SplitName
from potluck.core.streams import Source
from potluck.core.task import Batch
from potluck.training.in_context import InContext
from potluck.training.plan import rows_on


def collect(
    holder: Client,
    function: Callable[[Batch], Any],
    split: SplitName = "train",
    batch_size: int = 512,
    rows: np.ndarray | None = None,
    source: Source | None = None,
) -> list[Any]:
    """One pass over a client's split (or the given rows) in evaluation mode, without gradients, in order.

    `source` holds the rows if they are not the client's own data: `client.public.source`, for example.
    """
    holder.collections += 1
    origin = source if source is not None else holder.source
    wanted = holder.rows[split] if rows is None else rows
    if not len(wanted):
        return []

    def reading(taken: Tensor) -> Any:
        if holder.mode != "evaluation":
            for module in holder.modules().values():
                module.eval()
            holder.mode = "evaluation"
        with torch.no_grad(), holder.autocast():
            return function(origin.take(taken))

    parts = [wanted[start : start + batch_size] for start in range(0, len(wanted), batch_size)]
    return _collector.get()(holder, reading, parts)


def collect_eagerly(
    holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
) -> list[Any]:
    """The default collector: one batch after the other."""
    return [function(rows_on(part, holder.device)) for part in parts]


Collector = Callable[[Client, Callable[[Tensor], Any], Sequence[np.ndarray]], list[Any]]
_collector: contextvars.ContextVar[Collector] = contextvars.ContextVar("collector", default=collect_eagerly)


def collecting_with(collector: Collector) -> contextlib.AbstractContextManager[None]:
    """Use another collector, such as one that captures and replays, for every `collect` inside."""
    return InContext(_collector, collector)
