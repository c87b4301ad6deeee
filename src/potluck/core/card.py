"""The card: what a client says of itself when it enrols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.core.task import Task

ClientId = str


@dataclass(frozen=True)
class Card:
    """What a client says of itself at enrolment: always samples and task, the rest only if the method asks.

    `extra` may hold `width` (of the representation), `stem` (the shape of a sample after the first part of the
    model), `classes_held`, `names` (of the model's tensors, with shapes), `public` (which public samples it means).
    """

    client: ClientId
    samples: int
    task: Task
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """The width of the client's representation."""
        return int(self.extra["width"])

    @property
    def stem(self) -> tuple[int, ...]:
        """The shape of one sample after the first part of the client's model."""
        return tuple(self.extra["stem"])

    @property
    def classes_held(self) -> tuple[int, ...]:
        """The classes with at least one training sample."""
        return tuple(self.extra["classes_held"])

    @property
    def names(self) -> Mapping[str, tuple[int, ...]]:
        """The model's tensors that may cross, with their shapes."""
        return dict(self.extra["names"])
