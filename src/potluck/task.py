"""What a client has to solve: the shape of a sample, the labels, the loss and the measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TaskKind = Literal["classification", "text-classification"]


@dataclass(frozen=True)
class Task:
    """One client's task. Two clients of one federation may have different ones.

    `input` is the shape of one prepared sample: (channels, height, width) for images, (features,) for
    vectors, (tokens,) for text, where `vocabulary` is the number of token ids.
    """

    kind: TaskKind
    classes: int
    input: tuple[int, ...]
    vocabulary: int | None = None

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; `weight` counts samples (0 leaves one out)."""
        if weight is None:
            return F.cross_entropy(scores, y)
        per_sample = F.cross_entropy(scores, y, reduction="none")
        return (per_sample * weight).sum() / weight.sum().clamp_min(1e-12)

    def measure(self, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums over the batch, on the device: `correct` and `loss`."""
        return {
            "correct": (scores.argmax(1) == y).sum(),
            "loss": F.cross_entropy(scores, y, reduction="sum"),
        }

    def to_json(self) -> dict[str, Any]:
        """The part of the card that names the task."""
        return {"kind": self.kind, "classes": self.classes, "input": list(self.input)} | (
            {"vocabulary": self.vocabulary} if self.vocabulary else {}
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """The inverse of `to_json`."""
        return cls(value["kind"], value["classes"], tuple(value["input"]), value.get("vocabulary"))

    def example(self, samples: int = 2) -> Tensor:
        """A batch of the right shape and type, for probing models."""
        if self.kind == "text-classification":
            return torch.zeros(samples, *self.input, dtype=torch.long)
        return torch.zeros(samples, *self.input)


@dataclass(frozen=True)
class Batch:
    """Samples that meet in one training step: inputs, labels, weights (None: all one), row ids."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    id: Tensor | None = None

    def __len__(self) -> int:
        return int(self.x.shape[0])
