"""Samples from outside, in the form in which a data set holds its own."""

from __future__ import annotations

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
    samples, wanted = _tensor(_encoded(x, data, client), client), data.x
    shape = ", ".join(map(str, wanted.shape[1:]))
    if samples.shape[1:] != wanted.shape[1:]:
        hint = "; for a single sample give x[None]" if samples.shape == wanted.shape[1:] else ""
        raise DataError(
            f"client {client} takes samples of shape (batch, {shape}), not {tuple(samples.shape)}{hint}"
        )
    if not _of_a_kind(samples, wanted):
        raise DataError(
            f"client {client} was trained on samples of type {_kind(wanted)}, not {_kind(samples)}; give them "
            "as its data set has them"
        )
    samples = samples.to(wanted.dtype)
    _check_gaps(samples, data, client)
    return samples


def _encoded(x: Any, data: Dataset, client: ClientId) -> Any:
    if type(x).__module__.partition(".")[0] != "pandas":
        return x
    if data.encoding is None:
        raise DataError(f"client {client} was not trained on a table; give its samples as an array")
    return data.encoding.encode(x, f"client {client}")


def _check_gaps(samples: Tensor, data: Dataset, client: ClientId) -> None:
    """Refuse NaN where the client does not fill it."""
    if not samples.is_floating_point():
        return
    gaps = samples.isnan()
    if data.filled:
        gaps[:, list(data.filled)] = False
    if bool(gaps.any()):
        row = int(gaps.flatten(1).any(1).nonzero()[0])
        raise DataError(
            f"client {client}: sample {row} holds NaN, which this run does not fill; fill it beforehand, or train "
            "on tables with missing='mean'"
        )


def _tensor(x: Any, client: ClientId) -> Tensor:
    try:
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
