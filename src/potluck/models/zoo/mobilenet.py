"""MobileNetV2 (Sandler et al., CVPR 2018) at width 1: depthwise convolutions inside narrow blocks.

All convolutions are padded, so images of any size work. Five of them halve the image: a 32×32 image is a single
position from the blocks of 160 channels on. Convolutions start as in ResNets (`scale_convolutions`), batch norm
at 1 and 0.
"""

from __future__ import annotations

from torch import Tensor, nn

from potluck.core.task import Task
from potluck.models.parts import Backbone, scale_convolutions
from potluck.models.registry import register

STEM = 32
WIDTH = 1280
GROUPS = (  # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """1×1 to `expansion` times the channels, a depthwise 3×3, 1×1 without activation; a shortcut if it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.shortcut = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *([_unit(inputs, hidden, 1)] if expansion > 1 else []),
            _unit(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out: Tensor = self.layers(x)
        return x + out if self.shortcut else out


class MobileNetV2(Backbone):
    """A convolution, 17 inverted residuals, a 1×1 convolution; dropout on the 1280 features, before the adapter."""

    def __init__(
        self, task: Task, rep_dim: int | None = None, adapter: str = "linear", dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.first = _unit(task.input[0], STEM, 3, stride=2)
        blocks = []
        inputs = STEM
        for expansion, outputs, repeats, stride in GROUPS:
            for repeat in range(repeats):
                blocks.append(InvertedResidual(inputs, outputs, 1 if repeat else stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.last = _unit(inputs, WIDTH, 1)
        self.dropout = nn.Dropout(dropout)
        scale_convolutions(self)
        self.finish(WIDTH, task, rep_dim, adapter)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution: 32 channels, half the height and width."""
        s: Tensor = self.first(x)
        return s

    def body(self, s: Tensor) -> Tensor:
        """The inverted residuals, the last convolution, the mean over all positions, dropout, the adapter."""
        pooled = self.last(self.blocks(s)).mean((2, 3))
        features: Tensor = self.resize(self.dropout(pooled))
        return features


def _unit(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())


@register("mobilenet-v2", takes=("image",))
def mobilenet_v2(
    task: Task, rep_dim: int | None = None, adapter: str = "linear", dropout: float = 0.2
) -> MobileNetV2:
    """MobileNetV2 at width 1."""
    return MobileNetV2(task, rep_dim, adapter, dropout)
