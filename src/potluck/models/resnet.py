"""ResNet10 to ResNet26, the family of FedIN: basic blocks of 64 to 512 channels; only depth differs.

Layers have the same names at every depth (`layer1.0.conv1.weight`, `head.weight`), so averaging by name meets
each layer with its counterparts. The stem is conv1 to max-pool; the body is everything up to the pooled 512
features. With another `rep_dim` an adapter follows inside the body, and `model.adapter` names it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.errors import ModelError, nearest
from potluck.models.base import Model, make_adapter
from potluck.models.registry import register
from potluck.task import Task

WIDTHS = (64, 128, 256, 512)
STEMS = ("imagenet", "cifar")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class ResNet(Model):
    """A residual network; `stem` is "imagenet" (7×7 stride 2, max-pool) or "cifar" (3×3, no pooling)."""

    has_stem = True

    def __init__(
        self, task: Task, blocks: tuple[int, int, int, int], rep_dim: int | None, stem: str, adapter: str
    ) -> None:
        super().__init__()
        if stem not in STEMS:
            raise ModelError(f"unknown stem {stem!r} for a resnet; {nearest(stem, STEMS)}")
        large = stem == "imagenet"
        self.stem_pools = large
        self.rep_dim = rep_dim or WIDTHS[-1]
        size, stride, padding = (7, 2, 3) if large else (3, 1, 1)
        self.conv1 = nn.Conv2d(task.input[0], WIDTHS[0], size, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.layer1 = _stage(WIDTHS[0], WIDTHS[0], blocks[0], stride=1)
        self.layer2 = _stage(WIDTHS[0], WIDTHS[1], blocks[1], stride=2)
        self.layer3 = _stage(WIDTHS[1], WIDTHS[2], blocks[2], stride=2)
        self.layer4 = _stage(WIDTHS[2], WIDTHS[3], blocks[3], stride=2)
        self.resize, self.adapter = make_adapter(adapter, WIDTHS[-1], self.rep_dim)
        self.head = nn.Linear(self.rep_dim, task.classes)
        self._initialise()

    def stem(self, x: Tensor) -> Tensor:
        """conv1, batch norm, ReLU and, in the imagenet form, max-pooling."""
        s = F.relu(self.bn1(self.conv1(x)))
        return F.max_pool2d(s, 3, stride=2, padding=1) if self.stem_pools else s

    def body(self, s: Tensor) -> Tensor:
        """Four stages, the mean over all positions, and the adapter if there is one."""
        s = self.layer4(self.layer3(self.layer2(self.layer1(s))))
        features: Tensor = self.resize(s.mean((2, 3)))
        return features

    def _initialise(self) -> None:
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))


@register("resnet10", takes=("image",))
def resnet10(
    task: Task, rep_dim: int | None = None, stem: str = "imagenet", adapter: str = "linear"
) -> ResNet:
    """1, 1, 1, 1 blocks; 4.9 M parameters."""
    return ResNet(task, (1, 1, 1, 1), rep_dim, stem, adapter)


@register("resnet14", takes=("image",))
def resnet14(
    task: Task, rep_dim: int | None = None, stem: str = "imagenet", adapter: str = "linear"
) -> ResNet:
    """1, 1, 2, 2 blocks; 10.8 M parameters."""
    return ResNet(task, (1, 1, 2, 2), rep_dim, stem, adapter)


@register("resnet18", takes=("image",))
def resnet18(
    task: Task, rep_dim: int | None = None, stem: str = "imagenet", adapter: str = "linear"
) -> ResNet:
    """2, 2, 2, 2 blocks; 11.2 M parameters."""
    return ResNet(task, (2, 2, 2, 2), rep_dim, stem, adapter)


@register("resnet22", takes=("image",))
def resnet22(
    task: Task, rep_dim: int | None = None, stem: str = "imagenet", adapter: str = "linear"
) -> ResNet:
    """2, 2, 3, 3 blocks; 17.1 M parameters."""
    return ResNet(task, (2, 2, 3, 3), rep_dim, stem, adapter)


@register("resnet26", takes=("image",))
def resnet26(
    task: Task, rep_dim: int | None = None, stem: str = "imagenet", adapter: str = "linear"
) -> ResNet:
    """3, 3, 3, 3 blocks; 17.5 M parameters."""
    return ResNet(task, (3, 3, 3, 3), rep_dim, stem, adapter)
