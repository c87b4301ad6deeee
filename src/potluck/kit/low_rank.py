"""Messages of low rank: a tensor as the part of its singular value decomposition that keeps a share of its energy.

`encode` and `decode` work on any named tensors that cross, in a step and on the server; the wire contract declares
them with `state_of(part, …, low_rank=True)`. `kit.compressed_small` does all of it for a shared small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from potluck.core.low_rank import FACTORS, largest_rank
from potluck.core.settings import Settings

Tensors = Mapping[str, Tensor]


class LowRank(Settings):
    """How much of each tensor's energy, the sum of its squared singular values, is kept."""

    start: float = Field(default=0.95, gt=0, le=1, description="share of the energy kept, T_start")
    end: float = Field(default=0.98, gt=0, le=1, description="share of the energy kept in the end, T_end")
    rounds: int = Field(default=100, ge=1, description="rounds in which it rises from start to end")
    of: Literal["updates", "weights"] = Field(
        default="updates", description="what is compressed: a round's changes of the weights, or the weights"
    )

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.end < self.start:
            raise ValueError(f"end is {self.end:g}, below start ({self.start:g}); the energy rises")
        if self.start == self.end and self.rounds != type(self).model_fields["rounds"].default:
            raise ValueError("rounds does nothing where start and end are the same")
        return self

    def energy(self, round_: int) -> float:
        """The share kept in a round, the first of which is 1: T_start + t/R·(T_end − T_start), then T_end.

        >>> [round(LowRank(start=0.9, end=1.0, rounds=4).energy(number), 3) for number in (1, 2, 4, 9)]
        [0.925, 0.95, 1.0, 1.0]
        """
        return self.start + min(round_ / self.rounds, 1.0) * (self.end - self.start)


@torch.no_grad()
def encode(tensors: Tensors, energy: float) -> dict[str, Tensor]:
    """Tensors of two or more dimensions as factors u, s, v of the least rank that keeps this share of their energy.

    A tensor stays whole where its factors would not be smaller, or where it is not finite. The ranks decide shapes,
    so this waits for the device: call it after training, never inside a loss.
    """
    factors = {name: _decompose(value) for name, value in tensors.items() if largest_rank(value.shape)}
    if not factors:
        return dict(tensors)
    found = torch.stack([_rank(*one, energy) for one in factors.values()]).tolist()  # one wait for all
    ranks = dict(zip(factors, found, strict=True))
    encoded: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not 1 <= ranks.get(name, 0) <= largest_rank(value.shape):
            encoded[name] = value
            continue
        rank, (u, s, v) = ranks[name], factors[name]
        kept = u[:, :rank].contiguous(), s[:rank].clone(), v[:rank].contiguous()
        encoded |= {f"{name}:{factor}": part for factor, part in zip(FACTORS, kept, strict=True)}
    return encoded


def _decompose(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition u, s, v of a tensor as a matrix: its first dimension by all others.

    By the eigenvectors of the smaller of W·Wᵀ and Wᵀ·W in double precision: as exact as a decomposition in single
    precision, and several times faster. The matrix is scaled to a largest entry of 1, so that extreme values do not
    overflow; what is not finite counts as 0, and the scale then makes singular values that are not finite either.
    """
    matrix = value.reshape(len(value), -1)
    scale = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    scaled = (matrix / scale).nan_to_num(0.0, 0.0, 0.0).double()
    tall = matrix.shape[0] > matrix.shape[1]
    wide = scaled.T if tall else scaled
    vectors = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(1)  # the largest first
    rows = vectors.T @ wide
    s = rows.norm(dim=1)
    others = rows / s.clamp_min(torch.finfo(s.dtype).tiny).unsqueeze(1)
    u, v = (others.T, vectors.T) if tall else (vectors, others)
    return u.to(value.dtype), (s * scale).to(value.dtype), v.to(value.dtype)


def _rank(u: Tensor, s: Tensor, v: Tensor, energy: float) -> Tensor:
    """The least r from 1 with Σ_{i≤r} σ_i² ≥ energy·Σσ_i², at most the full rank; 0 where a value is not finite."""
    total = (s.double() / s[0].clamp_min(torch.finfo(s.dtype).tiny)).square().cumsum(0)
    rank = torch.searchsorted(total, energy * total[-1]).clamp(max=len(s) - 1) + 1
    return torch.where(s.isfinite().all(), rank, 0)


@torch.no_grad()
def decode(tensors: Tensors, like: Tensors) -> dict[str, Tensor]:
    """The inverse of `encode`: every tensor whole, in the shape that it has in `like`."""
    whole = {name: value for name, value in tensors.items() if name in like}
    for name, value in like.items():
        if name not in whole and f"{name}:s" in tensors:
            u, s, v = (tensors[f"{name}:{factor}"] for factor in FACTORS)
            whole[name] = ((u * s) @ v).reshape(value.shape)
    return whole
