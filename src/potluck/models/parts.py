"""Common parts of models: the base of networks in three parts, adapters to a common width, initial weights."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.errors import ModelError, nearest

ADAPTERS = ("linear", "pool", "max-pool")


class Backbone(Model):
    """A network of stem, body and head, with an adapter if another feature width is asked for.

    A subclass makes its layers, then calls `finish`, and ends `body` with `self.resize`. Adapter and head have
    torch's default initial weights in every family: a federation may share one head among all of them.
    """

    has_stem = True
    resize: nn.Module

    def finish(self, native: int, task: Task, rep_dim: int | None, adapter: str) -> None:
        """Make the adapter from the native width to `rep_dim` (None: no adapter) and the linear head."""
        self.rep_dim = rep_dim or native
        self.resize, self.adapter = make_adapter(adapter, native, self.rep_dim)
        self.head = nn.Linear(self.rep_dim, task.classes)


class FeaturePool(nn.Module):
    """Adaptive pooling along the feature axis: changes the width without parameters."""

    def __init__(self, width: int, largest: bool = False) -> None:
        super().__init__()
        self.width = width
        self.largest = largest

    def forward(self, features: Tensor) -> Tensor:
        """(batch, any width) to (batch, width)."""
        pool = F.adaptive_max_pool1d if self.largest else F.adaptive_avg_pool1d
        pooled: Tensor = pool(features, self.width)
        return pooled

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"{self.width}, {'max' if self.largest else 'mean'}"


def make_adapter(kind: str, native: int, rep_dim: int) -> tuple[nn.Module, str | None]:
    """The layer that brings features from `native` to `rep_dim` columns, and its name (None if they agree)."""
    if kind not in ADAPTERS:
        raise ModelError(f"unknown adapter {kind!r}; {nearest(kind, ADAPTERS)}")
    if native == rep_dim:
        return nn.Identity(), None
    if kind == "linear":
        return nn.Linear(native, rep_dim), kind
    return FeaturePool(rep_dim, largest=kind == "max-pool"), kind


def scaled(width: int, scale: float) -> int:
    """A share of a width, rounded up.

    >>> scaled(16, 0.3)
    5
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 64:
        raise ModelError(f"scale is {scale!r}; give a number above 0 and up to 64")
    return math.ceil(round(width * scale, 6))


def scale_convolutions(net: nn.Module) -> None:
    """Initial weights of He et al.: normal, with variance 2 / (outputs × kernel size).

    Weights without memory, of which only shapes are wanted, are left out: drawing them takes a second per model.
    """
    for part in net.modules():
        if isinstance(part, nn.Conv2d) and not part.weight.is_meta:
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
