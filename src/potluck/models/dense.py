"""A small network that gives every pixel a class, for semantic segmentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.models.base import Model
from potluck.models.registry import register
from potluck.task import Task

WIDTH = 64
GRID = 4  # the last convolution is averaged down to 4×4, so larger images cost no parameters


class ConvDense(Model):
    """Convolutions at full and at half the resolution; the representation is a view of the whole image.

    The head is a 1×1 convolution over a pixel's answers at both resolutions and the representation: what a pixel
    is depends on its surroundings and on what the image shows. It is `forward` that gives the scores, (batch,
    classes, height, width), as they are not a function of the representation alone.
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


@register("conv-dense", takes=("pixels",), smallest=8)
def conv_dense(task: Task, rep_dim: int | None = None) -> ConvDense:
    """Three convolutions and a class for every pixel."""
    return ConvDense(task, rep_dim or WIDTH)
