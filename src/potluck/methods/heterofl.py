"""HeteroFL (Diao, Ding, Tarokh, ICLR 2021): clients train slices of one network, as wide as they can hold.

    Up:     the client's slice θ_k = θ[:⌈r_k·W⌉, …] after training; with `label_split` the classes it has samples
            of; with `sbn` then the mean and variance of what comes to each batch norm.
    Down:   the slice of the newest θ; with `sbn` twice a round, the second time to measure on.
    Client: CE(o ⊙ 1[class held], y): logits of classes that it does not hold are 0, not −∞ (`mask`). Outputs of
            every cut convolution and linear layer are divided by r_k in training, not in evaluation (`scaler`).
    Server: every entry of θ becomes the mean over the clients whose slice holds it; one that nobody held stays. A
            row of the classifier is averaged over the clients that have its class (`label_split`).

A slice has the first channels of every hidden layer; inputs follow the layer before, norms their channels,
shortcuts the input of their block. The first layer's inputs and the classifier's outputs are whole, attention is
cut inside each head. r_k is not an option: it follows from the model of a client, `models: [{name: resnet18,
width: 64}, {name: resnet18, width: 32}]`, and is that of each layer's outputs.

Static batch norm (`sbn`): batches normalise themselves in training and no running statistics are kept. At the end
of a round the clients measure the newest slice on their training samples; those of one width are merged exactly,
and every client is evaluated with the statistics of its width. The released code makes one pass of the whole
network over everybody's samples instead, and averages the variances of its batches.

A client is evaluated with its own slice: in the mode `masked` with the mask, as the released code takes local
accuracy, in `model` as it is. With `sbn` a round ends with the newest slice at the clients that took part, so it
is what both moments of a round measure. Of the released settings clip 1 is an option here; SGD at 0.1, momentum
0.9, weight decay 5e-4, batches of 10 and five epochs are for `training`. Left out: rates drawn anew each round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, numbers, state_of
from potluck.core.message import Content, Message
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.kit.averaging import Index
from potluck.kit.requirements import named, one_per_architecture
from potluck.kit.static_norm import StaticNorm, norms_in
from potluck.kit.subnetworks import mean_of_slices, without
from potluck.kit.width_slices import scale_outputs
from potluck.training.fit import fit


def _sent(method: HeteroFL) -> Contract:
    """What a client sends, as the options say."""
    slice_ = {"model": state_of("model", "the client's slice after local training", partial=True)}
    held = numbers("C_k<=C", "the classes it has samples of", below="C", distinct=True)
    return {**slice_, "classes": held} if method.config.label_split else slice_


class HeteroFL(StaticNorm):
    """Slices of one network by width: the first channels of every hidden layer."""

    name = "heterofl"
    citation = "Diao, Ding, Tarokh, ICLR 2021"

    class Config(StaticNorm.Config):
        """Options of HeteroFL."""

        scaler: bool = option(
            default=True,
            description="divide outputs of cut layers by the share of channels held, in training",
            source="paper; released code",
        )
        mask: bool = option(
            default=True,
            description="set logits of classes that a client does not hold to 0 in its loss",
            source="paper; released code",
        )
        label_split: bool = option(
            default=True,
            description="average a row of the classifier over the clients that have its class; tells the server "
            "which classes a client has",
            source="released code",
        )
        clip: float | None = option(
            default=1.0,
            gt=0,
            description="largest norm of a gradient; null: training.clip",
            source="released code",
        )

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.config.label_split:
            self.stays = ("data",)
        if self.config.mask:
            self.modes = ("masked", "model")

    def check(self, population: Population) -> None:
        """Running statistics of scaled outputs would not fit evaluation, where nothing is scaled."""
        super().check(population)
        for client in one_per_architecture(population) if self.config.scaler and not self.config.sbn else ():
            model = population.build_model(client)
            if self.shapes_in(model) != self.slices.shapes and norms_in(model):
                raise ConfigError(
                    f"{self.name}: {named(population, client)} has batch norm, whose running statistics would be "
                    "those of scaled outputs, and evaluation scales nothing; set method.scaler to false or "
                    "method.sbn to true"
                )

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The slice, and with a mask the classes held."""
        if self.config.scaler:
            scale_outputs(model, self.slices.rate)
        held = {"held": torch.ones(task.classes)} if self.config.mask else {}
        return super().client_state(task, model) | held

    def receive(self, client: Client, down: Message) -> None:
        """Install the slice, and note the classes held."""
        super().receive(client, down)
        if self.config.mask:
            held = torch.zeros_like(client["held"].value)
            client["held"].load(held.index_fill(0, client.numbers(client.classes_held), 1.0))

    @client_step(up=_sent)
    def train(self, client: Client) -> Content:
        """Local epochs, then the slice."""
        fit(client, self.loss, clip=self.config.clip)
        slice_ = {"model": without(client["model"].state(), self.statistics)}
        held = {"classes": client.numbers(client.classes_held)}
        return {**slice_, **held} if self.config.label_split else slice_

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """CE, the logits of other classes at 0."""
        scores = self.predict(client, batch, "masked" if self.config.mask else "model")
        return client.task.loss(scores, batch.y, batch.weight)

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """The slice's scores; in the mode `masked` 0 for classes that the client does not hold."""
        scores: Tensor = client["model"](batch.x)
        return scores if mode == "model" else scores.masked_fill(client["held"].value == 0, 0.0)

    def mean(self, server: Server, replies: Replies) -> dict[str, Tensor]:
        """The mean of each entry over its holders; rows of the classifier over those that have the class."""
        if not self.config.label_split:
            return super().mean(server, replies)
        rows, index = self.classifier(server.task), dict[ClientId, dict[str, Index]]()
        for client, reply in replies.items():
            own = self.index(server, client)
            index[client] = {name: (reply["classes"], *own[name][1:]) for name in rows}
        hidden = replies.map(lambda _, reply: {"model": without(reply.group("model"), rows)})
        held = replies.map(lambda _, reply: {"model": _rows_held(reply, rows)})
        base = server["parent"].wire()
        return super().mean(server, hidden) | mean_of_slices(held, "model", self.config.weights, base, index)

    def classifier(self, task: Task) -> list[str]:
        """The tensors of the head that have a row per class."""
        shapes = self.slices.shapes.items()
        return [name for name, shape in shapes if name.startswith("head.") and shape[0] == task.classes]


def _rows_held(reply: Message, rows: list[str]) -> dict[str, Tensor]:
    """Of the classifier the rows of a client's classes."""
    found = reply.group("model")
    return {name: found[name][reply["classes"]] for name in rows if name in found}
