"""A client's task: the shape of its samples and labels, its loss and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.core.plain_values import whole, wholes
from potluck.core.task_kinds import TASK_KINDS, TaskKind, task_kind

KindName = Literal[
    "classification", "text-classification", "multi-label", "segmentation", "retrieval", "regression"
]

MOST_CLASSES = 100_000
MOST_TOKENS = 10_000_000  # of a vocabulary
MOST_NUMBERS = 1 << 26  # in one sample
MOST_DIMENSIONS = 4  # of one sample
SAMPLE_AXES = {
    "segmentation": 3,
    "text-classification": 1,
    "retrieval": 1,
}  # of one sample; other kinds take any


@dataclass(frozen=True)
class Task:
    """One client's task. Two clients of one federation may have different ones.

    `input` is the shape of one prepared sample: (channels, height, width) for images, (features,) for
    vectors, (channels, time) for windows of sensors, (tokens,) for text, where `vocabulary` is the number of token
    ids. A retrieval sample is a pair in one row: the pixels of an image of shape `image`, then the token ids of its
    caption. There `classes` is the width of both embeddings together; in regression it is the number of outputs.
    """

    kind: KindName
    classes: int
    input: tuple[int, ...]
    vocabulary: int | None = None
    image: tuple[int, ...] = ()

    @property
    def rules(self) -> TaskKind:
        """The loss and metrics of this kind of task."""
        return task_kind(self.kind)

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of one sample's scores: one per class, and for segmentation one per class and pixel."""
        return (self.classes, *self.input[1:]) if self.kind == "segmentation" else (self.classes,)

    @property
    def single_label(self) -> bool:
        """Whether every sample has exactly one class."""
        return self.kind in ("classification", "text-classification")

    @property
    def from_features(self) -> bool:
        """Whether a sample's scores follow from its representation alone, as a head computes them."""
        return self.kind not in ("segmentation", "retrieval")

    @property
    def counted(self) -> str:
        """What `classes` counts, in words: `3 classes`, `1 output`."""
        what = "class" if self.kind not in ("retrieval", "regression") else "output"
        plural = "es" if what == "class" else "s"
        return f"{self.classes} {what}{plural if self.classes != 1 else ''}"

    def loss(self, scores: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; `weight` is one number per sample, 0 leaves the sample out."""
        return self.rules.loss(scores, y) if weight is None else self.rules.weighted(scores, y, weight)

    def measure(self, scores: Tensor, y: Tensor) -> dict[str, Tensor]:
        """What evaluation gathers from a batch, on the device."""
        return self.rules.gather(scores, y)

    def __str__(self) -> str:
        shape = "×".join(map(str, self.input))
        things = "tokens" if self.vocabulary and not self.image else "numbers"
        of = f"{shape} {things} each" if len(self.input) == 1 else f"shape {shape}"
        return f"{self.kind} with {self.counted} for samples of {of}"

    def to_json(self) -> dict[str, Any]:
        """The task as plain values, for a client's card."""
        known = {"kind": self.kind, "classes": self.classes, "input": list(self.input)}
        known |= {"vocabulary": self.vocabulary} if self.vocabulary else {}
        return known | ({"image": list(self.image)} if self.image else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """The inverse of `to_json`; a `ValueError` or `KeyError` for what is no task, or one out of all bounds."""
        kind = value["kind"]
        if not isinstance(kind, str) or kind not in TASK_KINDS:
            raise ValueError(f"there is no such task; choose from {', '.join(TASK_KINDS)}")
        unknown = set(value) - {"kind", "classes", "input", "vocabulary", "image"}
        if unknown:
            raise ValueError(f"a task has no {min(map(repr, unknown))}")
        classes = whole(value["classes"], 1, MOST_CLASSES, "the number of classes")
        shape, image = (
            sample_shape(value.get(name, ()), f"the {name} of a task") for name in ("input", "image")
        )
        vocabulary = value.get("vocabulary")
        if vocabulary is not None:
            vocabulary = whole(vocabulary, 1, MOST_TOKENS, "the vocabulary of a task")
        if not shape or math.prod(image) > math.prod(shape):
            raise ValueError(
                "a task without the shape of a sample, or with an image that does not fit in one"
            )
        if len(shape) != SAMPLE_AXES.get(kind, len(shape)):
            raise ValueError(f"{kind} samples have {SAMPLE_AXES[kind]} axes, not {len(shape)}")
        if len(image) != (3 if kind == "retrieval" else 0):
            raise ValueError(f"a {kind} sample holds {'an' if kind == 'retrieval' else 'no'} image of 3 axes")
        return cls(kind, classes, shape, vocabulary, image)  # type: ignore[arg-type]

    def example(self, samples: int = 2) -> Tensor:
        """A batch of the right shape and type, for probing models."""
        if self.kind == "text-classification":
            return torch.zeros(samples, *self.input, dtype=torch.long)
        return torch.zeros(samples, *self.input)


def sample_shape(value: Any, what: str) -> tuple[int, ...]:
    """The shape of one sample, or of what a model makes of it, from JSON."""
    shape = wholes(value, 1, MOST_NUMBERS, MOST_DIMENSIONS, what)
    if math.prod(shape) > MOST_NUMBERS:
        raise ValueError(f"{what} holds more than {MOST_NUMBERS:,} numbers")
    return shape


@dataclass(frozen=True)
class Batch:
    """The samples of one training step: inputs, labels, weights (None: all 1) and row numbers."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    id: Tensor | None = None

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one number per sample, by the batch's weights, as `Task.loss` takes it.

        >>> Batch(torch.zeros(2, 1), torch.zeros(2), weight=torch.tensor([1.0, 0.0])).mean(torch.tensor([3.0, 5.0]))
        tensor(3.)
        """
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp_min(1e-12)
