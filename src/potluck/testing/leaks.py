"""Find private values in what crossed: by value, whatever name they have there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from potluck.core.client import Client
from potluck.training.collect import collect

RTOL, ATOL = 1e-5, 1e-7  # the same representation is rounded differently in a batch of another size


def secrets_of(client: Client, stays: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that `Method.stays` says never leaves this client, with its name: samples one by one."""
    for name in stays:
        if name == "data":
            yield from _samples(client)
        elif name == "labels":
            yield name, client.source.y[client.rows["train"]]
        elif name == "representations":
            yield from (("a representation", row) for row in _representations(client))
        else:
            yield from _part(client, name)


def contains(message: Tensor, secret: Tensor) -> bool:
    """Whether the values of a secret stand somewhere in a tensor, one after the other.

    A secret with one value throughout is never found: zeros and ones are everywhere.

    >>> contains(torch.tensor([[9.0, 1.0], [2.0, 3.0]]), torch.tensor([1, 2, 3]))
    True
    """
    where, what = (tensor.detach().flatten().double().cpu() for tensor in (message, secret))
    if len(what) > len(where) or not len(what) or bool((what == what[0]).all()):
        return False
    rarest = int(what.abs().argmax())
    windows = where.unfold(0, len(what), 1)
    starts = torch.isclose(windows[:, rarest], what[rarest], RTOL, ATOL).nonzero().flatten()
    return any(torch.allclose(windows[start], what, RTOL, ATOL) for start in starts)


def _samples(client: Client) -> Iterator[tuple[str, Tensor]]:
    """The training samples, as they are stored and as the model sees them."""
    for row in client.source.x[client.rows["train"]]:
        yield "a sample of the data", row
    for batch in collect(client, lambda batch: batch.x):
        yield from (("a sample of the data", row) for row in batch)


def _representations(client: Client) -> Tensor:
    return torch.cat(collect(client, lambda batch: client["model"].features(batch.x)))


def _part(client: Client, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part of the state; `model/features` is the model without its head."""
    if name not in client:
        raise AssertionError(f"{name!r} is said to stay at home, but the client has no such part")
    root = name.removesuffix("/features")
    for key, value in client[root].tensors().items():
        if root == name or not key.startswith("head."):
            yield f"{root}/{key}" if key else root, value
