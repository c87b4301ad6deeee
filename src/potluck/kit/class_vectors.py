"""The base of FD, FedHe, FedProto and FedTGP: a mean vector per class goes up, one vector per class comes down."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import Contract, counts, numbers, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Method, client_step
from potluck.core.model import Model
from potluck.core.server import Server
from potluck.core.task import Batch, Task
from potluck.kit.class_means import ClassStats
from potluck.kit.masks import mean_where


def class_vectors(name: str, width: str, meaning: str) -> Contract:
    """What comes down: the vectors known so far, nothing before the first round."""
    return {
        name: tensor(f"known<=C, {width}", meaning, optional=True),
        "classes": numbers("known<=C", "which classes these are", below="C", optional=True),
    }


class ClassVectors(Method):
    """Clients send the mean of a vector of theirs for each class held, and learn towards the server's vectors.

    `vectors` names them in messages and states. A client's part of that name holds them as received, its part
    `known` has 1 for each class that has one. A method says how a client gathers its means (`gather`) and what the
    server makes of them (`round`).
    """

    vectors: ClassVar[str]
    width: ClassVar[str]  # of a vector, as a symbol of shape formulas
    meaning: ClassVar[str]  # of what goes up
    card_fields: ClassVar[tuple[str, ...]] = ("classes_held",)
    stays = ("data", "model")

    def server_state(self, task: Task) -> dict[str, Any]:
        """The vectors that are sent; empty until the first round is over."""
        return {self.vectors: {}}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, the vectors as received, which classes have one, and sums for the client's own."""
        classes, width = task.classes, self.vector_width(task, model)
        return {
            "model": model,
            self.vectors: torch.zeros(classes, width),
            "known": torch.zeros(classes),
            "sums": torch.zeros(classes, width),
            "counts": torch.zeros(classes),
        }

    def vector_width(self, task: Task, model: Model) -> int:
        """How many numbers a vector has."""
        return model.rep_dim

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The vectors known so far."""
        return dict(server[self.vectors].tensors())

    def receive(self, client: Client, down: Message) -> None:
        """Install the vectors by class."""
        if "classes" not in down:
            return
        client["known"].value.zero_().index_fill_(0, down["classes"], 1.0)
        client[self.vectors].value.index_copy_(0, down["classes"], down[self.vectors])

    def remember(self, server: Server, means: Tensor, held: Tensor) -> None:
        """Replace the vectors of the classes that were sent; the others keep theirs."""
        content: dict[str, Tensor] = server[self.vectors].content
        if content:
            old = torch.zeros_like(means).index_copy_(0, content["classes"], content[self.vectors])
            known = torch.zeros_like(held).index_fill_(0, content["classes"], True)
            means, held = torch.where(held.unsqueeze(1), means, old), held | known
        classes = held.nonzero().squeeze(1)
        content.update({self.vectors: means[classes], "classes": classes})

    def most(self) -> str:
        """The most samples a mean can be over, a formula."""
        return "n"

    @client_step(
        up=lambda method: {
            method.vectors: tensor(f"C_k<=C, {method.width}", method.meaning),
            "classes": numbers("C_k", "which classes these are", below="C", distinct=True),
            "counts": counts("C_k", "how many samples each mean is over", method.most()),
        }
    )
    def train(self, client: Client) -> Content:
        """Local epochs and the class means."""
        stats = ClassStats.into(client["sums"].value, client["counts"].value)
        self.gather(client, stats)
        classes = client.numbers(client.classes_held)
        return {
            self.vectors: stats.means(client.classes_held),
            "classes": classes,
            "counts": self.counted(client, stats)[classes],
        }

    def counted(self, client: Client, stats: ClassStats) -> Tensor:
        """How many samples the mean of each class is over."""
        return stats.counts

    def gather(self, client: Client, stats: ClassStats) -> None:
        """Train, and add up what is sent by class."""
        raise NotImplementedError(f"{type(self).__name__} defines no gather")

    def over_known(self, client: Client, batch: Batch, distances: Tensor) -> Tensor:
        """The mean of one number per sample over the samples whose class has a vector; 0 where none has."""
        known = client["known"].value[batch.y]
        if batch.weight is not None:
            known = known * batch.weight
        return mean_where(distances, known)
