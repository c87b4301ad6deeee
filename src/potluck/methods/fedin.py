"""FedIN (Chan et al., arXiv 2304.00759): clients learn from what enters and leaves the body of other models."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, Shapes, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, client_step
from potluck.core.model import Model
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.state import BufferPolicy
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.kit.feature_exchange import FeatureExchange, ProjectOptions, blurred
from potluck.methods.fedavg import FedAvg
from potluck.training.fit import Gradients, fit, plus
from potluck.training.modes import still_statistics

NOTHING = Message()


def _sent(method: FedIN) -> Contract:
    weights = state_of("model", "the client's weights after local training")
    return {"model": weights, **(method.exchange.sent() if method.config.intermediate else {})}


def _received(method: FedIN) -> Contract:
    return {**FedAvg.down, **(method.exchange.received() if method.config.intermediate else {})}


class FedIN(FedAvg):
    """FedProx whose body also learns to turn other clients' s_in into their s_out.

    A model is stem, body and head: s_in = stem(x), s_out = body(s_in), scores = head(s_out).
    Up: the weights and one batch of (s_in, s_out), with noise, as features can be turned back into images.
    Down: the averaged weights of the client's layers and such batches of others.
    L_local = CE + (μ/2)·‖w − w⁰‖², L_IN = MSE(body(s_in), s_out) on received features.
    Stem and head step along G_local = ∇L_local, the body along a combination of it with G_IN = ∇L_IN:
    - `simplified` (Eq. 13): G_IN + (λ/2)·G_local;
    - `exact` (Eq. 12): Z = G_IN − min(0, b/a)·G_local with a = ⟨G_local, G_local⟩ and b = ⟨G_local, G_IN⟩. Taken
      literally (`combine: replace`) the label gradient is gone where b ≥ 0; `add` (inferred) takes G_local + Z;
    - `none`: G_IN + G_local, our reading of the ablation "w/o Opt"; "w/o Prox" is `mu: 0`.

    No code was released. Inferred, not published: w⁰ are the weights received; the first round, without features,
    follows G_local; `alternate` trains on L_local, then the body alone for as many steps, without the proximal
    term; of several batches each step takes the next; batch norm uses but does not remember the statistics of
    foreign features; the batch sent is a random one, in evaluation mode, with the noise of a noisy pass (s_out of
    the noisy s_in) also under `noise_when: upload`, repeated, noise and all, where samples are fewer; the server
    draws whose batches a client gets, never its own. `project` is ours; `averaged` maps learn from L_IN, too.
    """

    name = "fedin"
    citation = "Chan et al., arXiv 2304.00759"
    tasks = "classes"
    models = "with stem, body and head; features of one shape, or of any with project"
    card_fields = ("names", "width", "stem")

    class Config(ProjectOptions, FedAvg.Config):
        """Options of FedIN. The paper trains with Adam, learning rate 0.001, batches of 16, 5 local epochs."""

        share: Literal["all", "groups", "layers"] = "layers"  # Eq. 19; groups: Eqs. 20 and 21
        weights: Literal["samples", "uniform"] = "uniform"  # Eqs. 19 and 20; samples: Eq. 21
        buffers: BufferPolicy = "local"  # §4.3; the code of its sister InCo Aggregation averages them
        mu: float = Field(default=0.1, ge=0)  # μ; the paper gives μ/2 = 0.05
        intermediate: bool = True  # false: "w/o IN"; no features are made, sent or learned from
        alleviate: Literal["simplified", "exact", "none"] = "simplified"
        strength: float = Field(default=1.0, ge=0)  # λ of `simplified`; 1 in the paper
        scope: Literal["tensor", "whole"] = "tensor"  # of a and b in `exact`; tensor is inferred
        combine: Literal["add", "replace"] = "add"  # with `exact`
        schedule: Literal["joint", "alternate"] = "joint"
        noise: float = Field(default=0.8, ge=0, allow_inf_nan=False)  # in standard deviations of the features
        noise_per: Literal["batch", "channel"] = "batch"  # what has one standard deviation; batch is inferred
        noise_when: Literal["training", "upload"] = "training"  # in training too, or only when sent
        batch: int = Field(default=16, ge=2)  # samples in a batch of features; the paper's batch size
        batches: PositiveInt = 1  # sent to a client; our reading of the paper's "sample number"
        pool: Literal["round", "all"] = "round"  # drawn from the last round's, or everyone's newest

        @model_validator(mode="after")
        def _of_use(self) -> Self:
            self.refuse_idle("strength", needs="alleviate", among=("simplified",))
            self.refuse_idle("scope", "combine", needs="alleviate", among=("exact",))
            return self

    def check(self, population: Population) -> None:
        """Every client needs a stem and a body that learns; features have one shape unless they are projected."""
        super().check(population)
        if self.config.intermediate:
            self.exchange.check(population)

    @functools.cached_property
    def exchange(self) -> FeatureExchange:
        """How features cross."""
        config = self.config
        return FeatureExchange(config.space(), config.batch, config.batches, config.pool)

    def symbols(self, card: Card) -> dict[str, int]:
        """With p and q, the numbers in one sample before and after the body."""
        return super().symbols(card) | self.exchange.symbols(card)

    def expected(self, card: Card, part: str) -> Shapes | None:
        """Maps have a column for each of the client's channels."""
        return self.exchange.matrices(card) if part == "maps" else super().expected(card, part)

    def server_state(self, task: Task) -> dict[str, Any]:
        """The averaged tensors, the pool of features, the averaged maps."""
        return super().server_state(task) | self.exchange.server_state()

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, the features received, the maps where they are trained."""
        state = self.exchange.client_state(task, model) if self.config.intermediate else {}
        return {"model": model, **state}

    def round(self, server: Server, clients: Clients) -> None:
        """Train, also on the features of others; average the weights; keep the features that came."""
        self.introduce(server, clients)
        replies = clients.ask(self.train, functools.partial(self.training_downlink, server))
        server["weights"].load(self.mean(replies, "model", self.config.weights))
        if self.config.intermediate:
            self.exchange.keep(server, replies, self.config.weights)

    def training_downlink(self, server: Server, client: ClientId) -> Content:
        """The weights, and features of others: only who trains needs those."""
        features = self.exchange.lend(server, client) if self.config.intermediate else {}
        return {**self.downlink(server, client), **features}

    @client_step(up=_sent, down=_received)
    def train(self, client: Client, down: Message = NOTHING) -> Content:
        """Local epochs, with what others sent; then the weights and a batch of features."""
        self.receive(client, down)
        if not self.config.intermediate:
            self.learn(client, None)
            return {"model": client["model"].state()}
        with client.drawing_privately("noise"):
            self.learn(client, self.exchange.take(client, down))
            features = self.exchange.give(client, lambda x: self.features(client, x, self.config.noise))
        return {"model": client["model"].state(), **features}

    def learn(self, client: Client, received: Stream | None) -> None:
        """Local training and, where features came, feature training: in the same steps, or after it."""
        prox = {"model": self.config.mu} if self.config.mu else None
        joint = received is not None and self.config.schedule == "joint"
        if not joint:
            fit(client, self.loss, prox=prox)
        if received is not None:  # other streams make another captured step than that of the first round
            streams = {"private": client.batches(), "received": received}
            combine = functools.partial(self.steer, everything=joint)
            fit(client, self.loss, streams=streams, prox=prox if joint else None, combine=combine)

    def steer(self, terms: Mapping[str, Gradients], everything: bool) -> Gradients:
        """The body's gradient from those of both losses, the maps' their sum; the rest has its own, if it moves."""
        local = functools.reduce(plus, (value for term, value in terms.items() if term != "features"))
        theirs = terms["features"]
        maps = {name: theirs[name] + local[name] for name in theirs if name.startswith("maps/")}
        body = {name: value for name, value in theirs.items() if name not in maps}
        return {**(local if everything else {}), **alleviate(local, body, self.config), **maps}

    def loss(self, client: Client, batch: Batch, received: Batch | None = None) -> dict[str, Tensor] | Tensor:
        """L_local without its proximal term, L_IN where features came, and what keeps averaged maps whole."""
        if not self.config.intermediate:
            return client.task.loss(client["model"](batch.x), batch.y, batch.weight)
        model = client["model"]
        own = self.features(client, batch.x, self.config.noise * (self.config.noise_when == "training"))
        terms = {"local": client.task.loss(model.head(own["s_out"]), batch.y, batch.weight)}
        if self.exchange.averages_maps:
            terms["maps"] = self.exchange.space.loss(own, client["maps"].tensors())
        if received is not None:
            foreign = self.exchange.seen(client, received, own)
            with still_statistics(model.content):
                terms["features"] = F.mse_loss(model.body(foreign["s_in"]).float(), foreign["s_out"])
        return terms

    def features(self, client: Client, x: Tensor, noise: float) -> dict[str, Tensor]:
        """s_in and s_out of a batch; with noise the body sees the noisy s_in."""
        s_in = blurred(client["model"].stem(x), noise, self.config.noise_per)
        return {"s_in": s_in, "s_out": blurred(client["model"].body(s_in), noise, self.config.noise_per)}


def alleviate(local: Gradients, features: Gradients, config: FedIN.Config) -> Gradients:
    """The body's step, for the parameters that L_IN reaches."""
    if config.alleviate != "exact":
        share = config.strength / 2 if config.alleviate == "simplified" else 1.0
        return plus(features, {name: local[name] for name in features}, share)
    a = {name: local[name].square().sum() for name in features}
    b = {name: (local[name] * value).sum() for name, value in features.items()}
    if config.scope == "whole":
        a, b = (dict.fromkeys(sums, torch.stack([*sums.values()]).sum()) for sums in (a, b))
    kept = 1.0 if config.combine == "add" else 0.0
    factors = {name: kept - b[name].clamp_max(0) / a[name].clamp_min(1e-30) for name in features}
    return {name: value + factors[name] * local[name] for name, value in features.items()}
