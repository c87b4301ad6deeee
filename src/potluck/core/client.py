"""The client: one participant's data, task and declared state, and what it may draw at random."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.card import ClientId
from potluck.core.rng import Rng
from potluck.core.state import Holder, Precision
from potluck.core.streams import Source, Stream, several_each, shuffled_batches
from potluck.core.task import Task

SplitName = Literal["train", "validation", "test"]


class Client(Holder):
    """One client while it works. Methods read it; the engine builds it and moves its state in and out."""

    def __init__(
        self,
        task: Task,
        source: Source,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        super().__init__(task, device, precision)
        self.source = source
        self.id: ClientId = ""
        self.rows: Mapping[str, np.ndarray] = {}
        self.classes_held: tuple[int, ...] = ()
        self.secret = Rng(0)
        self.attempt = 1  # how often the round was begun here: private noise is for one content only

    @property
    def samples(self) -> int:
        """How many training samples the client has."""
        return len(self.rows["train"])

    def batches(
        self, split: SplitName = "train", epochs: int | None = None, batch_size: int | None = None
    ) -> Stream:
        """The client's own samples, shuffled anew each epoch in an order that no method influences.

        A single sample left over makes no batch where the private model has batch norm: it has no variance.
        """
        training = self.training
        order = shuffled_batches(
            self.rows[split],
            batch_size or training.batch_size,
            epochs or training.epochs,
            training.last_batch,
            self.rng.child("batches", split, self.count(f"batches:{split}")),
        )
        if order and len(order[-1]) == 1 and self._has_batch_norm():
            order = several_each(order)
        return Stream(self.source, order, augment=split == "train")

    def _has_batch_norm(self) -> bool:
        """Of the private model alone: what else a method declares must not change the order."""
        model = self.modules().get("model")
        return model is not None and any(isinstance(part, _BatchNorm) for part in model.modules())

    def draw_private(self, purpose: str) -> torch.Generator:
        """As `draw`, from the client's own secret: the server cannot draw the same numbers again."""
        return self._private(purpose).generator(self.device)

    @contextlib.contextmanager
    def drawing_privately(self, purpose: str) -> Iterator[None]:
        """Torch's default generator from the client's own secret, inside: the only one a captured step can use."""
        with self._private(purpose).as_default(self.device):
            yield

    def _private(self, purpose: str) -> Rng:
        node = self.secret.child("round", self.round, self.step, purpose)
        node = node.child(self.count(f"{self.step}:private:{purpose}"))
        return node if self.attempt == 1 else node.child("attempt", self.attempt)
