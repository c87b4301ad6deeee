"""Public data: unlabelled samples that the server and all clients can reach, each in the form it can read.

A sample has an id, its row in the data set, and is the same thing to everyone: an image and its caption are one. A
client that lacks a sample in its modality has it masked; nothing else is ever put in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.client import Card, ClientId
from potluck.data import Dataset, Preparation, tokenizer
from potluck.errors import ConfigError
from potluck.rng import Rng
from potluck.streams import Prepare, Source, Stream, shuffled_batches


@dataclass(frozen=True)
class Public:
    """The public samples as one side sees them. Rows of `source`, `ids` and `mask` go together.

    In a batch of `stream`, `batch.id` are rows: `public.mask[batch.id]` says which samples this side has.
    """

    name: str
    ids: np.ndarray  # sample ids, ascending, the same on every side
    source: Source
    mask: Tensor  # on the device; false where a sample is not there in this side's modality
    rng: Rng  # shared: the order is the same on every side

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """What two sides compare to know that they mean the same samples."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]

    def order(self, round_: int, batch_size: int, passes: int = 1) -> list[np.ndarray]:
        """The rows of every batch of a round, the same on every side; a short last batch is left out."""
        self.check_batch(batch_size, "a public batch")
        rows, rng = np.arange(len(self)), self.rng.child("round", round_)
        return shuffled_batches(rows, batch_size, passes, "drop", rng)

    def stream(self, round_: int, batch_size: int, passes: int = 1) -> Stream:
        """The same batches for `fit`."""
        return Stream(self.source, self.order(round_, batch_size, passes))

    def check_batch(self, size: int, key: str) -> None:
        """Refuse a batch that the public data cannot fill; `key` names the option that asks for it."""
        if size > len(self):
            raise ConfigError(
                f"{key} of {size} samples is larger than the public data, which has {len(self)}; lower it, or "
                "raise public.samples"
            )


def choose_ids(data: Dataset, samples: int | None, rng: Rng) -> np.ndarray:
    """The ids of the public samples: rows of the training part, all or so many drawn from the shared seed."""
    if samples is None:
        return np.arange(data.train_rows)
    if samples > data.train_rows:
        raise ConfigError(
            f"public.samples: {samples} are asked for, data set {data.name!r} has {data.train_rows}; lower it"
        )
    return np.sort(rng.numpy().choice(data.train_rows, samples, replace=False))


def public_for(
    public: Dataset, ids: np.ndarray, own: Dataset, prepare: Prepare | None, rng: Rng, device: torch.device
) -> Public:
    """The public samples in the form a model for `own` reads: its size, channels, normalisation or words."""
    rows = torch.from_numpy(ids)
    x, mask = _readable(public, rows, own)
    source = Source(x.to(device), torch.zeros(len(x), dtype=torch.long, device=device), prepare)
    return Public(public.name, ids, source, mask.to(device), rng)


def _readable(public: Dataset, rows: Tensor, own: Dataset) -> tuple[Tensor, Tensor]:
    """The samples, and which of them are there: none where the public data lacks the modality."""
    task, everything = own.task, torch.ones(len(rows), dtype=torch.bool)
    if task.kind == "retrieval":
        images, seen = _images(public, rows, task.image)
        tokens, told = _tokens(public, rows, own, task.input[0] - images[0].numel())
        prepared = Preparation(own.mean, own.std).prepare(images)
        return torch.cat([prepared.flatten(1), tokens.float()], 1), seen & told
    if task.kind == "text-classification":
        return _tokens(public, rows, own, task.input[0])
    if len(task.input) == 3:
        return _images(public, rows, task.input)
    if public.x.shape[1:] == task.input and public.x.is_floating_point() and public.images is None:
        return public.x[rows], everything
    return torch.zeros(len(rows), *task.input), ~everything


def _images(public: Dataset, rows: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    stored = public.x if public.images is None else public.images
    if stored.ndim != 4:
        return torch.zeros(len(rows), *shape), torch.zeros(len(rows), dtype=torch.bool)
    images = stored[rows]
    images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if images.shape[1] != shape[0]:
        images = images.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
    if images.shape[2:] != shape[1:]:
        images = F.interpolate(images, size=shape[1:], mode="bilinear", antialias=True)
    return images.contiguous(), torch.ones(len(rows), dtype=torch.bool)


def _tokens(public: Dataset, rows: Tensor, own: Dataset, length: int) -> tuple[Tensor, Tensor]:
    """The captions in the numbers that `own` has for words."""
    if public.texts is None:
        return torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), dtype=torch.bool)
    if own.words is None:
        raise ConfigError(
            f"data set {own.name!r} does not say which word has which number (words), so its clients cannot read "
            f"the texts of the public data {public.name!r}"
        )
    split = [tokenizer.words(public.texts[row]) for row in rows.tolist()]
    there = torch.tensor([bool(words) for words in split])
    return torch.from_numpy(tokenizer.encode(split, own.words, length)), there


def check_same_ids(own: Public, cards: Mapping[ClientId, Card]) -> None:
    """Refuse a client whose public samples are others than the server's."""
    for client, card in cards.items():
        theirs = card.extra.get("public")
        if theirs != own.fingerprint:
            raise ConfigError(
                f"client {client} has public samples with other ids than the server ({theirs} instead of "
                f"{own.fingerprint}); give all sides the same public.data, public.samples and seed"
            )
