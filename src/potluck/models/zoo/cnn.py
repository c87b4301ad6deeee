"""Two 5×5 convolutions and linear layers: CNN-1 to CNN-5 of FedMRL's pool, and the CNN of FedRE's.

CNN-1 to CNN-5 differ in conv2 and fc1. Their representation is fc2's output after its ReLU, 500 wide unless
`rep_dim` says otherwise; CNN-5 with a narrower fc2 is FedMRL's shared small model. FedRE's has one linear layer,
512 wide, and for another `rep_dim` an adapter after it. `scale` is the share of every layer's width. There is no
batch norm; the first weights are torch's own. The first linear layer takes in every position left, so larger
images cost parameters.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Blocks, Model
from potluck.core.task import Task
from potluck.models.fused.pooled_convolution import convolved_and_pooled
from potluck.models.parts import Backbone, scaled
from potluck.models.registry import register

KERNEL = 5
SMALLEST = 16  # below that the second convolution and its pooling leave no pixel


class CNN(Model):
    """Two 5×5 convolutions without padding, each with ReLU and 2×2 max-pooling, then fc1, fc2, the head."""

    has_stem = True
    own_kernels = True

    def __init__(self, task: Task, channels: int, hidden: int, rep_dim: int, first: int = 16) -> None:
        super().__init__()
        self.rep_dim = rep_dim
        self.channel_blocks = _flattened(task)
        self.conv1 = nn.Conv2d(task.input[0], first, KERNEL)
        self.conv2 = nn.Conv2d(first, channels, KERNEL)
        self.fc1 = nn.Linear(channels * _positions(task), hidden)
        self.fc2 = nn.Linear(hidden, rep_dim)
        self.head = nn.Linear(rep_dim, task.classes)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution, ReLU and pooling."""
        return convolved_and_pooled(self.conv1, x)

    def body(self, s: Tensor) -> Tensor:
        """The second convolution and two linear layers."""
        return F.relu(self.fc2(F.relu(self.fc1(convolved_and_pooled(self.conv2, s).flatten(1)))))


class FedAvgCNN(Backbone):
    """The same convolutions with 32 and 64 channels, then fc1 to 512."""

    own_kernels = True

    def __init__(
        self, task: Task, rep_dim: int | None = None, adapter: str = "linear", scale: float = 1.0
    ) -> None:
        super().__init__()
        first, channels, width = (scaled(size, scale) for size in (32, 64, 512))
        self.channel_blocks = _flattened(task)
        self.conv1 = nn.Conv2d(task.input[0], first, KERNEL)
        self.conv2 = nn.Conv2d(first, channels, KERNEL)
        self.fc1 = nn.Linear(channels * _positions(task), width)
        self.finish(width, task, rep_dim, adapter)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution, ReLU and pooling."""
        return convolved_and_pooled(self.conv1, x)

    def body(self, s: Tensor) -> Tensor:
        """The second convolution, the linear layer, and the adapter if there is one."""
        features: Tensor = self.resize(F.relu(self.fc1(convolved_and_pooled(self.conv2, s).flatten(1))))
        return features


def _positions(task: Task) -> int:
    """How many pixels are left after both convolutions."""
    _, height, width = task.input
    for _ in range(2):
        height, width = ((size - KERNEL + 1) // 2 for size in (height, width))
    return height * width


def _flattened(task: Task) -> Blocks:
    """fc1 sees every pixel of every channel."""
    return {"fc1.weight": {1: (1, _positions(task))}}


def _register(name: str, channels: int, hidden: int) -> None:
    @register(name, takes=("image",), smallest=SMALLEST)
    def cnn(task: Task, rep_dim: int | None = None, scale: float = 1.0) -> CNN:
        first, second, wide, width = (scaled(size, scale) for size in (16, channels, hidden, 500))
        return CNN(task, second, wide, rep_dim or width, first)


_register("cnn1", channels=32, hidden=2000)
_register("cnn2", channels=16, hidden=2000)
_register("cnn3", channels=32, hidden=1000)
_register("cnn4", channels=32, hidden=800)
_register("cnn5", channels=32, hidden=500)


@register("fedavg-cnn", takes=("image",), smallest=SMALLEST)
def fedavg_cnn(
    task: Task, rep_dim: int | None = None, adapter: str = "linear", scale: float = 1.0
) -> FedAvgCNN:
    """The CNN of FedRE's ten."""
    return FedAvgCNN(task, rep_dim, adapter, scale)
