"""Semantic segmentation: a small network, and a decoder for larger ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.models.registry import register

WIDTH = 64
GRID = 4  # the last convolution is averaged down to 4×4, so larger images cost no parameters


class ConvDense(Model):
    """Convolutions at full and at half the resolution; the features describe the whole image.

    The head is a 1×1 convolution over a pixel's channels at both resolutions and the features: the class of a pixel
    depends on its surroundings and on the whole image. `forward` gives the scores, (batch, classes, height, width),
    as they are not a function of the features alone.
    """

    has_stem = True

    def __init__(self, task: Task, rep_dim: int) -> None:
        super().__init__()
        self.rep_dim = rep_dim
        self.conv1 = nn.Conv2d(task.input[0], 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.fc = nn.Linear(32 * GRID * GRID, rep_dim)
        self.head = nn.Conv2d(16 + 32 + rep_dim, task.classes, 1)

    def stem(self, x: Tensor) -> Tensor:
        """The first convolution, at full resolution."""
        return F.relu(self.conv1(x))

    def body(self, s: Tensor) -> Tensor:
        """The convolutions at half the resolution, averaged, and the linear layer."""
        return self._view(self._coarse(s))

    def forward(self, x: Tensor) -> Tensor:
        """The scores of every pixel."""
        fine = self.stem(x)
        coarse = self._coarse(fine)
        view = self._view(coarse)[:, :, None, None].expand(-1, -1, *fine.shape[2:])
        scores: Tensor = self.head(torch.cat([fine, F.interpolate(coarse, size=fine.shape[2:]), view], 1))
        return scores

    def _coarse(self, s: Tensor) -> Tensor:
        return F.relu(self.conv3(F.relu(self.conv2(F.max_pool2d(s, 2)))))

    def _view(self, coarse: Tensor) -> Tensor:
        return F.relu(self.fc(F.adaptive_avg_pool2d(coarse, GRID).flatten(1)))


class MapsHead(nn.Module):
    """The decoder of SegFormer (Xie et al., NeurIPS 2021): linear layers over maps of several resolutions.

    Every map goes through a linear layer to one width and is enlarged to the first map's size; another linear layer
    with batch norm mixes them, a last one gives the scores of every position of the first map. Layers before
    the batch norm have no bias, as it would cancel one; SegFormer's layers to one width have biases.
    """

    def __init__(self, widths: Sequence[int], inner: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Conv2d(width, inner, 1, bias=False) for width in widths)
        self.mix = nn.Conv2d(len(widths) * inner, inner, 1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Conv2d(inner, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """The scores, (batch, classes) at the first map's height and width."""
        size = maps[0].shape[2:]
        pairs = zip(self.levels, maps, strict=True)
        levels = [F.interpolate(level(each), size, mode="bilinear") for level, each in pairs]
        mixed = F.relu(self.norm(self.mix(torch.cat(levels, 1))))
        scores: Tensor = self.classify(self.dropout(mixed))
        return scores


@register("conv-dense", takes=("pixels",), smallest=8)
def conv_dense(task: Task, rep_dim: int | None = None) -> ConvDense:
    """Three convolutions and a class for every pixel."""
    return ConvDense(task, rep_dim or WIDTH)
