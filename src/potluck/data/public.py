"""Public data, converted to what each client's model reads."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.core.public import Public
from potluck.core.rng import Rng
from potluck.core.streams import Prepare, Source
from potluck.data import words
from potluck.data.prepare import Preparation
from potluck.errors import PublicDataError


def choose_ids(data: Dataset, samples: int | None, rng: Rng) -> np.ndarray:
    """The ids of the public samples: all training rows, or `samples` of them drawn from the shared seed."""
    if samples is None:
        return np.arange(data.train_rows)
    if samples > data.train_rows:
        raise PublicDataError(
            f"public.samples: {samples} are asked for, data set {data.name!r} has {data.train_rows}; lower it"
        )
    return np.sort(rng.numpy().choice(data.train_rows, samples, replace=False))


def public_for(
    public: Dataset, ids: np.ndarray, own: Dataset, prepare: Prepare | None, rng: Rng, device: torch.device
) -> Public:
    """The public samples as a model for `own` reads them: its image size, channels, normalisation or vocabulary."""
    if own.standardize:
        raise PublicDataError(
            f"every client standardises data set {own.name!r} for itself, which public samples cannot follow: "
            "standardise them beforehand and say standardize: none"
        )
    rows = torch.from_numpy(ids)
    if public.filled and bool(public.x[rows].isnan().any()):
        raise PublicDataError(
            f"the public data {public.name!r} lack values, and belong to no client whose mean could fill "
            "them: fill them beforehand"
        )
    x, mask = _readable(public, rows, own)
    source = Source(x.to(device), torch.zeros(len(x), dtype=torch.long, device=device), prepare)
    return Public(public, ids, source, mask.to(device), rng)


def _readable(public: Dataset, rows: Tensor, own: Dataset) -> tuple[Tensor, Tensor]:
    """The samples, and which of them exist: none if the public data lacks the modality."""
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
    """The texts as token ids, with the vocabulary or tokenizer of `own`."""
    if public.texts is None:
        return torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), dtype=torch.bool)
    texts = [public.texts[row] for row in rows.tolist()]
    if own.encoder is not None:
        there = torch.tensor([bool(text.strip()) for text in texts])
        return torch.from_numpy(own.encoder.encode(texts, length)) * there[:, None], there
    if own.words is None:
        raise PublicDataError(
            f"data set {own.name!r} does not say which word has which number (words, or a tokenizer), so its "
            f"clients cannot read the texts of the public data {public.name!r}"
        )
    split = [words.words(text) for text in texts]
    there = torch.tensor([bool(words) for words in split])
    return torch.from_numpy(words.encode(split, own.words, length)), there
