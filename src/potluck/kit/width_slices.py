"""Slices of one parent by width: which entries of the parent's tensors a narrower model holds.

Names and numbers of axes are the parent's; an axis that is shorter than the parent's holds some of its channels.
Which channels follows from the numbers of channels alone, so it is the same on both sides of every connection
between layers and on every branch that is added to another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from potluck.core.contract import Shapes, shapes_of
from potluck.core.model import Blocks, Model
from potluck.core.packed import State
from potluck.core.state import BufferPolicy, Part
from potluck.core.task import Task
from potluck.core.trial import sample_batch
from potluck.kit.averaging import Index, put_slice, take_slice

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
ACROSS_CHANNELS = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.MultiheadAttention, nn.RNNBase)


class Window(Hashable, Protocol):
    """Chooses which channels of a wider layer a narrower one holds."""

    def __call__(self, own: int, channels: int) -> Tensor:
        """The numbers of `own` of the channels."""


class WidthSlices:
    """The tensors of a parent, and where the entries of narrower models are in them."""

    def __init__(self, shapes: Shapes, blocks: Blocks | None = None) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.blocks = blocks or {}
        self._known: dict[tuple[Shapes, torch.device], dict[str, Index]] = {}
        self._cuts: dict[int, _Cut] = {}  # by the index's identity
        self._window: Window | None = None

    def misfit(self, shapes: Shapes) -> str:
        """Why a model with these tensors is no slice of the parent, empty if it is one."""
        for name in [name for name in (*shapes, *self.shapes) if (name in shapes) != (name in self.shapes)]:
            return f"has {'a' if name in shapes else 'no'} tensor {name!r}, unlike the parent"
        for name, shape in shapes.items():
            whole = self.shapes[name]
            if len(shape) != len(whole) or any(own > full for own, full in zip(shape, whole, strict=True)):
                return f"has {name!r} of shape {tuple(shape)}, and the parent's is {whole}"
            for axis, own in enumerate(shape):
                size = self._groups(name, axis) * self._each(name, axis)
                if own != whole[axis] and (own % size or whole[axis] % size):
                    return f"has {name!r} of shape {tuple(shape)}, which is no whole number of channels"
        return ""

    def index(self, shapes: Shapes, window: Window | None, device: torch.device) -> dict[str, Index]:
        """Where a narrower model's entries are; made once per shapes and window (None: the first channels)."""
        if window != self._window:
            self._known, self._cuts, self._window = {}, {}, window
        key = _Frozen(shapes), device
        if key not in self._known:
            self._known[key] = {
                name: tuple(self._entries(name, axis, own, window, device) for axis, own in enumerate(shape))
                for name, shape in shapes.items()
            }
        return self._known[key]

    def _entries(
        self, name: str, axis: int, own: int, window: Window | None, device: torch.device
    ) -> Tensor | slice | None:
        """The entries along one axis; see `Model.channel_blocks` for how it is laid out."""
        whole, groups, each = self.shapes[name][axis], self._groups(name, axis), self._each(name, axis)
        if own == whole:
            return None
        if window is None and groups == 1:
            return slice(own)
        channels, held = whole // (groups * each), own // (groups * each)
        chosen = torch.arange(held) if window is None else window(held, channels)
        starts = torch.arange(groups).view(-1, 1, 1) * channels + chosen.view(1, -1, 1)
        return (starts * each + torch.arange(each)).flatten().to(device)

    def _groups(self, name: str, axis: int) -> int:
        return self.blocks.get(name, {}).get(axis, (1, 1))[0]

    def _each(self, name: str, axis: int) -> int:
        return self.blocks.get(name, {}).get(axis, (1, 1))[1]

    def cut(self, whole: State, index: Mapping[str, Index]) -> dict[str, Tensor]:
        """The entries of the whole that a narrower model holds; cut once for all clients of a width.

        `index` is one that `index` gave. What is returned must not be written to.
        """
        wanted = {name: value for name, value in whole.items() if name in index}
        known = self._cuts.get(id(index))
        if known is None or not known.is_of(wanted):
            known = self._cuts[id(index)] = _Cut(wanted, index)
        return dict(known.pieces)

    def rate(self, name: str, shape: Sequence[int]) -> float:
        """The share of the parent's outputs that a narrower layer has."""
        return shape[0] / self.shapes[name][0] if name in self.shapes else 1.0


class _Cut:
    """A slice, and which tensors in which state it was cut from."""

    def __init__(self, whole: Mapping[str, Tensor], index: Mapping[str, Index]) -> None:
        self.whole = dict(whole)
        self.versions = [value._version for value in whole.values()]
        self.pieces = {name: _taken(value, index[name]) for name, value in whole.items()}

    def is_of(self, whole: Mapping[str, Tensor]) -> bool:
        """Whether it was cut from these tensors, and nothing was written to them since."""
        return (
            len(whole) == len(self.whole)
            and all(self.whole.get(name) is value for name, value in whole.items())
            and self.versions == [value._version for value in whole.values()]
        )


def _taken(value: Tensor, index: Index) -> Tensor:
    return value if all(axis is None for axis in index) else take_slice(value, index)


class _Frozen(dict[str, tuple[int, ...]]):
    """Shapes as a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def scale_outputs(model: nn.Module, rate: Callable[[str, Sequence[int]], float]) -> None:
    """Divide the outputs of cut layers by the share of the outputs that they have, in training alone."""
    for name, layer in model.named_modules():
        if isinstance(layer, LAYERS):
            share = rate(f"{name}.weight", layer.weight.shape)
            if share < 1:
                layer.register_forward_hook(_Scaled(share))


class _Scaled:
    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, layer: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output / self.share if layer.training else output


def mixes_channels(model: nn.Module) -> str:
    """The kind of a layer that reads all channels at once other than by weights, empty where there is none."""
    return next((type(part).__name__ for part in model.modules() if isinstance(part, ACROSS_CHANNELS)), "")


def is_slice(
    parent: Model,
    part: Model,
    slices: WidthSlices,
    window: Window | None,
    task: Task,
    scores: Callable[[Model, Tensor], Tensor] = Model.__call__,
) -> bool:
    """Whether a slice gives the scores that the parent gives with everything outside the slice at zero.

    Both models are changed.
    """
    policy: BufferPolicy = "average"
    whole = Part(parent, policy).wire()
    own = shapes_of(Part(part, policy).wire())
    known = {name: own[name] for name in own if name in slices.shapes}
    index = slices.index(known, window, torch.device("cpu"))
    pieces = {name: value.detach().clone() for name, value in slices.cut(whole, index).items()}
    Part(part, policy).load(pieces)
    Part(parent, policy).load(
        {name: put_slice(torch.zeros_like(whole[name]), index[name], piece) for name, piece in pieces.items()}
    )
    return same_scores(parent, part, task, scores)


def same_scores(
    one: Model, other: Model, task: Task, scores: Callable[[Model, Tensor], Tensor] = Model.__call__
) -> bool:
    """Whether two models give the same scores for a made-up batch, but for rounding.

    The batch has many samples: with two, all units in which the models differ may be off (after a ReLU) by chance.
    """
    x = sample_batch(task, one, samples=16)
    with torch.no_grad():
        expected, found = scores(one.eval(), x), scores(other.eval(), x)
    return bool((found - expected).abs().max() <= 1e-3 * expected.abs().max() + 1e-6)
