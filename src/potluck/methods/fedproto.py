"""FedProto (Tan et al., AAAI 2022): clients agree on where each class lies in representation space."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import counts, numbers, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, Method, PrivateModelConfig, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.task import Batch, Task
from potluck.kit.class_means import ClassStats, merge_classes
from potluck.kit.requirements import require_one_width
from potluck.training.collect import collect
from potluck.training.fit import fit


class FedProto(Method):
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
    models = "any, with the same representation width"
    card_fields = ("width", "classes_held")
    stays = ("data", "model")
    modes = ("prototype", "head")
    down = {
        "prototypes": tensor("known<=C, d", "averaged prototypes of the classes anyone holds", optional=True),
        "classes": numbers("known<=C", "which classes these are", below="C", optional=True),
    }

    class Config(PrivateModelConfig):
        """Options of FedProto."""

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

    def check(self, population: Population) -> None:
        """All representations must have one width."""
        require_one_width(population, "a prototype")

    def server_state(self, task: Task) -> dict[str, Any]:
        """The averaged prototypes; empty until the first round is over."""
        return {"prototypes": {}}

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, the prototypes as received, which classes have one, and sums for the client's own."""
        classes, width = task.classes, model.rep_dim
        return {
            "model": model,
            "prototypes": torch.zeros(classes, width),
            "known": torch.zeros(classes),
            "sums": torch.zeros(classes, width),
            "counts": torch.zeros(classes),
        }

    def downlink(self, server: Server, client: ClientId) -> Content:
        """The prototypes known so far."""
        return dict(server["prototypes"].tensors())

    def receive(self, client: Client, down: Message) -> None:
        """Install the prototypes by class."""
        if "classes" not in down:
            return
        client["known"].value.zero_().index_fill_(0, down["classes"], 1.0)
        client["prototypes"].value.index_copy_(0, down["classes"], down["prototypes"])

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, merge the prototypes."""
        replies = clients.ask(self.train)
        means, held = merge_classes(replies, "prototypes", server.task.classes, self.config.weights)
        self.remember(server, means, held)

    def remember(self, server: Server, means: Tensor, held: Tensor) -> None:
        """Replace the prototypes of the classes that were sent; the others keep theirs."""
        content: dict[str, Tensor] = server["prototypes"].content
        if content:
            old = torch.zeros_like(means).index_copy_(0, content["classes"], content["prototypes"])
            known = torch.zeros_like(held).index_fill_(0, content["classes"], True)
            means, held = torch.where(held.unsqueeze(1), means, old), held | known
        classes = held.nonzero().squeeze(1)
        content.update({"prototypes": means[classes], "classes": classes})

    @client_step(
        up=lambda method: {
            "prototypes": tensor("C_k<=C, d", "mean representation of each class held"),
            "classes": numbers("C_k", "which classes these are", below="C", distinct=True),
            # gathered while training, a sample counts once per epoch
            "counts": counts(
                "C_k", "how many samples each mean is over", "" if method.config.online else "n"
            ),
        }
    )
    def train(self, client: Client) -> Content:
        """Local epochs, then the class means."""
        stats = ClassStats.into(client["sums"].value, client["counts"].value)
        if self.config.online:
            fit(client, lambda client, batch: self.loss(client, batch, stats))
        else:
            fit(client, self.loss)
            collect(client, lambda batch: stats.add(client["model"].features(batch.x), batch.y))
        return {
            "prototypes": stats.means(client.classes_held),
            "classes": client.numbers(client.classes_held),
            "counts": stats.counts_of(client.classes_held),
        }

    def loss(self, client: Client, batch: Batch, stats: ClassStats | None = None) -> dict[str, Tensor]:
        """Cross-entropy, and the distance to the prototype of the sample's class where there is one."""
        z = client["model"].features(batch.x)
        if stats is not None:
            stats.add(z, batch.y)
        known = client["known"].value[batch.y]
        if batch.weight is not None:
            known = known * batch.weight
        gap = (z - client["prototypes"].value[batch.y]).square()
        distance = gap.mean(1) if self.config.distance == "mse" else gap.sum(1)
        return {
            "ce": client.task.loss(client["model"].head(z), batch.y, batch.weight),
            "prototype": self.config.weight * (distance * known).sum() / known.sum().clamp_min(1e-12),
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
