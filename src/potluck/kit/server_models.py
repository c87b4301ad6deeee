"""The server has a model of every client architecture, and reads public data with the clients' weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import Card
from potluck.core.method import Clients, Needs, Tasks
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.state import Part
from potluck.core.streams import Stream, several_each, shuffled_batches
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.built_names import require_built_names
from potluck.kit.public_knowledge import public_samples, require_public_samples, scores
from potluck.kit.shared_weights import SharedWeights

BY_ARCHITECTURE: Any = option(
    default="groups",
    description="which tensors are averaged: those of one architecture",
    source="paper",
)
STATISTICS_TRAVEL: Any = option(
    default="average",
    description="batch-norm statistics are averaged with the weights; inferred",
    source="inferred",
)


class ClientModelsOnServer(SharedWeights):
    """Averages weights within architectures; all clients' models teach on public data, on the server alone.

    Options of a subclass: `batch`, the public samples in a step, `share` and `buffers` as above.
    """

    tasks: ClassVar[Tasks] = "classes"
    models = "any; those of one architecture are averaged"
    needs_public_data = True
    server_needs: ClassVar[Needs] = "architecture"
    usual_batch: ClassVar[int]

    def setup(self, population: Population) -> None:
        """The size of a batch, and who has which architecture."""
        super().setup(population)
        self.batch = public_samples(population, self.config.batch, self.usual_batch)
        self.architectures = {client: population.architecture(client) for client in population.ids}

    def check(self, population: Population) -> None:
        """A batch must fit into the public data, and a card to the model that the server builds."""
        super().check(population)
        require_public_samples(population, "batch", self.config.batch)
        if self.pool is not None:
            require_built_names(population, self.pool, self.config.buffers)

    def server_state(self, task: Task) -> dict[str, Any]:
        """The weights by architecture, and a model of each architecture to load them into."""
        if self.pool is None:
            raise ConfigError(f"{self.name}: the server needs to know the clients' architectures; name them")
        models = {
            self.model(key): self.pool.build(key, task, who="the server's model") for key in self.pool.keys
        }
        return {**super().server_state(task), **models}

    def model(self, architecture: str) -> str:
        """The name of the server's model for an architecture."""
        assert self.pool is not None
        return f"model{self.pool.keys.index(architecture)}"

    def keys(self, card: Card) -> dict[str, str]:
        """Tensors are averaged within an architecture."""
        return {name: f"{self.architectures[card.client]}:{name}" for name in card.names}

    def represented(self, replies: Replies) -> list[str]:
        """The architectures of the round's clients."""
        return list(dict.fromkeys(self.architectures[client] for client in replies))

    def weights_of(self, means: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
        """The averages of one architecture, under the names of its model."""
        prefix = f"{architecture}:"
        return {key.removeprefix(prefix): value for key, value in means.items() if key.startswith(prefix)}

    def keep(self, server: Server, architecture: str, weights: Mapping[str, Tensor]) -> None:
        """Make weights those that clients of an architecture get."""
        server["weights"].load({f"{architecture}:{name}": value for name, value in weights.items()})

    def opinions(self, server: Server, clients: Clients, replies: Replies) -> Iterator[Tensor]:
        """The logits of all public samples, client by client, in evaluation mode.

        A client whose logits are not finite, or too large to be added up, is left out of the round: weights can be
        finite and small, and still make a model overflow, such as one with variances of 0 in its batch norms.
        """
        largest = torch.finfo(torch.float32).max / len(replies)
        for client, message in replies.items():
            name = self.model(self.architectures[client])
            server[name].load(message.group("model"))
            logits = scores(server, part=name)
            if bool((logits.abs() <= largest).all()):
                yield logits
            else:
                clients.leave_out(
                    client,
                    f"what its model says of public data is not finite, or too large to be averaged; {self.remedy}",
                )


def steps_on_public_data(server: Server, rows: np.ndarray, batch: int, steps: int, *purpose: str) -> Stream:
    """So many batches of public rows, shuffled anew in each pass."""
    epochs = -(-steps // max(1, len(rows) // batch))
    order = several_each(shuffled_batches(rows, batch, epochs, "keep", server.rng.child(*purpose)))
    return Stream(server.public.source, order[:steps])


def head_names(part: Part) -> dict[str, str]:
    """The tensors of a model's head: their names in the head → their names in the model."""
    assert isinstance(part.content, Model)
    whole = {id(value): name for name, value in part.wire().items()}
    return {name: whole[id(value)] for name, value in Part(part.content.head).wire().items()}
