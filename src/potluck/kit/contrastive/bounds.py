"""How much information an anchor shares with its peers: what FedMuscle's theorem says, and a bound that holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.kit.contrastive.comparison import Masks, full_precision, info_nce, prepare
from potluck.kit.contrastive.temperatures import TAU, Temperature
from potluck.kit.masks import mean_where


def theorem1_value(
    loss: Tensor,
    anchor: Tensor,
    peers: Sequence[Tensor],
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
) -> Tensor:
    """M·log B − L, which FedMuscle's Theorem 1 takes for a lower bound of the information anchor and peers share.

    It is not a bound: the theorem needs α to be a true ratio of densities, which fixed temperatures do not give. A
    constant anchor, which knows nothing, scores 1.43 with two opposite peers at B = 16; identical models on 16
    orthogonal items share log 16 = 2.77 and score 4.79 at M = 2. So log `information_bounds` beside it. `loss` is
    the mean that `muscle` gave for the same batch and masks. With masks, B counts the rows that are present.
    """
    with torch.no_grad(), full_precision(anchor):
        compared = prepare(anchor, peers, weight, present, normalize=False)
        logs = torch.stack([has * has.sum().clamp_min(1).log() for has in compared.presence()])
        return compared.reduce(logs.sum(0), "mean") - loss.detach()


def information_bounds(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
    normalize: bool = True,
) -> Tensor:
    """log B − InfoNCE for every peer, (M,): in expectation at most the information anchor and that peer share.

    The largest is a bound for what the anchor shares with all peers together. Average over batches first and take
    the largest then: the largest of every single batch is too large on average.
    """
    with torch.no_grad(), full_precision(anchor):
        compared = prepare(anchor, peers, weight, present, normalize)
        bounds = [
            mean_where(has.sum().clamp_min(1).log() - info_nce(scores), compared.weight * has)
            for scores, has in zip(compared.scores(tau), compared.presence(), strict=True)
        ]
        return torch.stack(bounds)
