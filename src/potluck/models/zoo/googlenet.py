"""GoogLeNet (Szegedy et al., CVPR 2015) as it is used today: batch norm, no auxiliary heads.

As in torchvision, the branch the paper draws with 5×5 convolutions has 3×3 ones. Convolutions start normal with
a standard deviation of 0.01, batch norm (epsilon 0.001) at 1 and 0. Pooling rounds up: a 32×32 image is 8×8
after the stem, 4×4 in stage 3, 2×2 in stage 4 and a single position in stage 5, where the outer eight weights of
a 3×3 convolution see only padding and do not learn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.task import Task
from potluck.models.parts import Backbone
from potluck.models.registry import register

WIDTH = 1024
SMALLEST = 15  # below that the third pooling is left with a single pixel


class Inception(nn.Module):
    """Four branches side by side: 1×1; 1×1 then 3×3; the same again, narrower; max-pooling then 1×1."""

    def __init__(
        self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int
    ) -> None:
        super().__init__()
        self.branch1 = _unit(inputs, one, 1)
        self.branch2 = nn.Sequential(_unit(inputs, three[0], 1), _unit(*three, 3))
        self.branch3 = nn.Sequential(_unit(inputs, five[0], 1), _unit(*five, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _unit(inputs, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        """The channels of all branches."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(Backbone):
    """Nine inception modules in three stages; dropout on the 1024 features, before the adapter."""

    def __init__(
        self, task: Task, rep_dim: int | None = None, adapter: str = "linear", dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.conv1 = _unit(task.input[0], 64, 7, stride=2)
        self.conv2 = _unit(64, 64, 1)
        self.conv3 = _unit(64, 192, 3)
        self.stage3 = nn.Sequential(
            Inception(192, 64, (96, 128), (16, 32), 32),
            Inception(256, 128, (128, 192), (32, 96), 64),
        )
        self.stage4 = nn.Sequential(
            Inception(480, 192, (96, 208), (16, 48), 64),
            Inception(512, 160, (112, 224), (24, 64), 64),
            Inception(512, 128, (128, 256), (24, 64), 64),
            Inception(512, 112, (144, 288), (32, 64), 64),
            Inception(528, 256, (160, 320), (32, 128), 128),
        )
        self.stage5 = nn.Sequential(
            Inception(832, 256, (160, 320), (32, 128), 128),
            Inception(832, 384, (192, 384), (48, 128), 128),
        )
        self.dropout = nn.Dropout(dropout)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, std=0.01)
        self.finish(WIDTH, task, rep_dim, adapter)

    def stem(self, x: Tensor) -> Tensor:
        """The 7×7 convolution and the first pooling: 64 channels, a quarter of the height and width."""
        return _pooled(self.conv1(x))

    def body(self, s: Tensor) -> Tensor:
        """The other convolutions, the inception modules, the mean over all positions, dropout, the adapter."""
        s = self.stage3(_pooled(self.conv3(self.conv2(s))))
        s = self.stage4(_pooled(s))
        s = self.stage5(_pooled(s, 2))
        features: Tensor = self.resize(self.dropout(s.mean((2, 3))))
        return features


def _unit(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=0.001), nn.ReLU())


def _pooled(s: Tensor, size: int = 3) -> Tensor:
    return F.max_pool2d(s, size, stride=2, ceil_mode=True)


@register("googlenet", takes=("image",), smallest=SMALLEST)
def googlenet(
    task: Task, rep_dim: int | None = None, adapter: str = "linear", dropout: float = 0.2
) -> GoogLeNet:
    """GoogLeNet without auxiliary heads."""
    return GoogLeNet(task, rep_dim, adapter, dropout)
