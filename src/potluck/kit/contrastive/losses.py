"""Losses between an anchor and M peers: pairwise InfoNCE, Muscle and Gramian. The package says what they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from potluck.errors import ConfigError
from potluck.kit.contrastive.comparison import Comparison, Masks, Reduction, full_precision, info_nce, prepare
from potluck.kit.contrastive.temperatures import TAU, TAU_PREV, Temperature, expect_positive, gamma_of
from potluck.kit.contrastive.tuples import (
    diagonals,
    log_negatives,
    log_partition,
    positive_exponent,
    tuples_within,
)
from potluck.kit.contrastive.volumes import Span, log_sum_of_volumes, volume

Negatives = Literal["tuples", "anchor"]
Positive = Literal["weighted", "plain"]

MEMORY = 256 * 2**20  # bytes for the tuples of one piece, with what its gradient needs


def pairwise(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
    normalize: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """The sum of InfoNCE over the peers, which is `muscle` at γ = 0. `tau`: scalar, or (M+1)×(M+1)."""
    with full_precision(anchor):
        compared = prepare(anchor, peers, weight, present, normalize)
        losses = [info_nce(scores) for scores in compared.scores(tau)]
        return compared.reduce(torch.stack(losses).sum(0), reduction)


def muscle(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    tau_prev: Temperature = TAU_PREV,
    *,
    weight: Tensor | None = None,
    present: Masks | None = None,
    normalize: bool = True,
    positive: Positive = "weighted",
    memory: int = MEMORY,
    reduction: Reduction = "mean",
) -> Tensor:
    """The Muscle loss (FedMuscle, ICLR 2026), for anchor i and tuples j = (j_1 … j_M):

        L_i = −log[ α_(i…i) exp(Σ_m z_i·z^m_i / τ_m) / Σ_j α_j exp(Σ_m z_i·z^m_{j_m} / τ_m) ]
        α_j = exp(−Σ_{m<k} γ_mk z^m_{j_m}·z^k_{j_k}),    γ = 1/τ^(N−1) − 1/τ^(N)

    and the mean over anchors. Inferred, not published: the sum includes the positive tuple, rows are normalised,
    and a batch counts by its mean. `positive="plain"` takes α_(i…i) = 1, above and below the line: whether the
    paper weighs the positive tuple is not clear, its derivation by density ratios does.

    `tau` is τ^(N), a scalar or an (M+1)×(M+1) matrix whose first row and column are the anchor's, symmetric;
    `tau_prev` is τ^(N−1), a scalar or the M×M matrix among the peers. Tensors may be learned, see
    `Temperatures`. With B×B matrices of inner products a tuple costs a few additions, whatever d is. Where the
    B^(M+1) exponents and their gradient take more than `memory` bytes they are computed in pieces, and again for
    the gradient.
    """
    with full_precision(anchor):
        compared = prepare(anchor, peers, weight, present, normalize)
        scores, ties = compared.scores(tau), compared.ties(gamma_of(tau, tau_prev))
        room = tuples_within(memory, 1, scores[0])
        if positive == "plain":
            own = positive_exponent(scores, [])
            below = torch.logaddexp(own, log_negatives(scores, ties, room))
        else:
            own, below = positive_exponent(scores, ties), log_partition(scores, ties, room)
        return compared.reduce(below - own, reduction)


def gramian(
    anchor: Tensor,
    peers: Sequence[Tensor],
    tau: Temperature = TAU,
    *,
    negatives: Negatives = "tuples",
    smoothing: float = 0.0,
    weight: Tensor | None = None,
    present: Masks | None = None,
    memory: int = MEMORY,
    reduction: Reduction = "mean",
) -> Tensor:
    """−log softmax of −V/τ, where V = sqrt(det Gram) is the volume that anchor and peers, M+1 unit vectors, span.

    `negatives="tuples"`: all B^M tuples of the peers, as in Muscle. `negatives="anchor"`: only tuples of one
    sample, with anchors of other samples. As in GRAM (Cicchetti et al., ICLR 2025; recalled) it is the mean of two
    softmaxes, over the samples for each anchor and over the anchors for each sample. Which of them FedMuscle
    compares with, and at which temperature, is not known. `smoothing` of the labels, and a `tau` that is learned,
    are for `anchor`.
    """
    if negatives not in ("tuples", "anchor"):
        raise ConfigError(f"negatives is {negatives!r}; give 'tuples' or 'anchor'")
    with full_precision(anchor):
        expect_positive("tau", tau)
        compared = prepare(anchor, peers, weight, present, normalize=True)
        if negatives == "anchor":
            return compared.reduce(_gramian_by_sample(compared, tau, smoothing), reduction)
        if smoothing or isinstance(tau, Tensor):
            raise ConfigError(
                "smoothed labels and learned temperatures are not for negatives 'tuples'; set negatives to 'anchor'"
            )
        room = tuples_within(memory, len(peers) + 1, compared.anchor)
        return compared.reduce(_gramian_by_tuple(compared, tau, room), reduction)


def _gramian_by_tuple(compared: Comparison, tau: float, room: int) -> Tensor:
    """The loss of every anchor against all tuples of the peers, `room` tuples at a time."""
    products, among, ones = compared.products(), compared.among(), torch.ones_like(compared.weight)
    barriers = [own.log() for own in compared.candidates()]
    span = Span(products, barriers, ones, [ones] * len(products), among, ones.new_ones(()))
    positive = volume(diagonals(products), [diagonals(row) for row in among]) / -tau
    return log_sum_of_volumes(span, tau, room) - positive


def _gramian_by_sample(compared: Comparison, tau: Temperature, smoothing: float) -> Tensor:
    """The loss of every anchor: its tuple against those of other samples, and itself against other anchors."""
    products, has = compared.products(), compared.presence()
    among = [diagonals(row) for row in compared.among()]
    # An anchor compares the peers that have its own sample; a tuple that lacks one of them is no candidate.
    seen = [x * own[:, None] for x, own in zip(products, has, strict=True)]
    seen_among = [
        [x * (has[m] * has[k])[:, None] for k, x in enumerate(row, m + 1)] for m, row in enumerate(among)
    ]
    whole = torch.stack([own[:, None] <= own for own in has]).all(0)
    over_samples = (volume(seen, seen_among) / -tau).masked_fill(~whole, -math.inf)
    volumes = volume([x.T for x in products], [[x[:, None] for x in row] for row in among])
    # A missing anchor keeps its own column, so that its loss, which has no weight, is finite.
    real = (compared.weight > 0) | torch.eye(len(volumes), dtype=torch.bool, device=volumes.device)
    over_anchors = (volumes / -tau).masked_fill(~real, -math.inf)
    return (info_nce(over_samples, smoothing) + info_nce(over_anchors, smoothing)) / 2
