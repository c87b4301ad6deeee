"""Clients exchange what their models say of public samples: the base of FedMD, RHFL and FCCL.

P_t are public samples drawn for a round from the shared seed, so that no id crosses. A client that was in no whole
round yet is a newcomer and prepares itself first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Down, PrivateModelConfig, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.public import Public
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import LastBatch, OptimizerSettings
from potluck.core.state import Holder
from potluck.core.streams import Stream, several_each, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.kit.public_knowledge import (
    OnPublicData,
    by_row,
    drawn_rows,
    public_of,
    public_samples,
    require_public_samples,
    scores,
)
from potluck.kit.requirements import require_one_label_set
from potluck.training.fit import Loss, fit


class DrawnSamplesConfig(PrivateModelConfig):
    """The option that says how many public samples a round has."""

    samples: int | None = option(
        default=None,
        ge=1,
        description="|P_t|; by default the released code's 5,000, or all if fewer",
        source="released code",
    )


class OnDrawnSamples(OnPublicData):
    """Public samples drawn for each round, `P_t` in shape formulas, and newcomers that prepare themselves."""

    models = "any"
    stays: tuple[str, ...] = ("data", "labels", "model", "representations")
    batch_option: ClassVar[str] = "batch"  # the option for the size of a public batch
    usual_batch: ClassVar[int] = 256  # its value where it is not set

    def setup(self, population: Population) -> None:
        """The sizes of P_t and of a batch."""
        super().setup(population)
        self.samples = public_samples(population, self.config.samples, 5000)
        self.batch = public_samples(population, getattr(self.config, self.batch_option), self.usual_batch)

    def check(self, population: Population) -> None:
        """P_t and a batch of it must fit into the public data."""
        require_public_samples(population, "samples", self.config.samples)
        require_public_samples(population, self.batch_option, getattr(self.config, self.batch_option))

    def symbols(self, card: Card) -> dict[str, int]:
        """P_t: the number of public samples in a round."""
        return super().symbols(card) | {"P_t": self.samples}

    def server_state(self, task: Task) -> dict[str, Any]:
        """The clients met so far, to tell newcomers apart."""
        return {"met": {}}

    def rows(self, holder: Holder) -> np.ndarray:
        """P_t of this round."""
        return drawn_rows(holder.public, holder.round, self.samples)

    def welcome(self, server: Server, clients: Clients) -> None:
        """Have newcomers prepare themselves."""
        met = server["met"].tensors()
        newcomers = [client for client in clients.ids if client not in met]
        if newcomers:
            clients.ask(self.begin, only=newcomers)

    def remember(self, server: Server, clients: Clients) -> None:
        """Note who was in the whole round."""
        server["met"].load({client: torch.ones((), device=server.device) for client in clients.ids})

    @client_step
    def begin(self, client: Client) -> None:
        """What a client does before it is first heard."""
        self.prepare(client)

    def prepare(self, client: Client) -> None:
        """Training before the first scores."""


class ScoreExchangeConfig(DrawnSamplesConfig):
    """The options of an exchange of scores in every round."""

    batch: int | None = option(
        default=None,
        ge=2,
        description="public samples in a step; by default the released code's 256, or |P_t| if fewer",
        source="released code",
    )
    public_epochs: PositiveInt = option(
        default=1, description="passes over P_t in a round; the released code's 1", source="released code"
    )
    exchange: Literal["round", "batch"] = option(
        default="round",
        description="how often clients hear of each other: once a round, or before every public batch, as in the "
        "released code, where every batch also has a new optimiser",
        source="round: ours; batch: released code",
    )
    pretrain_epochs: int = option(
        default=40,
        ge=0,
        description="epochs on private data before a client's first round; the released code's 40",
        source="released code",
    )
    private_epochs: Literal["training"] | Literal["published"] | PositiveInt = option(
        default="training",
        description="epochs on private data in a round: training.epochs, the released code's max(1, |P|/n_k), or a "
        "number",
        source="training: ours; published: released code",
    )


@dataclass(frozen=True)
class Piece:
    """The public rows of one exchange, and the batches they are learned in."""

    rows: np.ndarray
    batches: list[np.ndarray]


class ScoreExchange(OnDrawnSamples):
    """Score public samples, learn towards what the server makes of all scores, then train on private data."""

    last: ClassVar[LastBatch] = "keep"  # what becomes of a short last public batch
    bounds: ClassVar[Mapping[str, Any]] = {}  # of the scores, as in a contract
    said: ClassVar[str]  # what a client says of a public sample, in words
    heard: ClassVar[str]  # what it hears

    class Config(ScoreExchangeConfig):
        """Options of an exchange of scores."""

    def setup(self, population: Population) -> None:
        """A batch is no larger than P_t."""
        super().setup(population)
        self.batch = min(self.batch, self.samples)

    def check(self, population: Population) -> None:
        """Scores can be combined if all clients have the same classes, two at least."""
        super().check(population)
        require_one_label_set(population)

    def pieces(self, public: Public, round_: int) -> list[Piece]:
        """The exchanges of a round: one of all batches, or one for each; the same on every side."""
        rows, rng = drawn_rows(public, round_, self.samples), public.rng.child("round", round_, "batches")
        order = shuffled_batches(rows, self.batch, self.config.public_epochs, self.last, rng)
        batches = several_each(order)
        if self.config.exchange == "round":
            return [Piece(rows, batches)]
        return [Piece(one, [one]) for one in batches]

    def sent(self, again: bool = False) -> Contract:
        """What a client says in an exchange; `again`: after the first, where there are more."""
        if again and self.config.exchange == "round":
            return {}
        return {"scores": tensor(self._shape, self.said, optional=again, **self.bounds)}

    def received(self) -> Contract:
        """What it hears; nothing where it is alone."""
        return {"scores": tensor(self._shape, self.heard, optional=True)}

    @property
    def _shape(self) -> str:
        return "P_t, C" if self.config.exchange == "round" else f"r<={self.batch}, C"

    def round(self, server: Server, clients: Clients) -> None:
        """Newcomers prepare; then, exchange by exchange, everyone hears what the server makes of all scores."""
        if self.config.pretrain_epochs:
            self.welcome(server, clients)
        pieces = self.pieces(server.public, server.round)
        lengths = [{"scores": len(piece.rows)} for piece in pieces] + [{"scores": 0}]
        first = replies = clients.ask(self.score, rows=lengths[0])
        combine = self.combiner(server, first)
        for number in range(len(pieces)):
            replies = clients.ask(self.learn, combine(replies), rows=lengths[number + 1])
        self.remember(server, clients)
        self.keep(server, {client: first[client] for client in clients.ids})

    @abstractmethod
    def combiner(self, server: Server, first: Replies) -> Callable[[Replies], Down]:
        """How this round combines replies into what each client hears; `first` are the replies to `score`."""

    def keep(self, server: Server, first: Mapping[ClientId, Message]) -> None:
        """Keep for later rounds what clients that were in the whole round said first."""

    @client_step(up=lambda method: method.sent())
    def score(self, client: Client) -> Content:
        """What the model says of the first piece."""
        return {"scores": self.say(client, self.pieces(client.public, client.round)[0].rows)}

    @client_step(up=lambda method: method.sent(again=True), down=lambda method: method.received())
    def learn(self, client: Client, down: Message) -> Content:
        """Learn from a piece; then score the next one, or train on private data after the last."""
        pieces, number = self.pieces(client.public, client.round), client.count("piece")
        if "scores" in down:
            self.learn_piece(client, pieces[number], down)
        if number + 1 < len(pieces):
            return {"scores": self.say(client, pieces[number + 1].rows)}
        fit_epochs(client, self.loss, self.private_epochs(client))
        return {}

    def learn_piece(self, client: Client, piece: Piece, down: Message) -> None:
        """A step for each batch of the piece."""
        targets = by_row(client, piece.rows, self.targets(client, piece, down))
        public = Stream(client.public.source, piece.batches)
        fit(
            client,
            self.agree,
            train=["model"],
            streams={"public": public},
            optimizer=self.public_optimizer(client),
            scalars={"targets": targets},
        )

    def public_optimizer(self, client: Client) -> OptimizerSettings:
        """The optimiser on public data: that of `training`."""
        return client.training.optimizer

    def say(self, client: Client, rows: np.ndarray) -> Tensor:
        """What a client says of public rows: its logits."""
        return scores(client, rows)

    def targets(self, client: Client, piece: Piece, down: Message) -> Tensor:
        """What the client learns towards, by row of the piece: what it heard."""
        return down["scores"]

    @abstractmethod
    def agree(self, client: Client, batch: Batch, targets: Tensor) -> dict[str, Tensor]:
        """The loss on a public batch."""

    def private_epochs(self, client: Client) -> int:
        """Epochs on private data in a round."""
        asked = self.config.private_epochs
        if asked == "training":
            return client.training.epochs
        if asked == "published":
            return max(1, len(client.public) // max(client.samples, 1))
        return int(asked)

    def repeats(self, population: Population) -> dict[str, tuple[int, int]]:
        """A client learns once per exchange, and sends scores on the way to all but the first."""
        if self.config.exchange == "round":
            return {}
        rows, rng = np.arange(self.samples), public_of(population).rng
        once = several_each(shuffled_batches(rows, self.batch, 1, self.last, rng))
        exchanges = len(once) * self.config.public_epochs
        return {"learn": (exchanges - 1, exchanges)}


def fit_epochs(client: Client, loss: Loss, epochs: int) -> None:
    """Train the model on private data for so many epochs, which begin with the batches of `training.epochs`."""
    usual = client.training.epochs
    private = client.batches()
    steps = len(private) // usual * min(epochs, usual)
    order = [*private.order[:steps]]
    if epochs > usual and order:
        order += client.batches(epochs=epochs - usual).order
    fit(client, loss, train=["model"], streams={"private": replace(private, order=order)})
