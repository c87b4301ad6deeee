"""Tiny networks of one family: a stack of residual blocks, named as in a ResNet, of different depth and width."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task


class Block(nn.Module):
    """Two convolutions with batch norm between them, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.bn1(self.conv1(x)).relu())


class OneBlock(Model):
    """A stem, blocks and a head; images of any size."""

    blocks: ClassVar[int] = 1

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.rep_dim = 2
        self.conv1 = nn.Conv2d(task.input[0], 2, 3, stride=4, padding=1)
        self.layer1 = nn.Sequential(*(Block(2) for _ in range(self.blocks)))
        self.head = nn.Linear(2, task.classes)

    def features(self, x: Tensor) -> Tensor:
        return self.layer1(self.conv1(x)).mean((2, 3))


class TwoBlocks(OneBlock):
    """The same and a block more."""

    blocks = 2


class FourBlocks(OneBlock):
    """The same and three blocks more."""

    blocks = 4


class ThreeExits(Model):
    """A stem, three blocks and an exit behind each; a smaller one has fewer channels and ends at an exit."""

    width: ClassVar[int] = 4
    blocks: ClassVar[int] = 3

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.rep_dim = self.width
        self.conv1 = nn.Conv2d(task.input[0], self.width, 3, stride=4, padding=1)
        self.layer1 = nn.Sequential(*(Block(self.width) for _ in range(self.blocks)))
        self.exits = nn.ModuleList(nn.Linear(self.width, task.classes) for _ in range(self.blocks))
        self.head = self.exits[-1]

    def features(self, x: Tensor) -> Tensor:
        return self.layer1(self.conv1(x)).mean((2, 3))

    def exit_scores(self, x: Tensor) -> list[Tensor]:
        s, scores = self.conv1(x), []
        for block, leave in zip(self.layer1, self.exits, strict=True):
            s = block(s)
            scores.append(leave(s.mean((2, 3))))
        return scores


class TwoExits(ThreeExits):
    """Three quarters of the channels, up to the second exit."""

    width, blocks = 3, 2


class OneExit(ThreeExits):
    """Half of the channels, up to the first exit."""

    width, blocks = 2, 1
