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
class there, which is this one unless an option says otherwise. `methods/fedmuscle_observations.py` has what is
logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from potluck.core.client import Client
from potluck.core.message import Content, Message
from potluck.core.method import Clients, PrivateModelConfig, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.task import Batch, Task
from potluck.kit.contrastive import (
    MEMORY,
    TAU,
    TAU_PREV,
    Positive,
    Temperature,
    information_bounds,
    muscle,
    theorem1_value,
)
from potluck.kit.peer_exchange import Bundle, PeerExchange
from potluck.kit.public_knowledge import (
    OnPublicData,
    available_samples,
    public_of,
    representations,
    require_public_samples,
)
from potluck.kit.representation_model import representation_model
from potluck.kit.requirements import require_one_width, require_peers
from potluck.methods.fedmuscle_observations import Observations
from potluck.training.fit import fit
from potluck.training.modes import evaluating
from potluck.training.optimizers import fresh_moments


class AligningOptimizer(OptimizerSettings):
    """How the representation model is aligned. No source names an optimiser or its values: these are ours."""

    name: Literal["sgd", "adam", "adamw"] = option(
        default="adamw", description="the optimiser", source="ours"
    )
    lr: float = option(default=1e-3, gt=0, description="learning rate of an alignment step", source="ours")
    weight_decay: float = option(
        default=0.01, ge=0, description="weight decay of an alignment step", source="ours"
    )


class FedMuscle(OnPublicData):
    """Train on the own task; then align the representation model with M peers, batch by public batch."""

    name = "fedmuscle"
    citation = "FedMuscle, ICLR 2026 (arXiv 2602.01626)"
    models = "any, with representations of one width (models.rep_dim gives one)"
    tasks = "any"
    card_fields = ("width",)
    stays = ("data", "labels", "model", "representations")
    remedy = "lower training.optimizer.lr or method.optimizer.lr, or set training.clip"
    unit: bool = True  # whether representations are scaled to length 1
    positive: Positive = "weighted"  # whether α weighs the positive tuple too
    memory: int = MEMORY  # bytes for the B^M tuples of a batch
    mode = staticmethod(evaluating)  # of the model in an alignment step

    class Config(PrivateModelConfig):
        """Options of FedMuscle."""

        peers: PositiveInt = option(
            default=3, description="M: other clients that a client is compared with", source="paper"
        )
        batch: int = option(
            default=32,
            ge=2,
            description="B: public samples in a batch; 32 in the paper's example, its cost table fits 20",
            source="paper's example; its cost table fits 20",
        )
        passes: PositiveInt = option(
            default=1, description="T: passes over the public data in a round; not known", source="not known"
        )
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
        optimizer: AligningOptimizer = option(
            default=AligningOptimizer(),
            description="the optimiser of the alignment, new in every round",
            source="ours",
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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exchange = PeerExchange(self.config.batch, self.config.passes, self.config.peers)

    def setup(self, population: Population) -> None:
        """See which public samples each client has."""
        super().setup(population)
        self.exchange = replace(self.exchange, available=available_samples(population))

    def check(self, population: Population) -> None:
        """Public data must fill a batch, a cohort must have M peers, and representations one width."""
        require_public_samples(population, "batch", self.config.batch)
        require_peers(population, self.config.peers)
        require_one_width(population, "a representation space for all")

    def client_state(self, task: Task, model: Model, **learned: nn.Module) -> dict[str, Any]:
        """The model, what the peers sent, what is logged, and the state of the aligning optimiser."""
        modules = {"model": model, **learned}
        moments = fresh_moments(self.config.optimizer, modules, self.aligned(model), lifetime="round")
        return {**modules, "peers": self.exchange.client_state(model.rep_dim), "moments": moments}

    def aligned(self, model: Model) -> list[str]:
        """What alignment trains: w."""
        return representation_model(model)

    def round(self, server: Server, clients: Clients) -> None:
        """Train; then, batch by batch, give every client what its peers sent, and let it align."""
        bundles, seen = self.exchange.bundles(server.public, server.round), Observations()
        sent = [{"representations": sum(map(len, bundle))} for bundle in [*bundles, []]]
        replies = clients.ask(self.train, rows=sent[0])
        for number, bundle in enumerate(bundles):
            drawn = self.exchange.draw(server, replies.clients, number, len(bundle))
            replies = clients.ask(self.align, self.exchange.deal(replies, drawn), rows=sent[number + 1])
            seen.add(replies.reports, drawn)
        server.report.metrics |= seen.means(replies.clients)

    @client_step(up=lambda method: method.exchange.sent())
    def train(self, client: Client) -> Content:
        """E epochs on the whole model, then the Z of the first batch."""
        fit(client, self.loss)
        return self.represent(client, self.exchange.bundles(client.public, client.round)[0])

    @client_step(
        up=lambda method: method.exchange.sent(optional=True), down=lambda method: method.exchange.received()
    )
    def align(self, client: Client, down: Message) -> Content:
        """One step on w, then the Z of the next batch if there is one."""
        bundles, number = self.exchange.bundles(client.public, client.round), client.count("bundle")
        if "peers" in down:
            options = {"optimizer": self.config.optimizer, "moments": client["moments"].content}
            parts = self.aligned(client["model"].content)
            self.exchange.fit(client, down["peers"], bundles[number], self.alignment, train=parts, **options)
        return self.represent(client, bundles[number + 1]) if number + 1 < len(bundles) else {}

    def represent(self, client: Client, bundle: Bundle) -> Content:
        """Z^n."""
        return {"representations": representations(client, np.concatenate(bundle), self.unit)}

    def alignment(self, client: Client, batch: Batch, peers: Batch) -> dict[str, Tensor]:
        """L^n, with gradients through the client's own anchors alone; beside it what is logged about the batch."""
        with self.mode(client["model"].content):
            anchor = client["model"].features(batch.x)
        others, (tau, tau_prev) = peers.x.unbind(1), self.temperatures(client)
        masks: dict[str, Any] = {"weight": client.public.mask[batch.id].float(), "present": peers.y.unbind(1)}
        bounds = information_bounds(anchor, others, tau, normalize=self.unit, **masks)
        self.exchange.note(client, peers, bounds)
        return self.contrast(anchor, others, tau, tau_prev, masks)

    def temperatures(self, client: Client) -> tuple[Temperature, Temperature]:
        """τ^(N) and τ^(N−1)."""
        return self.config.tau, min(self.config.tau_prev, self.config.tau)  # above it, it does nothing

    def contrast(
        self, anchor: Tensor, others: Sequence[Tensor], tau: Temperature, tau_prev: Temperature, masks: Any
    ) -> dict[str, Tensor]:
        """The Muscle loss, and M·log B − L, which Theorem 1 takes for a bound."""
        options: dict[str, Any] = {"memory": self.memory, "normalize": self.unit, "positive": self.positive}
        loss = muscle(anchor, others, tau, tau_prev, **options, **masks)
        return {"muscle": loss, "theorem1_value": theorem1_value(loss, anchor, others, **masks)}

    def repeats(self, population: Population) -> dict[str, tuple[int, int]]:
        """A client aligns once per exchange, and sends the Z of all but the first on the way."""
        exchanges = len(self.exchange.bundles(public_of(population), 1))
        return {"align": (exchanges - 1, exchanges)}
