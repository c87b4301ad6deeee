"""Residual networks (He et al., CVPR 2016): ResNet10 to 26, FedIN's family, and ResNet18 to 152 of FedRE's pool.

Up to 34 layers the blocks are basic and the features 512 wide; from 50 on they are bottlenecks, with the stride
in the 3×3 convolution, and the features 2048 wide. `width` (default 64) scales every layer. Layers have the
same names at every depth (`layer1.0.conv1.weight`, `head.weight`), so averaging by name combines each layer
with its counterparts. The stem is conv1 to max-pool; the body is everything up to the features and, with
another `rep_dim`, an adapter that `model.adapter` names. Convolutions start as `scale_convolutions` says, batch
norm at 1 and 0.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.task import Task
from potluck.errors import ModelError, nearest
from potluck.models.check import check_width
from potluck.models.parts import Backbone, scale_convolutions
from potluck.models.registry import register

STEMS = ("imagenet", "cifar")


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with batch norm and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class Bottleneck(nn.Module):
    """1×1 to a quarter of the channels, 3×3 with the stride, 1×1 back; batch norm after each, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(Backbone):
    """A residual network; `stem` is "imagenet" (7×7 stride 2, max-pool) or "cifar" (3×3, no pooling).

    `width` is that of the stem and the first stage; every further stage has twice as many channels.
    """

    def __init__(
        self,
        task: Task,
        block: Block,
        blocks: tuple[int, int, int, int],
        rep_dim: int | None = None,
        stem: str = "imagenet",
        adapter: str = "linear",
        width: int = 64,
    ) -> None:
        super().__init__()
        if stem not in STEMS:
            raise ModelError(f"unknown stem {stem!r} for a resnet; {nearest(stem, STEMS)}")
        check_width(width, "width")
        large = stem == "imagenet"
        self.stem_pools = large
        size, stride, padding = (7, 2, 3) if large else (3, 1, 1)
        self.conv1 = nn.Conv2d(task.input[0], width, size, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        expanded = width * block.expansion
        self.layer1 = _stage(block, width, width, blocks[0], stride=1)
        self.layer2 = _stage(block, expanded, 2 * width, blocks[1], stride=2)
        self.layer3 = _stage(block, 2 * expanded, 4 * width, blocks[2], stride=2)
        self.layer4 = _stage(block, 4 * expanded, 8 * width, blocks[3], stride=2)
        self.finish(8 * expanded, task, rep_dim, adapter)
        scale_convolutions(self)

    def stem(self, x: Tensor) -> Tensor:
        """conv1, batch norm, ReLU and, in the imagenet form, max-pooling."""
        s = F.relu(self.bn1(self.conv1(x)))
        return F.max_pool2d(s, 3, stride=2, padding=1) if self.stem_pools else s

    def body(self, s: Tensor) -> Tensor:
        """Four stages, the mean over all positions, and the adapter if there is one."""
        s = self.layer4(self.layer3(self.layer2(self.layer1(s))))
        features: Tensor = self.resize(s.mean((2, 3)))
        return features


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The input itself, or a 1×1 convolution of it where its shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _stage(block: Block, inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    further = (block(width * block.expansion, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(block(inputs, width, stride), *further)


def _register(name: str, block: Block, blocks: tuple[int, int, int, int]) -> None:
    @register(name, takes=("image",))
    def resnet(
        task: Task,
        rep_dim: int | None = None,
        stem: str = "imagenet",
        adapter: str = "linear",
        width: int = 64,
    ) -> ResNet:
        return ResNet(task, block, blocks, rep_dim, stem, adapter, width)


RESNETS: dict[int, tuple[Block, tuple[int, int, int, int]]] = {
    10: (BasicBlock, (1, 1, 1, 1)),
    14: (BasicBlock, (1, 1, 2, 2)),
    18: (BasicBlock, (2, 2, 2, 2)),
    22: (BasicBlock, (2, 2, 3, 3)),
    26: (BasicBlock, (3, 3, 3, 3)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
for _depth, (_block, _blocks) in RESNETS.items():
    _register(f"resnet{_depth}", _block, _blocks)
