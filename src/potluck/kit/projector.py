"""Projectors: what brings two representations side by side, [r_small, r_large], to the width of the large one."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Projection = Literal["linear", "deep", "none"]


class Overlay(nn.Module):
    """No projector: the small representation is added to the first columns of the large one.

    Both stay in the sum, the width is the large one's, and nothing is trained. What "no projector" means is our
    choice (INFERRED): a plain concatenation would be wider than the private header takes, and cutting it back would
    throw the last large features away.
    """

    def __init__(self, small: int, large: int) -> None:
        super().__init__()
        self.small, self.large = small, large

    def forward(self, both: Tensor) -> Tensor:
        """(batch, small + large) to (batch, large)."""
        first, rest = torch.split(both, [self.small, self.large], dim=1)
        return rest + F.pad(first, (0, self.large - self.small))

    def extra_repr(self) -> str:
        """Shown when the module is printed."""
        return f"{self.small}, {self.large}"


def make_projector(kind: Projection, small: int, large: int) -> nn.Module:
    """From `small + large` columns to `large`: one layer; two with a ReLU between, the hidden one as wide; or none.

    >>> make_projector("linear", 2, 3)
    Linear(in_features=5, out_features=3, bias=True)
    """
    if kind == "none":
        return Overlay(small, large)
    if kind == "linear":
        return nn.Linear(small + large, large)
    return nn.Sequential(nn.Linear(small + large, large), nn.ReLU(), nn.Linear(large, large))
