"""FedMuscle (ICLR 2026, arXiv 2602.01626): models of different tasks learn to represent public data alike.

A client's model is a representation model w, of the same width d everywhere, and a head φ for its own task. In a
round every client trains both for E epochs on its task, then takes T passes over the public data. For each batch
of B samples:

    Up:     Z^n, the client's representations, B·d scalars.
    Down:   the matrices of M other clients, drawn by the server for each client independently, M·B·d scalars. The
            paper sends what follows from them, S^n and α^n, B^M·(d + 1).
    Client: one step on w alone along the mean over i of

        L^n(z_i) = −log[ α_(i…i) exp(Σ_m z_i·z^m_i / τ^(N)) / Σ_j α_j exp(Σ_m z_i·z^m_{j_m} / τ^(N)) ]
        α_j = exp(−γ Σ_{m<m'} z^m_{j_m}·z^{m'}_{j_m'}),    γ = 1/τ^(N−1) − 1/τ^(N),    j over {1…B}^M

    with the Z of all clients from before the step as constants.

Nothing is averaged; there is no global model. Data, labels, model and head stay. A step on one batch and the Z of
the next are one exchange. A client that lacks a sample in its modality sends zeros for it; such a row is no
positive and no negative, and a batch of which a client has nothing makes no step.

Inferred, not published: α weighs the positive tuple, too (the text leaves it open, the derivation by density ratios
says so; `positive: plain` is the other reading); rows have length 1; a batch counts by the mean of its anchors; all
clients see public batches in the same order, without a short last one; one optimiser step per batch; peers are
drawn anew for every batch; each phase has its own optimiser. E, T and the number of rounds are unknown; E is
`training.epochs`. Ours: AdamW and its values, new in every round; alignment in evaluation mode, so that batch norm
keeps the statistics of private data and anchors are exactly the rows that were sent; `training.clip` and
`training.lr_decay` for both phases.

`methods/fedmuscle_variants.py` adds the losses it is compared with and other options; `method: fedmuscle` runs the
class there, which is this one unless an option says otherwise. `kit/peer_alignment.py` has the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.options import option
from potluck.kit.contrastive import MEMORY, TAU, TAU_PREV, Positive, Temperature, muscle, theorem1_value
from potluck.kit.peer_alignment import PeerAlignment, PeerAlignmentConfig


class FedMuscle(PeerAlignment):
    """Train on the own task; then align the representation model with M peers, batch by public batch."""

    name = "fedmuscle"
    citation = "FedMuscle, ICLR 2026 (arXiv 2602.01626)"
    positive: Positive = "weighted"  # whether α weighs the positive tuple too
    memory: int = MEMORY  # bytes for the B^M tuples of a batch

    class Config(PeerAlignmentConfig):
        """Options of FedMuscle."""

        tau: float = option(
            default=TAU,
            gt=0,
            description="τ^(N), the temperature of the loss; the paper's 0.2",
            source="paper",
        )
        tau_prev: float = option(
            default=TAU_PREV,
            gt=0,
            description="τ^(N−1), the temperature among the peers; the paper's 0.15. Equal to tau: pairwise",
            source="paper",
        )

        @model_validator(mode="after")
        def _gamma_is_not_negative(self) -> Self:
            if self.has_gamma and self.tau_prev > self.tau:
                raise ValueError(f"tau_prev is {self.tau_prev}, which must not be above tau, {self.tau}")
            return self

        @property
        def has_gamma(self) -> bool:
            """Whether the loss has the γ of the Muscle loss, which is about pairs of peers."""
            return self.peers > 1

    def tau(self, client: Client) -> Temperature:
        """τ^(N)."""
        return self.temperatures(client)[0]

    def temperatures(self, client: Client) -> tuple[Temperature, Temperature]:
        """τ^(N) and τ^(N−1)."""
        return self.config.tau, min(self.config.tau_prev, self.config.tau)  # above it, it does nothing

    def contrast(
        self, client: Client, anchor: Tensor, others: Sequence[Tensor], masks: Any
    ) -> dict[str, Tensor]:
        """The Muscle loss, and M·log B − L, which Theorem 1 takes for a bound."""
        options: dict[str, Any] = {"memory": self.memory, "normalize": self.unit, "positive": self.positive}
        tau, tau_prev = self.temperatures(client)
        loss = muscle(anchor, others, tau, tau_prev, **options, **masks)
        return {"muscle": loss, "theorem1_value": theorem1_value(loss, anchor, others, **masks)}
