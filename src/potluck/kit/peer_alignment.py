"""The base of methods that align representations of public data with those of peers: FedMuscle, pairwise, Gramian.

Every client trains on its own task; then, batch by public batch, it sends its representations, gets those of M
others, which the server draws for it, and takes one step on all of its model but the head. A method gives the loss
of that step. Nothing is averaged; data, labels, model and head stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt
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
from potluck.kit.alignment_observations import Observations
from potluck.kit.contrastive import Temperature, information_bounds
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


class PeerAlignmentConfig(PrivateModelConfig):
    """The options of the protocol; those of a loss come with the method."""

    peers: PositiveInt = option(
        default=3, description="M: other clients that a client is compared with", source="FedMuscle's paper"
    )
    batch: int = option(
        default=32,
        ge=2,
        description="B: public samples in a batch",
        source="FedMuscle's example; the costs in its table are those of 20",
    )
    passes: PositiveInt = option(
        default=1, description="T: passes over the public data in a round; not known", source="not known"
    )
    optimizer: AligningOptimizer = option(
        default=AligningOptimizer(),
        description="the optimiser of the alignment, new in every round",
        source="ours",
    )


class PeerAlignment(OnPublicData):
    """Train on the own task; then align the representation model with M peers, batch by public batch."""

    models = "any, with representations of one width (models.rep_dim gives one)"
    tasks = "any"
    card_fields = ("width",)
    stays = ("data", "labels", "model", "representations")
    remedy = "lower training.optimizer.lr or method.optimizer.lr, or set training.clip"
    unit: bool = True  # whether representations are scaled to length 1
    mode = staticmethod(evaluating)  # of the model in an alignment step

    class Config(PeerAlignmentConfig):
        """Options of alignment with peers."""

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
        others = peers.x.unbind(1)
        masks: dict[str, Any] = {"weight": client.public.mask[batch.id].float(), "present": peers.y.unbind(1)}
        bounds = information_bounds(anchor, others, self.tau(client), normalize=self.unit, **masks)
        self.exchange.note(client, peers, bounds)
        return self.contrast(client, anchor, others, masks)

    def tau(self, client: Client) -> Temperature:
        """The temperature of the loss."""
        tau: float = self.config.tau
        return tau

    def contrast(
        self, client: Client, anchor: Tensor, others: Sequence[Tensor], masks: Any
    ) -> dict[str, Tensor]:
        """The loss by its name, and what else is logged of it."""
        raise NotImplementedError(f"{type(self).__name__} defines no contrast")

    def repeats(self, population: Population) -> dict[str, tuple[int, int]]:
        """A client aligns once per exchange, and sends the Z of all but the first on the way."""
        exchanges = self.exchange.exchanges(len(public_of(population)))
        return {"align": (exchanges - 1, exchanges)}
