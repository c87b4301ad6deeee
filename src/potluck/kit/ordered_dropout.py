"""Ordered dropout: one network computes as any of its nested slices, chosen batch by batch.

A layer that reads only the first channels of its inputs computes what a narrower network computes there, so masks
take the place of slices: shapes stay, and which slice it is may be a number on the device. Batch norm has
statistics of its own for every width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.contract import Shapes
from potluck.core.model import Blocks
from potluck.kit.static_norm import MEAN, VARIANCE, batch_moments, norms_in
from potluck.kit.width_slices import LAYERS


class WidthStatistics(nn.Module):
    """Running means and variances of batch norms at every width, (widths, channels) each; all start as they are."""

    def __init__(self, widths: int, norms: Iterable[_BatchNorm]) -> None:
        super().__init__()
        for place, norm in enumerate(norms):
            kept = nn.Module()
            for kind in (MEAN, VARIANCE):
                kept.register_buffer(kind, getattr(norm, kind).expand(widths, -1).clone())
            self.add_module(str(place), kept)

    def at_the_widest(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The statistics of the last width, by the names that batch norms have in a model."""
        return {
            f"{name}.{kind}": getattr(norm, kind)[-1]
            for name, norm in zip(names, self.children(), strict=True)
            for kind in (MEAN, VARIANCE)
        }


class OrderedDropout:
    """Hooks that let a model compute as one of its slices; `widths` has the tensors of each, the model's own last.

    Outside `at` the model is itself.
    """

    def __init__(
        self,
        model: nn.Module,
        widths: Sequence[Shapes],
        blocks: Blocks | None = None,
        statistics: WidthStatistics | None = None,
    ) -> None:
        self.widths, self.blocks, self.statistics = widths, blocks or {}, statistics
        self._chosen: Tensor | None = None
        for name, layer in model.named_modules():
            if isinstance(layer, LAYERS):
                self._watch_layer(f"{name}.weight", layer)
            elif isinstance(layer, nn.LayerNorm):
                self._watch_norm(f"{name}.weight", layer)
        for place, norm in enumerate(norms_in(model).values()) if statistics is not None else ():
            norm.track_running_stats = False
            norm.register_forward_pre_hook(_Tracking(self, str(place)))

    @contextmanager
    def at(self, width: Tensor) -> Iterator[None]:
        """Compute at the width of this number, a tensor of shape (1,)."""
        self._chosen = width
        try:
            yield
        finally:
            self._chosen = None

    @property
    def chosen(self) -> Tensor | None:
        """The number of the width at which the model computes, None: at its own."""
        return self._chosen

    def _watch_layer(self, name: str, layer: nn.Module) -> None:
        """No layer reads channels beyond the width; heads in one axis are cut where they are made."""
        channels = -1 if isinstance(layer, nn.Linear) else 1
        if (inputs := self._beyond(name, 1)) is not None:
            layer.register_forward_pre_hook(_MaskedInput(self, inputs, channels))
        outputs = self._beyond(name, 0)
        if outputs is not None and self.blocks.get(name, {}).get(0, (1, 1))[0] > 1:
            layer.register_forward_hook(_MaskedOutput(self, outputs, channels))

    def _watch_norm(self, name: str, layer: nn.LayerNorm) -> None:
        beyond = self._beyond(name, 0)
        if beyond is not None:
            layer.register_forward_hook(_MaskedNorm(self, beyond))

    def _beyond(self, name: str, axis: int) -> _Table | None:
        """The entries of an axis beyond each width, None where all widths have all of it."""
        sizes = [shapes[name][axis] for shapes in self.widths if name in shapes]
        if len(set(sizes)) < 2:
            return None
        groups, each = self.blocks.get(name, {}).get(axis, (1, 1))
        place = torch.arange(sizes[-1]) // each % (sizes[-1] // (groups * each))
        limits = torch.tensor(sizes) // (groups * each)
        return _Table(place[None] >= limits[:, None])


class _Table:
    """A table with a row per width, on whatever device it is asked for; a captured step must find it there."""

    def __init__(self, rows: Tensor) -> None:
        self._on = {rows.device: rows}

    def __call__(self, width: Tensor) -> Tensor:
        if width.device not in self._on:
            self._on[width.device] = next(iter(self._on.values())).to(width.device)
        return self._on[width.device].index_select(0, width)[0]


class _Hook:
    def __init__(self, dropout: OrderedDropout, beyond: _Table, axis: int = -1) -> None:
        self.dropout, self.beyond, self.axis = dropout, beyond, axis

    def cut(self, x: Tensor) -> Tensor:
        """Zero beyond the width."""
        if self.dropout.chosen is None:
            return x
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x.masked_fill(self.beyond(self.dropout.chosen).view(shape), 0.0)


class _MaskedInput(_Hook):
    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.cut(inputs[0]), *inputs[1:]


class _MaskedOutput(_Hook):
    def __call__(self, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return self.cut(output)


class _MaskedNorm(_Hook):
    """Layer norm over the channels of the width alone."""

    def __call__(self, layer: nn.LayerNorm, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        chosen = self.dropout.chosen
        if chosen is None:
            return output
        beyond = self.beyond(chosen)
        count = (~beyond).sum()
        x = inputs[0].float()
        mean = x.masked_fill(beyond, 0.0).sum(-1, keepdim=True) / count
        centred = (x - mean).masked_fill(beyond, 0.0)
        scaled = centred * torch.rsqrt(centred.square().sum(-1, keepdim=True) / count + layer.eps)
        return (scaled * layer.weight + (0.0 if layer.bias is None else layer.bias)).to(output.dtype)


class _Tracking:
    """Moves the running statistics of the width that a batch is computed at."""

    def __init__(self, dropout: OrderedDropout, place: str) -> None:
        self.dropout, self.place = dropout, place

    @torch.no_grad()
    def __call__(self, norm: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        if not norm.training or self.dropout.statistics is None:
            return
        kept, chosen = getattr(self.dropout.statistics, self.place), self.dropout.chosen
        rows = torch.arange(len(self.dropout.widths), device=inputs[0].device)
        is_row = rows == (len(rows) - 1 if chosen is None else chosen)
        share = (is_row * (0.1 if norm.momentum is None else norm.momentum))[:, None]
        for buffer, value in zip((VARIANCE, MEAN), batch_moments(inputs[0], 1), strict=True):
            running = getattr(kept, buffer)
            running.lerp_(value.to(running.dtype).expand_as(running), share.to(running.dtype))
