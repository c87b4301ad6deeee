"""FedIN (Chan et al., arXiv 2304.00759): clients learn from what enters and leaves the body of other models.

`fedin_variants.py` adds the ablations, other readings of the paper and projections; `method: fedin` runs the class
there, which is this one unless an option says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Tasks, client_step
from potluck.core.server import Server
from potluck.core.state import BufferPolicy
from potluck.core.streams import Stream
from potluck.core.task import Batch
from potluck.kit.feature_exchange import ExchangesFeatures, FeatureExchange, blurred
from potluck.methods.fedavg import WEIGHTS_UP, FedAvg
from potluck.training.fit import Gradients, fit, plus
from potluck.training.modes import still_statistics

NOTHING = Message()


class FedIN(ExchangesFeatures, FedAvg):
    """FedProx whose body also learns to turn other clients' s_in into their s_out.

    A model is stem, body and head: s_in = stem(x), s_out = body(s_in), scores = head(s_out).
    Up: the weights and one batch of (s_in, s_out), with noise, as features can be turned back into images.
    Down: the averaged weights of the client's layers, and another client's batch of the last round.

        L_local = CE + (μ/2)·‖w − w⁰‖²,  L_IN = MSE(body(s_in), s_out) on received features

    Stem and head step along G_local = ∇L_local, the body along G_IN + (λ/2)·G_local with G_IN = ∇L_IN (Eq. 13).
    Server: every tensor is averaged over the clients that have one of its name and shape (Eq. 19).

    No code was released. Inferred, not published: w⁰ are the weights received; the first round, without features,
    follows G_local; noise is measured in deviations of the whole batch; batch norm uses but does not remember the
    statistics of foreign features; the batch sent is a random one, in evaluation mode, with the noise of a noisy
    pass (s_out of the noisy s_in), repeated, noise and all, where samples are fewer; the server draws whose batch a
    client gets, never its own; in tasks other than one class per sample CE is the task's own loss.
    """

    name = "fedin"
    citation = "Chan et al., arXiv 2304.00759"
    tasks: ClassVar[Tasks] = "features"
    models = "with stem, body and head; features of one shape, or of any with project"
    card_fields = ("names", "width", "stem")
    noise_per: Literal["batch", "channel"] = "batch"  # what has one standard deviation

    class Config(FedAvg.Config):
        """Options of FedIN. The paper trains with Adam, learning rate 0.001, batches of 16, 5 local epochs."""

        share: Literal["all", "groups", "layers"] = Field(
            default="layers", description="what is averaged with what; layers: Eq. 19, groups: Eqs. 20 and 21"
        )
        weights: Literal["samples", "uniform"] = Field(
            default="uniform", description="weights of the average; uniform: Eqs. 19 and 20, samples: Eq. 21"
        )
        buffers: BufferPolicy = Field(
            default="local",
            description="batch-norm statistics: kept at home (§4.3), or averaged, as the code of its sister InCo "
            "Aggregation does",
        )
        mu: float = Field(default=0.1, ge=0, description="μ of the proximal term; the paper gives μ/2 = 0.05")
        strength: float = Field(default=1.0, ge=0, description="λ of Eq. 13; 1 in the paper")
        noise: float = Field(
            default=0.8,
            ge=0,
            allow_inf_nan=False,
            description="noise on features, in their standard deviations; 0.8 in the paper",
        )
        batch: int = Field(
            default=16, ge=2, description="samples in a batch of features; the paper's batch size"
        )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exchange, self.training_noise = self.build_exchange(), float(self.config.noise)

    def build_exchange(self) -> FeatureExchange:
        """One batch from each client, and one to it."""
        return FeatureExchange(self.config.batch)

    def round(self, server: Server, clients: Clients) -> None:
        """Train, also on the features of others; average the weights; keep the features that came."""
        self.introduce(server, clients)
        replies = clients.ask(self.train, functools.partial(self.training_downlink, server))
        server["weights"].load(self.mean(replies, "model", self.config.weights))
        self.exchange.keep(server, replies, self.config.weights)

    def training_downlink(self, server: Server, client: ClientId) -> Content:
        """The weights, and features of others: only a client that trains needs those."""
        return {**self.downlink(server, client), **self.exchange.lend(server, client)}

    @client_step(
        up=lambda method: {**WEIGHTS_UP, **method.exchange.sent()},
        down=lambda method: {**FedAvg.down, **method.exchange.received()},
    )
    def train(self, client: Client, down: Message = NOTHING) -> Content:
        """Local epochs, with what others sent; then the weights and a batch of features."""
        self.receive(client, down)
        with self.exchange.private_noise(client):
            self.learn(client, self.exchange.take(client, down))
            features = self.exchange.give(client, lambda x: self.features(client, x, self.config.noise))
        return {"model": client["model"].state(), **features}

    def learn(self, client: Client, received: Stream | None) -> None:
        """Local training and, in the same steps, training on the features of others where some came."""
        prox = {"model": self.config.mu} if self.config.mu else None
        if received is None:
            fit(client, self.loss, prox=prox)
        else:  # other streams make another captured step than that of the first round
            streams = {"private": client.batches(), "received": received}
            fit(client, self.loss, streams=streams, prox=prox, combine=self.steer)

    def loss(
        self, client: Client, batch: Batch, received: Batch | None = None
    ) -> Tensor | Mapping[str, Tensor]:
        """L_local without its proximal term, and L_IN where features came."""
        own = self.features(client, batch.x, self.training_noise)
        terms = self.local_terms(client, batch, own)
        if received is not None:
            foreign = self.exchange.seen(client, received, own)
            terms["features"] = self.feature_loss(client, foreign["s_in"], foreign["s_out"])
        return terms

    def features(self, client: Client, x: Tensor, noise: float) -> dict[str, Tensor]:
        """s_in and s_out of a batch; with noise the body sees the noisy s_in."""
        s_in = blurred(client["model"].stem(x), noise, self.noise_per)
        return {"s_in": s_in, "s_out": blurred(client["model"].body(s_in), noise, self.noise_per)}

    def local_terms(self, client: Client, batch: Batch, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """CE(head(s_out), y)."""
        return {"local": client.task.loss(client["model"].head(own["s_out"]), batch.y, batch.weight)}

    def feature_loss(self, client: Client, s_in: Tensor, s_out: Tensor) -> Tensor:
        """L_IN = MSE(body(s_in), s_out)."""
        model = client["model"]
        with still_statistics(model.content):
            return F.mse_loss(model.body(s_in).float(), s_out)

    def steer(self, terms: Mapping[str, Gradients]) -> Gradients:
        """Stem and head follow G_local, the body both losses."""
        local = local_gradients(terms)
        return {**local, **self.alleviate(local, terms["features"])}

    def alleviate(self, local: Gradients, features: Gradients) -> Gradients:
        """G_IN + (λ/2)·G_local, for the parameters that L_IN reaches (Eq. 13)."""
        return plus(features, {name: local[name] for name in features}, self.config.strength / 2)


def local_gradients(terms: Mapping[str, Gradients]) -> Gradients:
    """G_local: the sum of all terms but L_IN, the proximal one included."""
    return functools.reduce(plus, (value for term, value in terms.items() if term != "features"))
