"""Data sets in memory, and the protocol of text encoders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from potluck.core.task import Task


@runtime_checkable
class Encoder(Protocol):
    """A tokenizer: turns texts into token ids; 0 is padding."""

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Token ids (N, length), int64."""


@dataclass(frozen=True)
class Dataset:
    """All rows of a data set, the official training part first.

    `x` is uint8 or float32 (N, channels, height, width) for images, float32 (N, features) for vectors, int64
    (N, length) for text. It may be shared with other users of the same data set: never write into it. `y` is
    one class per row; (N, labels) for multi-label; (N, height, width) for segmentation.
    """

    name: str
    task: Task
    x: Tensor
    y: Tensor
    train_rows: int  # rows [0, train_rows) are the official training part; all rows if there is no test part
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel on the 0..1 scale; () means no normalisation
    std: tuple[float, ...] = ()
    strata: Tensor | None = None  # the class by which a partition distributes a row, where y is not a class
    words: Mapping[str, int] | None = None  # text: the number of every word that has one
    encoder: Encoder | None = None  # text: the tokenizer, where it is not `words`
    images: Tensor | None = None  # pairs: the original images; x holds them prepared
    texts: tuple[str, ...] | None = None  # the original texts or captions; empty where a row has none

    def __len__(self) -> int:
        return int(self.y.shape[0])

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
        return self.task.classes if self.task.single_label else int(self.labels.max()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content: the task and every sample and label. The name does not count."""
        about = (self.task, self.train_rows, self.class_names, self.mean, self.std)
        digest = hashlib.sha256(repr(about).encode())
        for tensor in (self.x, self.y, self.strata, self.images):
            if tensor is not None:
                digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().data)
        for text in self.texts or ():
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes in `labels`."""
        return self.class_names if self.task.single_label else tuple(map(str, range(self.label_count)))


Data = Dataset | tuple[Dataset, ...]  # of an experiment: one data set, or one per group of clients
