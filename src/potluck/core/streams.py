"""Streams: where the batches of a training step come from, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from potluck.core.rng import Rng
from potluck.core.settings import LastBatch
from potluck.core.task import Batch

Prepare = Callable[[Tensor, "torch.Generator | None"], Tensor]


@dataclass(frozen=True)
class Source:
    """Samples on the model's device; a batch is a selection of their row numbers."""

    x: Tensor
    y: Tensor
    prepare: Prepare | None = None
    channels_last: bool = False  # the rows of x are stored as height, width, channels
    layout: torch.memory_format | None = None  # that a batch of images is brought to, for the model

    @torch.no_grad()
    def prepared(self, channels_last: bool) -> Source:
        """The same source with all samples prepared in advance, for a preparation without randomness."""
        parts = []
        for start in range(0, len(self.x), 4096):
            part = self.x[start : start + 4096]
            part = part if self.prepare is None else self.prepare(part, None)
            parts.append(part.permute(0, 2, 3, 1).contiguous() if channels_last else part)
        return Source(torch.cat(parts), self.y, None, channels_last)

    def take(self, rows: Tensor, generator: torch.Generator | None = None) -> Batch:
        """A prepared batch of these rows, augmented if a generator is given."""
        x = self.x.index_select(0, rows)
        if self.channels_last:
            x = x.permute(0, 3, 1, 2)
        if self.prepare is not None:
            x = self.prepare(x, generator)
        if self.layout is not None:
            x = x.contiguous(memory_format=self.layout)
        return Batch(x, self.y.index_select(0, rows), id=rows)


@dataclass(frozen=True)
class Stream:
    """A source and the rows of each step. Beside a longer stream it starts over when it ends."""

    source: Source
    order: Sequence[np.ndarray]
    augment: bool = False
    split: str = ""  # the split of a client whose rows these are, in a stream made by `Client.batches`

    def __len__(self) -> int:
        return len(self.order)

    @classmethod
    def of(cls, x: Tensor, y: Tensor | None = None, batch_size: int | None = None) -> Stream:
        """A stream of given tensors (received features, for example) in their order, in one batch by default."""
        labels = torch.zeros(len(x), dtype=torch.long, device=x.device) if y is None else y
        size = batch_size or max(len(x), 1)
        order = [np.arange(start, min(start + size, len(x))) for start in range(0, len(x), size)]
        return cls(Source(x, labels), order)


def shuffled_batches(rows: np.ndarray, size: int, epochs: int, last: LastBatch, rng: Rng) -> list[np.ndarray]:
    """The rows of every step: a fresh permutation per epoch, cut into batches of min(size, n).

    `last` says what happens to a short last batch: keep it, drop it, or fill it up from the start of the epoch.
    """
    size = min(size, len(rows))
    order: list[np.ndarray] = []
    for epoch in range(epochs if size else 0):
        shuffled = rng.child("epoch", epoch).numpy().permutation(rows)
        order += [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
        short = size - len(order[-1])
        if short and last == "drop":
            order.pop()
        elif short and last == "wrap":
            order[-1] = np.concatenate([order[-1], shuffled[:short]])
    return order


def several_each(order: list[np.ndarray]) -> list[np.ndarray]:
    """Drop batches of one sample, which batch norm cannot train on; keep all if there are no others."""
    return [rows for rows in order if len(rows) > 1] or order
