"""Random views of samples, for contrastive losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.core.streams import Prepare


@dataclass(frozen=True)
class RandomViews:
    """Prepare a sample as its client does, then change it at random."""

    prepare: Prepare | None
    operations: tuple[Any, ...]  # on images
    drop: float  # share of the numbers or tokens that is left out of other samples

    def __call__(self, raw: Tensor, generator: torch.Generator | None) -> Tensor:
        """A view of every sample; without a generator the samples as they are."""
        x = raw if self.prepare is None else self.prepare(raw, None)
        if generator is None:
            return x
        if x.ndim != 4:
            left_out = torch.rand(x.shape, device=x.device, generator=generator) < self.drop
            return x.masked_fill(left_out, 0)
        for operation in self.operations:
            x = operation(x, generator)
        return x
