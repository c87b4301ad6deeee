"""Fused casts to bfloat16: small operations of a training step in few kernels, as each kernel costs time on a GPU.

Inside `gathered` the weights of convolutions and linear layers are cast to bfloat16 all at once, and so are
their gradients back; autocast would do it layer by layer. Batch norm's counters are updated together at the
end. The results are the same, and the parameters themselves stay float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@contextlib.contextmanager
def gathered(modules: Iterable[nn.Module], trained: Collection[nn.Parameter], lower: bool) -> Iterator[None]:
    """Cast the trained weights together (if `lower`: the pass is in bfloat16), and count batches together."""
    layers = [layer for module in modules for layer in module.modules()]
    with _counted(layers), _lowered(layers, trained if lower else ()):
        yield


@contextlib.contextmanager
def _lowered(layers: Iterable[nn.Module], trained: Collection[nn.Parameter]) -> Iterator[None]:
    """Only trained weights: one that is frozen would get a gradient computed for nothing."""
    wanted = {id(value) for value in trained if value.dtype == torch.float32}
    found = {
        layer: [value for value in (layer.weight, layer.bias) if value is not None]
        for layer in layers
        if type(layer) in (nn.Linear, *CONVOLUTIONS) and not is_changed(layer)
    }
    found = {layer: own for layer, own in found.items() if all(id(value) in wanted for value in own)}
    different = {id(value): value for own in found.values() for value in own}
    if not different:
        yield
        return
    cast = dict(zip(different, _Lowered.apply(*different.values()), strict=True))  # type: ignore[no-untyped-call]
    for layer, own in found.items():
        layer.forward = _forward(layer, *(cast[id(value)] for value in own))
    try:
        yield
    finally:
        for layer in found:
            del layer.forward


def is_changed(layer: nn.Module) -> bool:
    """Whether the layer's forward pass was replaced or its weight is computed (by a parametrisation)."""
    return "forward" in vars(layer) or not isinstance(layer._parameters.get("weight"), nn.Parameter)


def _forward(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Any:
    if isinstance(layer, CONVOLUTIONS):
        return functools.partial(_convolved, layer, weight, bias)
    return functools.partial(F.linear, weight=weight, bias=bias)


def _convolved(layer: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    made: Tensor = layer._conv_forward(x, weight, bias)
    return made


class _Lowered(torch.autograd.Function):
    """Casts many tensors to bfloat16, and their gradients back to float32, in one or two kernels each way."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        """The values in bfloat16."""
        ctx.set_materialize_grads(False)
        return _cast(values, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradients in float32, each in its own memory layout; None stays None."""
        raised = iter(_cast([value for value in gradients if value is not None], torch.float32))
        return tuple(None if value is None else next(raised) for value in gradients)


def _cast(values: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    values = list(values)
    made = [torch.empty_like(value, dtype=dtype) for value in values]
    torch._foreach_copy_(made, values)
    return tuple(made)


class _Tally:
    """Replaces batch norm's counter for one pass and counts on the host."""

    def __init__(self) -> None:
        self.count = 0

    def add_(self, number: int) -> None:
        """Called by batch norm, once per batch."""
        self.count += number


@contextlib.contextmanager
def _counted(layers: Iterable[nn.Module]) -> Iterator[None]:
    counters = {
        layer: counter
        for layer in layers
        if isinstance(layer, _BatchNorm) and layer.training and layer.momentum is not None
        if (counter := layer._buffers.get("num_batches_tracked")) is not None
    }
    tallies = {layer: _Tally() for layer in counters}
    for layer, tally in tallies.items():
        layer._buffers["num_batches_tracked"] = tally  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, counter in counters.items():
            layer._buffers["num_batches_tracked"] = counter
    moved = [(counters[layer], tally.count) for layer, tally in tallies.items() if tally.count]
    if moved:
        torch._foreach_add_([counter for counter, _ in moved], [count for _, count in moved])
