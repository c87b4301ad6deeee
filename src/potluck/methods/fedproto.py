"""FedProto (Tan et al., AAAI 2022): clients agree on where each class lies in representation space."""

from __future__ import annotations

import math
from typing import Literal

from potluck.core.card import Card
from potluck.core.client import Client
from potluck.core.method import Clients
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.kit.class_means import ClassStats, merge_classes
from potluck.kit.class_vectors import class_vectors
from potluck.kit.prototypes import Prototypes
from potluck.training.fit import fit


class FedProto(Prototypes):
    """Class means ("prototypes") are averaged over their holders and pull representations towards them.

    Up: the mean representation of each class held, the classes, their counts. Down: the averaged prototypes.
    Loss: CE(h(z), y) + λ·dist(z, P_y), the second term only over samples whose class has a prototype.

    Deviations: the official code gathers prototypes from features seen while training in the last epoch; here
    one pass in evaluation mode after training does (`online: true` gathers while training, all epochs). The
    paper weighs holders by class counts, the official code counts each holder once: `weights`.
    `MSELoss` divides by the width d as well, so λ is d times weaker under `distance: mse` than under `l2`.

    The mean of a class with one sample is that sample's representation.
    """

    name = "fedproto"
    citation = "Tan et al., AAAI 2022"
    down = class_vectors("prototypes", "d", "averaged prototypes of the classes anyone holds")

    class Config(Prototypes.Config):
        """Options of FedProto."""

        weights: Literal["uniform", "count"] = option(
            default="uniform",
            description="one vote per holder of a class (the official code) or per sample of it (the paper)",
            source="official code for uniform, paper for count",
        )
        online: bool = option(
            default=False,
            description="gather prototypes while training instead of in a pass afterwards",
            source="official code gathers while training; a pass afterwards is ours",
        )

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, merge the prototypes."""
        replies = clients.ask(self.train)
        self.remember(server, *merge_classes(replies, "prototypes", server.task.classes, self.config.weights))

    def setup(self, population: Population) -> None:
        """How clients train, which bounds what they can count while they do."""
        super().setup(population)
        self.training = population.training

    def most(self) -> str:
        """Gathered while training, a sample counts each time that it is seen."""
        return "S" if self.config.online else super().most()

    def symbols(self, card: Card) -> dict[str, int]:
        """S, the most samples that a client can see in a round; a last batch may be filled up."""
        training = self.training(card.client)
        batch = max(1, min(training.batch_size, card.samples))
        seen = training.epochs * batch * math.ceil(card.samples / batch)
        return super().symbols(card) | {"S": seen}

    def gather(self, client: Client, stats: ClassStats) -> None:
        """Local epochs, then the class means, or both at once."""
        if self.config.online:
            fit(client, lambda client, batch: self.loss(client, batch, stats))
        else:
            super().gather(client, stats)
