"""A small network for images with captions: one encoder each, and comparable embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models.registry import register
from potluck.models.zoo.small import ConvNet
from potluck.models.zoo.text import TextMean

WIDTH = 64


class PairHead(nn.Module):
    """One linear layer for the image's half of the representation, another for the caption's."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.image = nn.Linear(width, embedding)
        self.text = nn.Linear(width, embedding)

    def forward(self, features: Tensor) -> Tensor:
        """Both embeddings side by side."""
        image, text = features.chunk(2, 1)
        return torch.cat([self.image(image), self.text(text)], 1)


class DualEncoder(Model):
    """`conv-small` for the image, `text-mean` for its caption; half of the features come from each."""

    def __init__(self, task: Task, rep_dim: int) -> None:
        super().__init__()
        if rep_dim % 2 or task.classes % 2:
            raise ModelError(f"dual-small needs an even rep_dim, half for each encoder, not {rep_dim}")
        self.rep_dim, self.pixels, self.shape = rep_dim, math.prod(task.image), task.image
        self.vocabulary = int(task.vocabulary or 0)
        length = task.input[0] - self.pixels
        self.image = ConvNet(Task("classification", 1, task.image), 2, rep_dim // 2, norm=False)
        self.text = TextMean(Task("text-classification", 1, (length,), task.vocabulary), rep_dim // 2)
        self.image.head = self.text.head = nn.Identity()
        self.head = PairHead(rep_dim // 2, task.classes // 2)

    def features(self, x: Tensor) -> Tensor:
        """The features of the image, then those of the caption."""
        image, tokens = x[:, : self.pixels].view(-1, *self.shape), x[:, self.pixels :]
        numbers = tokens.round().long().clamp(0, self.vocabulary - 1)
        return torch.cat([self.image.features(image), self.text.features(numbers)], 1)


@register("dual-small", takes=("pair",))
def dual_small(task: Task, rep_dim: int | None = None) -> DualEncoder:
    """An encoder for images and one for captions."""
    return DualEncoder(task, rep_dim or WIDTH)
