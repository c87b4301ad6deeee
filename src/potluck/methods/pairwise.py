"""Pairwise: alignment of representations of public data with each peer on its own, FedMuscle's nearest comparison.

The protocol is that of `fedmuscle` (arXiv 2602.01626); only the loss differs. For each batch of B public samples:

    Up:     Z^n, the client's representations, B·d scalars.
    Down:   those of M other clients, drawn by the server, M·B·d scalars.
    Client: one step on all of the model but its head along the mean over i of InfoNCE (van den Oord et al., 2018),
            summed over the peers:

        L^n(z_i) = Σ_m −log[ exp(cos(z_i, z^m_i)/τ) / Σ_j exp(cos(z_i, z^m_j)/τ) ]

    with the rows of all clients from before the step as constants.

At τ^(N−1) = τ^(N), where α is 1, the Muscle loss is exactly this sum: `method: {name: fedmuscle, tau_prev: 0.2}`
gives the same run up to rounding. INFERRED: τ is that of FedMuscle's own loss, and so is the rest of the protocol.
`fedmuscle` with `loss: pairwise` has further options (bundles of batches, learned temperatures, another order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from potluck.core.client import Client
from potluck.core.options import option
from potluck.kit.contrastive import TAU, pairwise
from potluck.kit.peer_alignment import PeerAlignment, PeerAlignmentConfig


class Pairwise(PeerAlignment):
    """Train on the own task; then contrast representations of public batches with those of each peer."""

    name = "pairwise"
    citation = "van den Oord et al., arXiv 1807.03748 (InfoNCE); in FedMuscle, ICLR 2026"

    class Config(PeerAlignmentConfig):
        """Options of pairwise alignment."""

        tau: float = option(
            default=TAU,
            gt=0,
            description="τ, the temperature of every pair; FedMuscle's τ^(N), 0.2",
            source="inferred from FedMuscle's paper",
        )

    def contrast(
        self, client: Client, anchor: Tensor, others: Sequence[Tensor], masks: Any
    ) -> dict[str, Tensor]:
        """InfoNCE, summed over the peers."""
        return {"pairwise": pairwise(anchor, others, self.config.tau, **masks)}
