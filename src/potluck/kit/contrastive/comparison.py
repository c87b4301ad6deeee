"""What every loss compares: anchor and peers, checked, masked and scaled, with their inner products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.errors import ConfigError
from potluck.kit.contrastive.temperatures import Temperature, expect_positive, per_pair
from potluck.kit.masks import mean_where

Masks = Sequence[Tensor | None]
Reduction = Literal["mean", "none"]


@dataclass(frozen=True)
class Comparison:
    """An anchor and its peers; rows that are not present are zero."""

    anchor: Tensor
    peers: tuple[Tensor, ...]
    weight: Tensor  # of the anchors
    present: tuple[Tensor, ...] | None  # truth values, None where nothing is missing

    def presence(self) -> list[Tensor]:
        """Which rows each peer has, as zeros and ones."""
        if self.present is None:
            return [torch.ones_like(self.weight)] * len(self.peers)
        return [has.to(self.weight.dtype) for has in self.present]

    def products(self) -> list[Tensor]:
        """z_i·z^m_j per peer m, B×B."""
        return [self.anchor @ peer.T for peer in self.peers]

    def among(self) -> list[list[Tensor]]:
        """z^m_j·z^k_l for every pair of peers m < k, B×B: among()[m][k − m − 1]."""
        count = len(self.peers)
        return [[self.peers[m] @ self.peers[k].T for k in range(m + 1, count)] for m in range(count)]

    def candidates(self) -> list[Tensor]:
        """Per peer, B×B: whether its row j is a candidate for anchor i; nothing where all are.

        Where a peer lacks the anchor's sample, the row of that sample is its only candidate. The row is zero, and
        so are its inner products, so the peer drops out of positive and sum alike.
        """
        if self.present is None:
            return []
        own = torch.eye(len(self.weight), dtype=torch.bool, device=self.anchor.device)
        return [has[:, None] & has | own for has in self.present]

    def scores(self, tau: Temperature) -> list[Tensor]:
        """z_i·z^m_j / τ_m per peer, B×B; −∞ where row j is no candidate for anchor i."""
        inverse = 1 / self._temperature(tau)
        scores = [x * inverse[m] for m, x in enumerate(self.products())]
        allowed = self.candidates()
        return [x.masked_fill(~allowed[m], -math.inf) for m, x in enumerate(scores)] if allowed else scores

    def ties(self, gamma: Temperature) -> list[list[Tensor]]:
        """−γ_mk·z^m_j·z^k_l for every pair of peers m < k, B×B."""
        count = len(self.peers)
        table = -per_pair("tau_prev", gamma, count, self.anchor).expand(count, count)
        return [[x * table[m, k] for k, x in enumerate(row, m + 1)] for m, row in enumerate(self.among())]

    def _temperature(self, tau: Temperature) -> Tensor:
        """τ of the anchor with each peer, (M,)."""
        expect_positive("tau", tau)
        count = len(self.peers)
        table = per_pair("tau", tau, count + 1, self.anchor)
        return table[0, 1:] if table.ndim else table.expand(count)

    def reduce(self, losses: Tensor, reduction: Reduction) -> Tensor:
        """The mean over the anchors whose sample some peer has; or, with "none", each loss, zero for the others."""
        if reduction not in ("mean", "none"):
            raise ConfigError(f"reduction is {reduction!r}; give 'mean' or 'none'")
        answered = self.weight
        if self.present is not None:
            answered = answered * torch.stack(self.present).any(0)
        return mean_where(losses, answered) if reduction == "mean" else losses * (answered > 0)


def prepare(
    anchor: Tensor, peers: Sequence[Tensor], weight: Tensor | None, present: Masks | None, normalize: bool
) -> Comparison:
    """Check anchor, peers and masks, and bring them into one form: at least float32, missing rows zero."""
    _check(anchor, peers, weight, present)
    dtype = torch.promote_types(anchor.dtype, torch.float32)
    rows = len(anchor)
    weights = anchor.new_ones(rows, dtype=dtype) if weight is None else weight.detach().to(dtype)
    masks = None
    if present is not None and any(mask is not None for mask in present):
        everything = torch.ones(rows, dtype=torch.bool, device=anchor.device)
        masks = tuple(everything if mask is None else mask.detach() > 0 for mask in present)

    def scaled(matrix: Tensor, has: Tensor | None) -> Tensor:
        matrix = matrix.to(dtype)
        if has is not None:
            matrix = matrix.masked_fill(~has[:, None], 0)
        return F.normalize(matrix, dim=1) if normalize else matrix

    return Comparison(
        scaled(anchor, None if weight is None else weights > 0),
        tuple(scaled(peer.detach(), masks[m] if masks else None) for m, peer in enumerate(peers)),
        weights,
        masks,
    )


def _check(anchor: Tensor, peers: Sequence[Tensor], weight: Tensor | None, present: Masks | None) -> None:
    """Refuse shapes that cannot be compared."""
    if anchor.ndim != 2:
        raise ConfigError(f"the anchor has shape {tuple(anchor.shape)}; give samples × width")
    rows, width = anchor.shape
    if rows < 2:
        raise ConfigError(f"a batch of {rows} has no negatives; contrast at least 2 public samples")
    if not peers:
        raise ConfigError("the list of peers is empty; a contrastive loss needs at least one")
    for place, peer in enumerate(peers):
        if peer.ndim != 2 or peer.shape[1] != width:
            raise ConfigError(
                f"peer {place} has shape {tuple(peer.shape)} and the anchor {tuple(anchor.shape)}: "
                "bring all representations to one width"
            )
        if len(peer) != rows:
            raise ConfigError(
                f"peer {place} represents {len(peer)} samples and the anchor {rows}; give the same"
            )
    if present is not None and len(present) != len(peers):
        raise ConfigError(f"there are {len(present)} masks for {len(peers)} peers; give one each")
    for name, mask in [("weight", weight), *(("a mask of present", mask) for mask in present or ())]:
        if mask is not None and tuple(mask.shape) != (rows,):
            raise ConfigError(f"{name} has shape {tuple(mask.shape)}, expected {(rows,)}")


def info_nce(scores: Tensor, smoothing: float = 0.0) -> Tensor:
    """InfoNCE of every anchor: −log softmax of its own column in a square matrix of scores.

    With `smoothing` ε the target is (1 − ε)·(own column) + ε·(all candidates alike); −∞ marks what is none.
    """
    own = scores.diagonal()
    if smoothing:
        allowed = ~scores.isneginf()
        mean = scores.masked_fill(~allowed, 0.0).sum(1) / allowed.sum(1)
        own = (1 - smoothing) * own + smoothing * mean
    return scores.logsumexp(1) - own


def full_precision(like: Tensor) -> torch.autocast:
    """No autocast on the device of a tensor: exponentials of inner products need float32."""
    return torch.autocast(like.device.type, enabled=False)
