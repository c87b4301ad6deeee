"""The clients of FedProto and FedTGP: class means of representations, and the pull towards the server's."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from potluck.core.client import Client
from potluck.core.method import PrivateModelConfig
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Batch
from potluck.kit.class_means import ClassStats
from potluck.kit.class_vectors import ClassVectors
from potluck.kit.requirements import require_one_width
from potluck.training.collect import collect
from potluck.training.fit import fit


class Prototypes(ClassVectors):
    """Loss: CE(h(z), y) + λ·dist(z, P_y), the second term only over samples whose class has a prototype."""

    models = "any, with the same representation width"
    card_fields: ClassVar[tuple[str, ...]] = ("width", "classes_held")
    modes = ("prototype", "head")
    vectors, width, meaning = "prototypes", "d", "mean representation of each class held"

    class Config(PrivateModelConfig):
        """How representations are pulled."""

        weight: float = option(
            default=1.0,
            ge=0,
            description="λ; 1 in the paper's code, 10 in HtFLlib",
            source="paper's code; 10: HtFLlib",
        )
        distance: Literal["mse", "l2"] = option(
            default="mse",
            description="mean over the width d, as in the official code, or the squared norm",
            source="official code for mse, paper for l2",
        )

    def check(self, population: Population) -> None:
        """All representations must have one width."""
        require_one_width(population, "a prototype", ", or use fd, which takes any models")

    def gather(self, client: Client, stats: ClassStats) -> None:
        """Local epochs, then one pass in evaluation mode."""
        fit(client, self.loss)
        collect(client, lambda batch: stats.add(client["model"].features(batch.x), batch.y))

    def loss(self, client: Client, batch: Batch, stats: ClassStats | None = None) -> dict[str, Tensor]:
        """Cross-entropy, and the distance to the prototype of the sample's class where there is one."""
        z = client["model"].features(batch.x)
        if stats is not None:
            stats.add(z, batch.y)
        gap = (z - client["prototypes"].value[batch.y]).square()
        distance = gap.mean(1) if self.config.distance == "mse" else gap.sum(1)
        return {
            "ce": client.task.loss(client["model"].head(z), batch.y, batch.weight),
            "prototype": self.config.weight * self.over_known(client, batch, distance),
        }

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """`prototype`: minus the distance to each known prototype; `head`: the client's own classifier.

        A class without a prototype counts as 10 further away than the furthest known one, so that it is never
        chosen and the loss is finite. Before the first round there is none, and the head answers in both modes.
        """
        z = client["model"].features(batch.x)
        scores: Tensor = client["model"].head(z)
        if mode == "head":
            return scores
        known = client["known"].value > 0
        distances = torch.cdist(z.float(), client["prototypes"].value)
        furthest = distances.where(known, 0).amax(1, keepdim=True)
        return torch.where(known.any(), -distances.where(known, furthest + 10), scores.float())
