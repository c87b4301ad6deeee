"""FedHe (Chan & Ngai, MSN 2021): distillation of class logits by their squared distance."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.method import Clients, PrivateModelConfig
from potluck.core.options import option
from potluck.core.server import Server
from potluck.core.task import Task
from potluck.kit.class_logits import ClassLogits
from potluck.kit.class_means import class_sums, means_of


class FedHe(ClassLogits):
    """FD with the mean squared distance to the logits, here in rounds.

    Up: F_k[c], the mean logits of each class held over the batches trained on, the classes, their counts.
    Down: G[c], the mean of what was sent of class c.
    Loss: CE(o, y) + α·mean((o − G[y])²), the second term only over samples whose class has a target, from the
    second round on.

    Deviations (INFERRED): FedHe is asynchronous. There one client at a time finishes, the server adds its class
    means to a sum per class, and every 10·K uploads it replaces the sum by the mean with a count of one, to forget.
    Here all clients of a round send at once, one round stands for K uploads, and by default only the last round
    counts: that is FD with `distance: mse`. `forget: 10` keeps the released code's running sums. Left out:
    targets that change while a client trains.
    """

    name = "fedhe"
    citation = "Chan & Ngai, MSN 2021"

    class Config(PrivateModelConfig):
        """Options of FedHe."""

        weight: float = option(
            default=1.0,
            ge=0,
            description="α, the weight of distillation; 1 in the released CIFAR script, 0.5 in the parser",
            source="released code",
        )
        forget: int | None = option(
            default=None,
            ge=1,
            description="rounds after which the sums of all that was sent become means with a count of one; "
            "none: only the last round counts",
            source="released code (10·K uploads are 10 rounds); none: ours",
        )

    def server_state(self, task: Task) -> dict[str, Any]:
        """The targets, and the sums with a count per class where they are kept."""
        sums = {"running": torch.zeros(task.classes, task.classes + 1)} if self.config.forget else {}
        return super().server_state(task) | sums

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average the class means, those of earlier rounds too where they are kept."""
        replies = clients.ask(self.train)
        sent = torch.stack([*class_sums(replies, "logits", server.task.classes).values()]).sum(0)
        if self.config.forget:
            sent = server["running"].value.add_(sent)
        means, held = means_of(sent)
        if self.config.forget and server.round % self.config.forget == 0:
            server["running"].load(torch.cat([means, held.to(means.dtype).unsqueeze(1)], dim=1))
        self.remember(server, means, held)

    def distances(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean squared difference of logits."""
        return F.mse_loss(scores, targets, reduction="none").mean(1)
