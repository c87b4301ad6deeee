"""The clients of FD and FedHe: class means of logits gathered while training, and the pull towards the server's."""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.core.client import Client
from potluck.core.model import Model
from potluck.core.task import Batch, Task
from potluck.kit.class_means import ClassStats, class_counts
from potluck.kit.class_vectors import ClassVectors, class_vectors
from potluck.training.fit import fit


class ClassLogits(ClassVectors):
    """Loss: CE(o, y) + λ·dist(o, G[y]), the second term only over samples whose class has a target."""

    vectors, width, meaning = "logits", "C", "mean logits of each class held, over the batches trained on"
    down = class_vectors("logits", "C", "mean logits of the classes anyone holds, the targets")

    def vector_width(self, task: Task, model: Model) -> int:
        """A number per class."""
        return task.classes

    def gather(self, client: Client, stats: ClassStats) -> None:
        """Local epochs; the logits of every batch count, as they were before its step."""
        fit(client, lambda client, batch: self.loss(client, batch, stats))

    def counted(self, client: Client, stats: ClassStats) -> Tensor:
        """The samples of each class, not how often they were seen; 0 for a class that was in no batch."""
        return torch.minimum(stats.counts, class_counts(client))

    def loss(self, client: Client, batch: Batch, stats: ClassStats | None = None) -> dict[str, Tensor]:
        """Cross-entropy, and the distance to the target of the sample's class where there is one."""
        scores = client["model"](batch.x)
        if stats is not None:
            stats.add(scores, batch.y)
        distances = self.distances(scores.float(), client["logits"].value[batch.y])
        return {
            "ce": client.task.loss(scores, batch.y, batch.weight),
            "distillation": self.config.weight * self.over_known(client, batch, distances),
        }

    def distances(self, scores: Tensor, targets: Tensor) -> Tensor:
        """How far the logits of each sample are from its target."""
        raise NotImplementedError(f"{type(self).__name__} defines no distances")
