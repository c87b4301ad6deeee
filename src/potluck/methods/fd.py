"""FD, federated distillation (Jeong et al., 2018): clients agree on the logits of each class."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.message import Content
from potluck.core.method import Clients, PrivateModelConfig
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.kit.class_logits import ClassLogits
from potluck.kit.class_means import class_sums, means_of, merge_classes
from potluck.kit.distillation import divergence_of_each


class FD(ClassLogits):
    """The mean logits of each class are averaged over their holders and teach every client that class.

    Up: F_k[c], the mean logits of each class held over the batches trained on, the classes, their counts:
    C_k·(C + 2) scalars. Down: G[c], the mean over the holders of c, for the classes anyone holds.
    Loss: CE(o, y) + λ·KL(σ(G[y]) ‖ σ(o)), the second term a mean over the samples whose class has a target. In
    the first round no class has one.

    Deviations: HtFLlib passes G[y] as if it were probabilities; here the softmax is taken. The paper's target
    leaves out the client's own logits, (Σ_j F_j[c] − F_k[c]) / (M − 1) over the M holders of c (UNVERIFIED):
    `exclude_self`. A class only that client holds then has no target for it. INFERRED: a class nobody sent in a
    round keeps its target.

    The mean of a class with one sample is that sample's mean logits.
    """

    name = "fd"
    citation = "Jeong et al., arXiv 1811.11479"

    class Config(PrivateModelConfig):
        """Options of FD."""

        weight: float = option(
            default=1.0,
            ge=0,
            description="λ, the weight of distillation",
            source="FedGen's re-implementation",
        )
        distance: Literal["kl", "mse"] = option(
            default="kl",
            description="divergence of softmax outputs, or the mean squared difference of logits as in FedHe",
            source="FedGen's re-implementation for kl; mse: FedHe's code",
        )
        weights: Literal["uniform", "count"] = option(
            default="uniform",
            description="one vote per holder of a class, or one per sample of it",
            source="HtFLlib for uniform; count: ours",
        )
        exclude_self: bool = option(
            default=False,
            description="leave a client's own logits out of its targets",
            source="paper (UNVERIFIED); false: HtFLlib",
        )

    def check(self, population: Population) -> None:
        """Leaving oneself out takes others."""
        if self.config.exclude_self and len(population.trainers) == 1:
            raise ConfigError(
                f"{self.name}: method.exclude_self leaves client {population.trainers[0]} without any target, as "
                "it is the only client; add another, or use local"
            )

    def server_state(self, task: Task) -> dict[str, Any]:
        """The targets; or what each client sent and the sum of it, to take a client out again."""
        if not self.config.exclude_self:
            return super().server_state(task)
        return {"total": torch.zeros(task.classes, task.classes + 1), "sent": {}}

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, merge the class means."""
        replies = clients.ask(self.train)
        if self.config.exclude_self:
            self.remember_each(server, replies)
        else:
            self.remember(server, *merge_classes(replies, "logits", server.task.classes, self.config.weights))

    def remember_each(self, server: Server, replies: Replies) -> None:
        """Replace what all clients sent of the classes that came this time; the other classes keep theirs."""
        sums = class_sums(replies, "logits", server.task.classes, self.config.weights)
        total = torch.stack([*sums.values()]).sum(0)
        kept, came = server["sent"].tensors(), total[:, -1:] > 0
        for table in (server["total"].value, *kept.values()):
            table.masked_fill_(came, 0)
        server["total"].value.add_(total)
        server["sent"].load({client: own + kept.get(client, 0) for client, own in sums.items()})

    def downlink(self, server: Server, client: ClientId) -> Content:
        """G, or G_k: the mean over the other holders."""
        if not self.config.exclude_self:
            return super().downlink(server, client)
        own = server["sent"].tensors().get(client, 0)
        means, held = means_of(server["total"].value - own)
        classes = held.nonzero().squeeze(1)
        return {"logits": means[classes], "classes": classes}

    def distances(self, scores: Tensor, targets: Tensor) -> Tensor:
        """KL(σ(G[y]) ‖ σ(o)) of each sample, or the mean squared difference."""
        if self.config.distance == "kl":
            return divergence_of_each(scores, targets)
        return F.mse_loss(scores, targets, reduction="none").mean(1)
