"""Data sets in memory, and the protocol of text encoders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from potluck.core.task import Task
from potluck.errors import DataError


@runtime_checkable
class Encoder(Protocol):
    """A tokenizer: turns texts into token ids; 0 is padding."""

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Token ids (N, length), int64."""


@runtime_checkable
class TableEncoding(Protocol):
    """How rows of a table become samples."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the numbers of a sample are called."""

    @property
    def filled(self) -> tuple[int, ...]:
        """The numbers of a sample that may be missing (NaN): every client fills them with its own mean."""

    def encode(self, frame: Any, where: str) -> np.ndarray:
        """The rows of a pandas frame as samples; `where` is how an error names it."""

    def to_json(self) -> dict[str, Any]:
        """The encoding as plain values."""


@dataclass(frozen=True)
class Owners:
    """Which client brings each row: the clients by name, and the place of one of them per row."""

    names: tuple[str, ...]
    rows: Tensor  # (N,), int64
    by: str | None = None  # the column they were read from


@dataclass(frozen=True)
class Dataset:
    """All rows of a data set: the training part, then the official validation and test parts, if it has them.

    `x` is uint8 or float32 (N, channels, height, width) for images, float32 (N, features) for vectors and
    (N, channels, time) for windows, int64 (N, length) for text. It may be shared with other users of the same data
    set: never write into it. `y` is one class per row; (N, labels) for multi-label; (N, height, width) for
    segmentation; float32 (N,) or (N, outputs) for regression.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    train_rows: int  # rows [0, train_rows) are the training part; all rows if there is no other
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel on the 0..1 scale; () means no normalisation
    std: tuple[float, ...] = ()
    strata: Tensor | None = None  # the class by which a partition distributes a row, where y is not a class
    words: Mapping[str, int] | None = None  # text: the number of every word that has one
    encoder: Encoder | None = None  # text: the tokenizer, where it is not `words`
    images: Tensor | None = None  # pairs: the original images; x holds them prepared
    texts: tuple[str, ...] | None = None  # the original texts or captions; empty where a row has none
    validation_rows: int = 0  # rows of the official validation part, which follows the training part
    owners: Owners | None = None  # the client of every row, for a natural split
    strata_names: tuple[str, ...] = ()  # of the classes in `strata`; (): their numbers
    standardize: tuple[int, ...] = ()  # vectors: columns that each client standardises by its training rows
    own_rows: Tensor | None = (
        None  # the number of each row in its file, array or part, where that is another one
    )
    encoding: TableEncoding | None = None  # tables: how their columns became the numbers in x

    def __post_init__(self) -> None:
        halves = (
            name for name in self.class_names if any("\ud800" <= letter <= "\udfff" for letter in str(name))
        )
        if (broken := next(halves, None)) is not None:
            raise DataError(f"{self.name}: the class name {broken!r} is not text in UTF-8; rename the class")

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def __repr__(self) -> str:
        sizes = {"validation": self.validation_rows, "test": len(self) - self.test_start}
        parts = "".join(f", {size} of them for {part}" for part, size in sizes.items() if size)
        clients = f", {len(self.owners.names)} clients" if self.owners else ""
        return f"<data set {self.name}: {len(self)} rows{parts}; {self.task}{clients}>"

    @property
    def test_start(self) -> int:
        """The first row of the official test part; the number of rows if there is none."""
        return self.train_rows + self.validation_rows

    @property
    def filled(self) -> tuple[int, ...]:
        """Vectors: columns whose missing values (NaN) each client fills from its training rows."""
        return self.encoding.filled if self.encoding is not None else ()

    @property
    def labels(self) -> Tensor:
        """The class of every row, for partitioning; 0 for all rows if the data has no classes."""
        if self.strata is not None:
            return self.strata
        classes = self.y.ndim == 1 and not self.y.is_floating_point()
        return self.y if classes else torch.zeros(len(self), dtype=torch.long)

    @property
    def label_count(self) -> int:
        """The number of classes in `labels`."""
        if self.task.single_label:
            return self.task.classes
        return len(self.strata_names) or int(self.labels.max()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content: the task and every sample and label. The name does not count."""
        about = (self.task, self.train_rows, self.class_names, self.mean, self.std)
        digest = hashlib.sha256(repr(about).encode())
        owners = self.owners
        own = (self.validation_rows, self.standardize, owners.names if owners else ())
        if any(own):
            digest.update(repr(own).encode())
        if self.filled:
            digest.update(repr(self.filled).encode())
        for tensor in (self.x, self.y, self.strata, self.images, owners.rows if owners else None):
            if tensor is not None:
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        for text in self.texts or ():
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes in `labels`."""
        if self.task.single_label:
            return self.class_names
        if self.strata is None:
            return ("samples",)
        return self.strata_names or tuple(map(str, range(self.label_count)))


Data = Dataset | tuple[Dataset, ...]  # of an experiment: one data set, or one per group of clients
