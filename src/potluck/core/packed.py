"""States packed into one piece of memory: a whole state is copied in one operation."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Layout = tuple[tuple[str, int, tuple[int, ...], tuple[int, ...]], ...]  # name, start, shape, strides
ALIGNMENT = 64  # in numbers: every tensor of a packed state starts at a multiple of 256 bytes


class Packed(Mapping[str, Tensor]):
    """A state whose float32 tensors are views of one flat tensor; the others are `loose`."""

    def __init__(self, flat: Tensor, layout: Layout, loose: Mapping[str, Tensor]) -> None:
        self.flat, self.layout, self.loose = flat, layout, dict(loose)

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return views(self.flat, self.layout) | self.loose

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self.layout) + len(self.loose)


def views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors inside a flat tensor, by name; they share its memory."""
    begin = flat.storage_offset()
    return {name: flat.as_strided(shape, strides, begin + start) for name, start, shape, strides in layout}


def row_major(value: Tensor) -> Tensor:
    """The tensor in row-major memory, as it is after a journey or out of a file.

    A sum over memory in another order differs in its last bits, and on a CPU numbers must not depend on whether a
    tensor travelled. On a GPU they agree within rounding anyway, so nothing is copied there.
    """
    return value.contiguous() if value.is_cpu and value.layout is torch.strided else value
