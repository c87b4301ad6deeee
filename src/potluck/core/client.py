"""The client: its data, task, declared state and sources of randomness."""

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
from potluck.errors import ConfigError

SplitName = Literal["train", "validation", "test"]


class Client(Holder):
    """One client while it works. Methods read it; the engine builds it and moves its state in and out.

    What a method reads:

    - `client["model"]`: a part of its declared state (a `Part`), or a module in one, `client["model/head"]`;
    - `id`, `task`, `samples`, `classes_held`, `rows` (row numbers by split);
    - `source`: the samples and labels that row numbers refer to. In a simulation it is the whole data set, with the
      rows of all clients and all splits, so take what is in `rows["train"]` and nothing else: `batches()` and
      `collect` do. `fit` refuses other rows, and `check_method` finds a step that looks at them in another way;
    - `round`, from 1; `step`, the name of the step it does; `training`, its settings for this round;
    - `device`, where its tensors are, and `precision`;
    - `public`, the public data, for methods with `needs_public_data`;
    - `batches()`, its shuffled samples, and `numbers([…])`, a few whole numbers on its device;
    - `draw("purpose")`, `draw_private("purpose")`: generators; `rng`, the randomness of this round (an `Rng`);
    - `report`: steps and losses so far, which go to the server with the reply (a `Report`).
    """

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
        self.attempt = (
            1  # how often this round was started here: private noise must never be used for two contents
        )
        self.question = ""  # what a real server asks, as a digest; for the same reason

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.rows["train"])

    def batches(
        self,
        split: SplitName = "train",
        epochs: int | None = None,
        batch_size: int | None = None,
        rows: np.ndarray | None = None,
    ) -> Stream:
        """The client's own samples, shuffled anew each epoch in an order that no method influences.

        If the private model has batch norm, a single sample left over is dropped: it has no variance. `rows` are
        some of the split's, where a method leaves out others.
        """
        training = self.training
        order = shuffled_batches(
            self.rows[split] if rows is None else rows,
            batch_size or training.batch_size,
            epochs or training.epochs,
            training.last_batch,
            self.rng.child("batches", split, self.count(f"batches:{split}")),
        )
        if order and len(order[-1]) == 1 and self._has_batch_norm():
            order = several_each(order)
        return Stream(self.source, order, augment=split == "train", split=split if rows is None else "")

    def require_training_rows(self, name: str, stream: Stream) -> None:
        """Refuse a stream of this client's data with rows that it must not be trained on."""
        if stream.split == "train" or stream.source.x is not self.source.x or not len(stream):
            return
        if "train" not in self.rows:  # a client that was put together by hand
            return
        foreign = np.setdiff1d(np.concatenate(stream.order), self.rows["train"])
        if len(foreign):
            split = f", of the split {stream.split}," if stream.split else ""
            raise ConfigError(
                f"the step {self.step} trains on rows that are not in client.rows['train']: the stream "
                f"{name!r}{split} has {len(foreign)} of them; take client.batches() or some of "
                "client.rows['train'], as client.source holds the rows of all clients and splits"
            )

    def _has_batch_norm(self) -> bool:
        """Looks at the private model alone: what else a method declares must not change the order."""
        model = self.modules().get("model")
        return model is not None and any(isinstance(part, _BatchNorm) for part in model.modules())

    def draw_private(self, purpose: str) -> torch.Generator:
        """As `draw`, from the client's secret, so that the server cannot reproduce the numbers."""
        return self._private(purpose).generator(self.device)

    @contextlib.contextmanager
    def drawing_privately(self, purpose: str) -> Iterator[None]:
        """Seed torch's default generator from the client's secret: a captured step can use no other one."""
        with self._private(purpose).as_default(self.device):
            yield

    def _private(self, purpose: str) -> Rng:
        node = self.secret.child("round", self.round, self.step, purpose)
        node = node.child(self.count(f"{self.step}:private:{purpose}"))
        node = node.child("question", self.question) if self.question else node
        return node if self.attempt == 1 else node.child("attempt", self.attempt)
