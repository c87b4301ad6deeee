"""EfficientNet-Lite0, 1 and 2: EfficientNet (Tan & Le, ICML 2019) without squeeze-and-excite, with ReLU6.

Layers, names and padding are those of the published ImageNet weights, which `weights` loads: convolutions
without bias, batch norm with an epsilon of 1e-3, and TensorFlow's "same" padding, whose odd row and column go
right and below. Those weights expect (x − 127) / 128 of colours from 0 to 255. Normalise the data so
(`data.normalize: {mean: 0.49804, std: 0.50196}`), or say in `mean` and `std` how they are normalised: the stem
then changes them into that scale.

A network halves an image five times, so small ones lose most of what was learned; `side: 96` enlarges them
first. A grey image is repeated three times. Without weights convolutions start as in ResNets
(`scale_convolutions`). Two details are ours: dropout before the adapter, as in MobileNetV2, and no blocks left
out at random in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.modest import MOST_SIDE
from potluck.core.plain_values import shown
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models.parts import Backbone, scale_convolutions
from potluck.models.pretrained import load_weights
from potluck.models.registry import register

Values = float | Sequence[float]  # for all channels, or one each

STEM = 32
WIDTH = 1280
EPSILON = 1e-3  # of batch norm
CENTRE, SCALE = 127 / 255, 128 / 255  # what the published weights expect, on the 0..1 scale
GROUPS = (  # kernel, stride of the first block, expansion
    (3, 1, 1),
    (3, 2, 6),
    (5, 2, 6),
    (3, 2, 6),
    (5, 1, 6),
    (5, 2, 6),
    (3, 1, 6),
)
LITE = {  # blocks and channels of each group
    "efficientnet-lite0": ((1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320)),
    "efficientnet-lite1": ((1, 3, 3, 4, 4, 5, 1), (16, 24, 40, 80, 112, 192, 320)),
    "efficientnet-lite2": ((1, 3, 3, 4, 4, 5, 1), (16, 24, 48, 88, 120, 208, 352)),
}


class Unit(nn.Module):
    """A convolution with "same" padding, batch norm and, unless it is `linear`, ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=EPSILON)
        self.size, self.stride, self.linear = size, stride, linear

    def forward(self, x: Tensor) -> Tensor:
        """The unit's output: height and width over the stride, rounded up."""
        rows, columns = (_same(side, self.size, self.stride) for side in x.shape[2:])
        out: Tensor = self.norm(self.conv(F.pad(x, (*columns, *rows))))
        return out if self.linear else F.relu6(out)


class Block(nn.Module):
    """1×1 to `expansion` times the channels, a depthwise convolution, 1×1 back; a shortcut where it fits."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.shortcut = stride == 1 and inputs == outputs
        self.expand = Unit(inputs, hidden, 1) if expansion > 1 else nn.Identity()
        self.depthwise = Unit(hidden, hidden, size, stride, groups=hidden)
        self.project = Unit(hidden, outputs, 1, linear=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + out if self.shortcut else out


class EfficientNetLite(Backbone):
    """A convolution, 16 or 21 blocks, a 1×1 convolution; dropout on the 1280 features, before the adapter."""

    def __init__(
        self,
        task: Task,
        name: str,
        rep_dim: int | None = None,
        adapter: str = "linear",
        dropout: float = 0.2,
        side: int | None = None,
        mean: Values | None = None,
        std: Values | None = None,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        colours = task.input[0]
        self.grey = colours == 1
        self.size = None if side is None else _enlarged(task, side)
        self.rescale = Rescale(mean, std, colours) if mean is not None or std is not None else nn.Identity()
        self.first = Unit(3 if self.grey else colours, STEM, 3, stride=2)
        self.blocks = nn.Sequential(*_blocks(*LITE[name]))
        self.last = Unit(LITE[name][1][-1], WIDTH, 1)
        self.dropout = nn.Dropout(dropout)
        scale_convolutions(self)
        self.finish(WIDTH, task, rep_dim, adapter)
        if weights is not None:
            load_weights(self, weights, name)

    def stem(self, x: Tensor) -> Tensor:
        """The image in the scale and size asked for, and the first convolution: 32 channels, half the sides."""
        x = self.rescale(x)
        if self.grey:
            x = x.expand(-1, 3, -1, -1)
        if self.size is not None:
            x = F.interpolate(x, self.size, mode="bilinear")
        s: Tensor = self.first(x)
        return s

    def body(self, s: Tensor) -> Tensor:
        """The blocks, the last convolution, the mean over all positions, dropout, the adapter."""
        pooled = self.last(self.blocks(s)).mean((2, 3))
        features: Tensor = self.resize(self.dropout(pooled))
        return features


class Rescale(nn.Module):
    """From colours normalised with `mean` and `std` (0..1 scale) to the scale of the published weights."""

    factor: Tensor
    shift: Tensor

    def __init__(self, mean: Values | None, std: Values | None, colours: int) -> None:
        super().__init__()
        if mean is None or std is None:
            raise ModelError("mean and std say together how the images are normalised; give both")
        centres, widths = _per_colour("mean", mean, colours), _per_colour("std", std, colours)
        self.register_buffer("factor", widths / SCALE, persistent=False)
        self.register_buffer("shift", (centres - CENTRE) / SCALE, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The images in the other scale."""
        return x * self.factor + self.shift


def _per_colour(name: str, values: Values, colours: int) -> Tensor:
    listed = [values] * colours if isinstance(values, int | float) else list(values)
    if len(listed) != colours:
        raise ModelError(
            f"{name} has {len(listed)} values, the images have {colours} channels; give one for each"
        )
    return torch.tensor(listed, dtype=torch.float32).view(colours, 1, 1)


def _enlarged(task: Task, side: int) -> tuple[int, int]:
    """Height and width whose smaller one is `side`."""
    height, width = task.input[1:]
    least = min(height, width)
    if not isinstance(side, int) or side < least:
        raise ModelError(f"side is {side!r}; give a whole number from {least}, the image's own, on")
    if side > max(MOST_SIDE, least):
        raise ModelError(f"side is {shown(side)}; give at most {MOST_SIDE:,}")
    return round(height * side / least), round(width * side / least)


def _same(length: int, size: int, stride: int) -> tuple[int, int]:
    """Padding before and after that leaves length / stride positions, rounded up."""
    total = max((math.ceil(length / stride) - 1) * stride + size - length, 0)
    return total // 2, total - total // 2


def _blocks(repeats: Sequence[int], channels: Sequence[int]) -> Iterator[Block]:
    inputs = STEM
    for (size, stride, expansion), count, outputs in zip(GROUPS, repeats, channels, strict=True):
        for repeat in range(count):
            yield Block(inputs, outputs, size, 1 if repeat else stride, expansion)
            inputs = outputs


def _register(name: str) -> None:
    @register(name, takes=("image",))
    def efficientnet(
        task: Task,
        rep_dim: int | None = None,
        adapter: str = "linear",
        dropout: float = 0.2,
        side: int | None = None,
        mean: Values | None = None,
        std: Values | None = None,
        weights: str | None = None,
    ) -> EfficientNetLite:
        return EfficientNetLite(task, name, rep_dim, adapter, dropout, side, mean, std, weights)


for _name in LITE:
    _register(_name)
