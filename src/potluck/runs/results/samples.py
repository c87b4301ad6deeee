"""Samples from outside, in the form in which a data set holds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.errors import DataError


def as_stored(x: Any, data: Dataset, client: ClientId) -> Tensor:
    """A batch of samples as a tensor of the data set's type; one of another shape or kind is refused.

    The rows of a pandas frame are encoded as those of the table that the client was trained on.
    """
    if isinstance(x, str | Path | Mapping):
        how = "a pandas frame, such as pandas.read_csv(path)" if data.encoding else "an array of samples"
        raise DataError(f"client {client} cannot read a {type(x).__name__}; give {how}")
    samples, wanted = _tensor(_encoded(x, data, client), client), data.x
    shape = ", ".join(map(str, wanted.shape[1:]))
    if samples.shape[1:] != wanted.shape[1:]:
        raise DataError(
            f"client {client} takes samples of shape (batch, {shape}), not {tuple(samples.shape)}"
            f"{_hint(samples.shape, wanted.shape[1:])}"
        )
    if not _of_a_kind(samples, wanted):
        raise DataError(
            f"client {client} was trained on samples of type {_kind(wanted)}, not {_kind(samples)}; give them "
            "as its data set has them"
        )
    samples = samples.to(wanted.dtype)
    _check_gaps(samples, data, client)
    _check_ids(samples, data, client)
    return samples


def _encoded(x: Any, data: Dataset, client: ClientId) -> Any:
    if type(x).__module__.partition(".")[0] != "pandas":
        return x
    if data.encoding is None:
        raise DataError(f"client {client} was not trained on a table; give its samples as an array")
    return data.encoding.encode(x, f"client {client}")


def _check_gaps(samples: Tensor, data: Dataset, client: ClientId) -> None:
    """Refuse infinite numbers, and NaN where the client does not fill it."""
    if not samples.is_floating_point():
        return
    endless = samples.isinf().flatten(1).any(1).nonzero().flatten().tolist()
    if endless:
        raise DataError(f"client {client}: sample {endless[0]} holds an infinite value; clean it first")
    gaps = samples.isnan()
    if data.filled:
        gaps[:, list(data.filled)] = False
    if bool(gaps.any()):
        row = int(gaps.flatten(1).any(1).nonzero()[0])
        raise DataError(
            f"client {client}: sample {row} holds NaN, which this run does not fill; fill it beforehand, or train "
            "on tables with missing='mean'"
        )


def _check_ids(samples: Tensor, data: Dataset, client: ClientId) -> None:
    """Refuse ids of tokens that the vocabulary does not have."""
    known = data.task.vocabulary
    if known is None or data.task.kind != "text-classification" or not samples.numel():
        return
    outside = samples[(samples < 0) | (samples >= known)]
    if len(outside):
        raise DataError(
            f"client {client} knows the token ids 0 to {known - 1}, not {int(outside[0])}; use its tokenizer"
        )


def _hint(given: torch.Size, wanted: torch.Size) -> str:
    """What to do about the shape of samples, where that can be told."""
    if given == wanted:
        return "; for a single sample give x[None]"
    if len(wanted) == 3 and wanted[0] == 1 and given[1:] == wanted[1:]:
        return "; give the channel an axis of its own: x[:, None]"
    if len(wanted) == 3 and given[1:] == (*wanted[1:], wanted[0]):
        return "; put the channels first: x.transpose(0, 3, 1, 2)"
    return ""


def _from_images(images: Sequence[Any]) -> np.ndarray:
    """Images of Pillow as arrays with the channels first."""
    arrays = [np.asarray(image) for image in images]
    return np.stack([one[None] if one.ndim == 2 else one.transpose(2, 0, 1) for one in arrays])


def _tensor(x: Any, client: ClientId) -> Tensor:
    try:
        if isinstance(x, list | tuple) and x and all(hasattr(one, "getbands") for one in x):
            return torch.from_numpy(_from_images(x))
        return x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    except (TypeError, ValueError) as error:
        raise DataError(f"client {client}: cannot make a batch of these samples ({error})") from error


def _of_a_kind(samples: Tensor, wanted: Tensor) -> bool:
    """Whether a change of type keeps the meaning: 0..255 and 0..1 are two ways to write an image."""
    if wanted.dtype == torch.uint8:
        whole = not samples.is_floating_point() and samples.dtype != torch.bool
        return whole and (not samples.numel() or 0 <= int(samples.min()) <= int(samples.max()) <= 255)
    if not wanted.is_floating_point():
        return not samples.is_floating_point()
    return samples.is_floating_point() or samples.ndim == 2


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
