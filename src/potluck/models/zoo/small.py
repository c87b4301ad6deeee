"""Small networks for 8×8 digits, vectors and quick runs: two perceptrons and two convolutional networks.

All four have the same representation width (64 unless `rep_dim` says otherwise). Within a pair only the depth
differs: layers of the same name have the same shape, and both stems give the same shape. `conv-large` has batch
norm. `scale` is the share of every layer's width.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.models.parts import scaled
from potluck.models.registry import register

WIDTH = 64
HIDDEN = 128
GRID = 4  # the last convolution is averaged down to 4×4, so larger images cost no parameters


class MLP(Model):
    """A perceptron: fc1, further layers of the same width, then `fc` to the representation."""

    has_stem = True

    def __init__(self, task: Task, layers: int, rep_dim: int | None, scale: float = 1.0) -> None:
        super().__init__()
        hidden = scaled(HIDDEN, scale)
        self.rep_dim = rep_dim or scaled(WIDTH, scale)
        self.fc1 = nn.Linear(math.prod(task.input), hidden)
        self.hidden = nn.Sequential(*(_dense(hidden) for _ in range(layers - 1)))
        self.fc = nn.Linear(hidden, self.rep_dim)
        self.head = nn.Linear(self.rep_dim, task.classes)

    def stem(self, x: Tensor) -> Tensor:
        """The flattened sample through the first layer."""
        return F.relu(self.fc1(x.flatten(1)))

    def body(self, s: Tensor) -> Tensor:
        """The further layers and the one that gives the representation."""
        return F.relu(self.fc(self.hidden(s)))


class ConvNet(Model):
    """3×3 convolutions of 16, then 32 channels, a 4×4 average and one linear layer."""

    has_stem = True

    def __init__(self, task: Task, layers: int, rep_dim: int | None, norm: bool, scale: float = 1.0) -> None:
        super().__init__()
        first, channels = scaled(16, scale), scaled(32, scale)
        self.rep_dim = rep_dim or scaled(WIDTH, scale)
        self.channel_blocks = {"fc.weight": {1: (1, GRID * GRID)}}
        self.conv1 = _convolution(task.input[0], first, norm)
        self.conv2 = _convolution(first, channels, norm)
        self.further = nn.Sequential(*(_convolution(channels, channels, norm) for _ in range(layers - 2)))
        small = all(size // 2 == GRID for size in task.input[1:])
        self.average = nn.Identity() if small else nn.AdaptiveAvgPool2d(GRID)  # a fifth of the time on 8×8
        self.fc = nn.Linear(channels * GRID * GRID, self.rep_dim)
        self.head = nn.Linear(self.rep_dim, task.classes)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution and pooling: half the height and width."""
        return F.max_pool2d(self.conv1(x), 2)

    def body(self, s: Tensor) -> Tensor:
        """The other convolutions and the linear layer."""
        return F.relu(self.fc(self.average(self.further(self.conv2(s))).flatten(1)))


def _dense(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def _convolution(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
    """The convolution always comes first, so that it has the same name with and without batch norm."""
    norms = [nn.BatchNorm2d(outputs)] if norm else []
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), *norms, nn.ReLU())


@register("mlp-small", takes=("image", "vector", "window"))
def mlp_small(task: Task, rep_dim: int | None = None, scale: float = 1.0) -> MLP:
    """One hidden layer of 128 before the representation."""
    return MLP(task, 1, rep_dim, scale)


@register("mlp-large", takes=("image", "vector", "window"))
def mlp_large(task: Task, rep_dim: int | None = None, scale: float = 1.0) -> MLP:
    """Three hidden layers of 128 before the representation."""
    return MLP(task, 3, rep_dim, scale)


@register("conv-small", takes=("image",), smallest=4)
def conv_small(task: Task, rep_dim: int | None = None, scale: float = 1.0) -> ConvNet:
    """Two convolutions, no batch norm."""
    return ConvNet(task, 2, rep_dim, norm=False, scale=scale)


@register("conv-large", takes=("image",), smallest=4)
def conv_large(task: Task, rep_dim: int | None = None, scale: float = 1.0) -> ConvNet:
    """Four convolutions with batch norm."""
    return ConvNet(task, 4, rep_dim, norm=True, scale=scale)
