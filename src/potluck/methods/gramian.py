"""Gramian: alignment by the volume that a client's and its peers' representations span, the loss of GRAM.

GRAM (Cicchetti et al., ICLR 2025) aligns several modalities of a sample; FedMuscle's paper (arXiv 2602.01626)
compares with it as a loss between clients. The protocol is that of `fedmuscle`. For each batch of B public samples:

    Up:     Z^n, the client's representations, B·d scalars.
    Down:   those of M other clients, drawn by the server, M·B·d scalars.
    Client: one step on all of the model but its head along the mean over i of

        L^n(z_i) = ½·[ CE_j(−V(z_i, m_j)/τ, i) + CE_j(−V(z_j, m_i)/τ, i) ],    m_j = (z^1_j … z^M_j)
        V(v_1 … v_k) = √det G,  G_ab = ⟨v_a, v_b⟩ of k = M + 1 unit vectors

    CE_j is the cross-entropy of a softmax over j with smoothed labels (ε = 0.1); τ is learned, from 0.07.

More vectors than the width, k > d, always have the volume 0 and are refused. A volume is near 0 as soon as any two
of its vectors agree, a known weakness of the objective.

INFERRED: the anchor is the client's own model, the rest are its peers; the values are those of GRAM's code, as
FedMuscle's are not known. Deviations: GRAM's code takes √|det|, whose gradient has no bound where vectors agree
perfectly; here the squared length that each vector adds to the span of those before it is at least 1e-6. GRAM
trains τ itself, here log τ, which keeps it positive. Its matching loss (ITM) is no part of the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.contrastive import LearnedTemperature, Temperature, gramian
from potluck.kit.peer_alignment import PeerAlignment, PeerAlignmentConfig
from potluck.kit.requirements import named


class Gramian(PeerAlignment):
    """Train on the own task; then make the volume small that own and peers' representations of a sample span."""

    name = "gramian"
    citation = "Cicchetti et al., ICLR 2025 (GRAM); in FedMuscle, ICLR 2026"

    class Config(PeerAlignmentConfig):
        """Options of Gramian alignment."""

        tau: float = option(
            default=0.07,
            gt=0,
            description="τ, the temperature of the softmax; where it is learned, its first value",
            source="GRAM's code",
        )
        learned: bool = option(
            default=True,
            description="train τ with the representation, each client its own",
            source="GRAM's code",
        )
        smoothing: float = option(
            default=0.1,
            ge=0,
            lt=1,
            description="ε: the share of a label that is spread over all candidates",
            source="GRAM's code",
        )

    def check(self, population: Population) -> None:
        """As ever; and no more vectors than a representation has columns."""
        super().check(population)
        first, vectors = population.ids[0], self.config.peers + 1
        if vectors > population.width(first):
            raise ConfigError(
                f"{self.name}: {vectors} vectors (method.peers and the client's own) always have volume 0 in the "
                f"representation of {named(population, first)}, which has width {population.width(first)}; lower "
                "method.peers, raise models.rep_dim, or use pairwise"
            )

    def client_state(self, task: Task, model: Model, **learned: nn.Module) -> dict[str, Any]:
        """With the temperature where it is learned."""
        if self.config.learned:
            learned = {"temperature": LearnedTemperature(self.config.tau)}
        return super().client_state(task, model, **learned)

    def aligned(self, model: Model) -> list[str]:
        """The representation, and the temperature where it is learned."""
        return super().aligned(model) + (["temperature"] if self.config.learned else [])

    def tau(self, client: Client) -> Temperature:
        """τ as it is set, or as it was learned."""
        if not self.config.learned:
            return super().tau(client)
        tau: Tensor = client["temperature"]()
        return tau

    def contrast(
        self, client: Client, anchor: Tensor, others: Sequence[Tensor], masks: Any
    ) -> dict[str, Tensor]:
        """The volumes of a sample's tuple against those of others, both ways."""
        options: dict[str, Any] = {"negatives": "anchor", "smoothing": self.config.smoothing}
        return {"gramian": gramian(anchor, others, self.tau(client), **options, **masks)}
