"""The plan of a `fit`: which rows each step reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.streams import Stream
from potluck.errors import ConfigError

Rows = Mapping[str, Tensor]


class Plan(Sequence[Rows]):
    """The rows of every stream in every step; copied to the device when a step is read."""

    def __init__(self, streams: Mapping[str, Stream], steps: int | None, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._total = steps if steps is not None else len(next(iter(streams.values())))
        if self._total and not all(len(stream) for stream in streams.values()):
            empty = next(name for name, stream in streams.items() if not len(stream))
            raise ConfigError(f"the stream {empty!r} has no samples; give it rows, or leave it out")

    def __len__(self) -> int:
        return self._total

    def order(self, number: int) -> dict[str, np.ndarray]:
        """The rows of one step, still on the host."""
        return {name: stream.order[number % len(stream)] for name, stream in self._streams.items()}

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._total:
            raise IndexError(number)
        return {name: rows_on(rows, self._device) for name, rows in self.order(number).items()}

    def blocks(self) -> Iterator[tuple[tuple[int, ...], dict[str, np.ndarray]]]:
        """Runs of steps with the same batch sizes: the sizes, and a table of rows (steps × batch) per stream."""
        orders = {
            name: [stream.order[number % len(stream)] for number in range(self._total)]
            for name, stream in self._streams.items()
        }
        start = 0
        for sizes, steps in itertools.groupby(
            zip(*(map(len, order) for order in orders.values()), strict=True)
        ):
            end = start + sum(1 for _ in steps)
            yield (
                sizes,
                {
                    name: np.concatenate(order[start:end]).reshape(-1, size)
                    for (name, order), size in zip(orders.items(), sizes, strict=True)
                },
            )
            start = end


def rows_on(rows: np.ndarray, device: torch.device) -> Tensor:
    """Row numbers on the device; the copy does not wait."""
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device, non_blocking=True)
