"""What a client has to solve: the shape of a sample, the labels, the loss and the measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.core.task_kinds import TaskKind, task_kind

KindName = Literal["classification", "text-classification", "multi-label", "segmentation", "retrieval"]


@dataclass(frozen=True)
class Task:
    """One client's task. Two clients of one federation may have different ones.

    `input` is the shape of one prepared sample: (channels, height, width) for images, (features,) for
    vectors, (tokens,) for text, where `vocabulary` is the number of token ids. For retrieval a sample is a pair in
    one row, the numbers of an image of shape `image` and then the token ids of its caption, and `classes` is the
    width of both embeddings together.
    """

    kind: KindName
    classes: int
    input: tuple[int, ...]
    vocabulary: int | None = None
    image: tuple[int, ...] = ()

    @property
    def rules(self) -> TaskKind:
        """How a task of this kind is learnt and scored."""
        return task_kind(self.kind)

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of one sample's scores: a number per class, for segmentation in every pixel."""
        return (self.classes, *self.input[1:]) if self.kind == "segmentation" else (self.classes,)

    @property
    def single_label(self) -> bool:
        """Whether a label is one class number."""
        return self.kind in ("classification", "text-classification")

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; `weight` counts samples (0 leaves one out)."""
        return self.rules.loss(scores, y) if weight is None else self.rules.weighted(scores, y, weight)

    def measure(self, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What evaluation gathers of a batch, on the device; `correct` and `loss` where there is one label."""
        return self.rules.gather(scores, y)

    def __str__(self) -> str:
        shape, what = "×".join(map(str, self.input)), "classes" if self.kind != "retrieval" else "outputs"
        return f"{self.kind} with {self.classes} {what} of samples {shape}"

    def to_json(self) -> dict[str, Any]:
        """The part of the card that names the task."""
        known = {"kind": self.kind, "classes": self.classes, "input": list(self.input)}
        known |= {"vocabulary": self.vocabulary} if self.vocabulary else {}
        return known | ({"image": list(self.image)} if self.image else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """The inverse of `to_json`."""
        shapes = tuple(value["input"]), value.get("vocabulary"), tuple(value.get("image", ()))
        return cls(value["kind"], value["classes"], *shapes)

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
