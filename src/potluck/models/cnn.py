"""CNN-1 to CNN-5, the five networks of FedMRL's heterogeneous pool (two convolutions, three linear layers).

The representation is fc2's output after its ReLU, 500 wide unless `rep_dim` says otherwise. There is no batch
norm. CNN-5 with a narrower fc2 is FedMRL's shared small model.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.models.base import Model
from potluck.models.registry import register
from potluck.task import Task

KERNEL = 5
SMALLEST = 16  # below that the second convolution and its pooling leave no pixel


class CNN(Model):
    """Two 5×5 convolutions without padding, each with ReLU and 2×2 max-pooling, then fc1, fc2, the head."""

    has_stem = True

    def __init__(self, task: Task, channels: int, hidden: int, rep_dim: int) -> None:
        super().__init__()
        colours, height, width = task.input
        self.rep_dim = rep_dim
        self.conv1 = nn.Conv2d(colours, 16, KERNEL)
        self.conv2 = nn.Conv2d(16, channels, KERNEL)
        self.fc1 = nn.Linear(channels * _shrunk(height) * _shrunk(width), hidden)
        self.fc2 = nn.Linear(hidden, rep_dim)
        self.head = nn.Linear(rep_dim, task.classes)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution, ReLU and pooling."""
        return F.max_pool2d(F.relu(self.conv1(x)), 2)

    def body(self, s: Tensor) -> Tensor:
        """The second convolution and two linear layers."""
        s = F.max_pool2d(F.relu(self.conv2(s)), 2)
        return F.relu(self.fc2(F.relu(self.fc1(s.flatten(1)))))


def _shrunk(size: int) -> int:
    for _ in range(2):
        size = (size - KERNEL + 1) // 2
    return size


@register("cnn1", takes=("image",), smallest=SMALLEST)
def cnn1(task: Task, rep_dim: int | None = None) -> CNN:
    """CNN-1: conv2 32, fc1 2000."""
    return CNN(task, 32, 2000, rep_dim or 500)


@register("cnn2", takes=("image",), smallest=SMALLEST)
def cnn2(task: Task, rep_dim: int | None = None) -> CNN:
    """CNN-2: conv2 16, fc1 2000."""
    return CNN(task, 16, 2000, rep_dim or 500)


@register("cnn3", takes=("image",), smallest=SMALLEST)
def cnn3(task: Task, rep_dim: int | None = None) -> CNN:
    """CNN-3: conv2 32, fc1 1000."""
    return CNN(task, 32, 1000, rep_dim or 500)


@register("cnn4", takes=("image",), smallest=SMALLEST)
def cnn4(task: Task, rep_dim: int | None = None) -> CNN:
    """CNN-4: conv2 32, fc1 800."""
    return CNN(task, 32, 800, rep_dim or 500)


@register("cnn5", takes=("image",), smallest=SMALLEST)
def cnn5(task: Task, rep_dim: int | None = None) -> CNN:
    """CNN-5: conv2 32, fc1 500."""
    return CNN(task, 32, 500, rep_dim or 500)
