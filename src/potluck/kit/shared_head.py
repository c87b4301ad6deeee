"""The base of FedRE, FedGH and FedAllRep: one classifier for all, trained on the server on what clients send."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, state_of
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, MethodConfig, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.streams import Source, Stream, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.kit.requirements import require_one_form
from potluck.training.collect import collect
from potluck.training.fit import fit


class SharedHead(Method):
    """The head ω comes down, clients train and upload, and the server trains ω with SGD on the uploads.

    A method says what goes up (`up`, `upload`) and how the server reads it (`examples`). The server's first ω is
    a fresh head like that of the first model of the pool; it overwrites every client's own.
    """

    models = "any, with heads of one form (models.rep_dim and models.adapter give one width)"
    server_needs = "head"
    card_fields = ("width",)
    down = {"head": state_of("model/head", "the classifier the server trained")}
    up: ClassVar[Contract] = {}
    remedy = "lower training.optimizer.lr or method.server_lr, or set training.clip"

    class Config(MethodConfig):
        """How the server trains the head; the defaults are those of FedRE's released code, except the mean."""

        server_epochs: int = option(
            default=1,
            ge=1,
            description="the server's passes over a round's uploads",
            source="FedRE's released code",
        )
        server_batch: int = option(
            default=32, ge=1, description="uploads in one step of the server", source="FedRE's released code"
        )
        server_lr: float = option(
            default=0.01,
            gt=0,
            description="the server's learning rate, plain SGD",
            source="FedRE's released code",
        )
        server_loss: Literal["sum", "mean"] = option(
            default="mean",
            description="the loss over a batch of uploads; with sum the step grows with the batch",
            source="ours for mean; sum: FedRE's paper and code",
        )
        unheld: Literal["refuse", "accept"] = option(
            default="refuse",
            description="whether to run where some class is held by no client",
            source="ours",
        )

    def check(self, population: Population) -> None:
        """All heads have one form, every client has a sample, and every class is held by somebody."""
        require_one_head(population)
        for client in population.trainers:
            if not population.samples(client)["train"]:
                raise ConfigError(
                    f"{self.name}: client {client} has no training sample and so no representation to send; give "
                    "every client some (partition.min_size, where the split is drawn)"
                )
        if self.config.unheld == "refuse":
            self._every_class_is_held(population)

    def _every_class_is_held(self, population: Population) -> None:
        held = {label for client in population.trainers for label in population.classes_held(client)}
        missing = [label for label in range(population.task.classes) if label not in held]
        if missing:
            name = population.class_names(population.ids[0])[missing[0]]
            raise ConfigError(
                f"{self.name}: no client holds class {missing[0]} ({name}), so the server's head would only learn "
                f"to avoid it ({len(missing)} of {population.task.classes} classes); change the partition, or set "
                "method.unheld to accept"
            )

    def server_state(self, task: Task) -> dict[str, Any]:
        """The head ω."""
        return {"head": fresh_head(self, task)}

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The newest ω."""
        return {"head": server["head"].state()}

    def receive(self, client: Client, down: Message) -> None:
        """Install the newest ω."""
        client["model/head"].load(down.group("head"))

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, then train ω on what came up."""
        replies = clients.ask(self.train)
        self.train_head(server, *self.examples(replies))

    @client_step(up=lambda method: method.up)
    def train(self, client: Client) -> Content:
        """Local epochs on the whole model, then the upload."""
        fit(client, self.loss)
        return self.upload(client)

    def upload(self, client: Client) -> Content:
        """What a trained client sends."""
        raise NotImplementedError(f"{type(self).__name__} defines no upload")

    def examples(self, replies: Replies) -> tuple[Tensor, Tensor]:
        """What the server trains on: representations, and classes or weights over the classes."""
        raise NotImplementedError(f"{type(self).__name__} defines no examples")

    def train_head(self, server: Server, x: Tensor, y: Tensor) -> None:
        """A few epochs of SGD on ω; the uploads are constants, shuffled anew each epoch."""
        config = self.config
        order = shuffled_batches(
            np.arange(len(x)), config.server_batch, config.server_epochs, "keep", server.rng.child("uploads")
        )
        fit(
            server,
            self.head_loss,
            train=["head"],
            streams={"uploads": Stream(Source(x, y), order)},
            optimizer=OptimizerSettings(lr=config.server_lr),
        )

    def head_loss(self, server: Server, batch: Batch) -> Tensor:
        """Cross-entropy of ω(r) with a class, or −Σ_c y_c·log softmax_c(ω(r)) with weights y over the classes."""
        return F.cross_entropy(server["head"](batch.x), batch.y, reduction=self.config.server_loss)


def fresh_head(method: Method, task: Task) -> nn.Module:
    """A head like that of the first model of the pool, for the server."""
    if method.pool is None:
        raise ConfigError(
            f"{method.name}: the server needs to know the form of the clients' heads; name their models"
        )
    return method.pool.build(method.pool.keys[0], task, who="the server's head").head


def require_one_head(population: Population, otherwise: str = "") -> None:
    """All heads must have one form, with parameters; `otherwise` ends the advice."""
    name, first = population.method_name, population.ids[0]
    if not population.head(first):
        raise ConfigError(
            f"{name}: the head of client {first} has no parameters for the server to train; choose models whose "
            "last layer is trained"
        )
    require_one_form(population, "head", population.head, otherwise)


def representations(client: Client) -> tuple[Tensor, Tensor]:
    """The representation and the class of every training sample, in evaluation mode and without gradients."""
    parts = collect(client, lambda batch: (client["model"].features(batch.x).float(), batch.y))
    return torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])


def joined(replies: Replies, name: str) -> Tensor:
    """One tensor of every reply, row below row."""
    return torch.cat([message[name] for message in replies.values()])
