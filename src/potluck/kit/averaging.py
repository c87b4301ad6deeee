"""Weighted means of what clients sent: plain, by group, by layer, or of slices of different width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from potluck.core.replies import Replies

Weights = Literal["samples", "uniform"] | Mapping[str, float]
Index = tuple[Tensor | slice | None, ...]


def average(
    replies: Replies,
    group: str,
    weights: Weights = "samples",
    *,
    base: Mapping[str, Tensor] | None = None,
    index: Mapping[str, Mapping[str, Index]] | None = None,
) -> dict[str, Tensor]:
    """The weighted mean of every tensor of a group, over the clients that sent it, in client order.

    A tensor that some clients lack is averaged over those that have it. One that nobody sent, or only clients of
    weight 0, is left out.
    `index` says which entries of the full tensor a client's slice holds (client → name → one index, slice or None
    for all per dimension); entries nobody held keep their value in `base`.

    >>> one, four = ({"w": {"x": torch.tensor(value)}} for value in (1.0, 4.0))
    >>> replies = Replies.of({"a": one, "b": four}, samples={"a": 1, "b": 2})
    >>> average(replies, "w")["x"]
    tensor(3.)
    """
    holders: dict[str, list[str]] = {}
    groups = {client: replies[client].group(group) for client in replies}
    shares = client_weights(replies, weights)
    for client, tensors in groups.items():
        for name in tensors if shares[client] > 0 else ():
            holders.setdefault(name, []).append(client)
    everywhere = [client for client in groups if shares[client] > 0]
    if index is None and all(clients == everywhere for clients in holders.values()):
        return _common_mean(
            [groups[client] for client in everywhere], [shares[client] for client in everywhere]
        )
    if index is None:
        return {
            name: _mean([groups[client][name] for client in clients], [shares[client] for client in clients])
            for name, clients in holders.items()
        }
    return {
        name: _sliced_mean(
            (base or {})[name],
            [(groups[client][name], index[client].get(name), shares[client]) for client in clients],
        )
        for name, clients in holders.items()
    }


def client_weights(replies: Replies, weights: Weights) -> dict[str, float]:
    """What each client counts in a mean; not normalised."""
    if weights == "samples":
        return {client: float(replies.cards[client].samples) for client in replies}
    if weights == "uniform":
        return dict.fromkeys(replies, 1.0)
    assert not isinstance(weights, str)
    return {client: float(weights[client]) for client in replies}


def _common_mean(groups: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The mean of groups with the same names; all tensors of a client in one call."""
    if not groups or not groups[0]:
        return {}
    total, names = sum(weights), list(groups[0])
    means = torch._foreach_mul([groups[0][name] for name in names], weights[0] / total)
    for group, weight in zip(groups[1:], weights[1:], strict=True):
        torch._foreach_add_(means, [group[name] for name in names], alpha=weight / total)
    return dict(zip(names, means, strict=True))


def _mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum(weights)
    mean = tensors[0] * (weights[0] / total)
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        mean.add_(tensor, alpha=weight / total)
    return mean


def _sliced_mean(base: Tensor, pieces: Sequence[tuple[Tensor, Index | None, float]]) -> Tensor:
    """The mean of each entry over the slices that hold it."""
    total, count = torch.zeros_like(base), torch.zeros_like(base)
    for piece, index, weight in pieces:
        place = _place(index, base)
        total[place] += piece * weight
        count[place] += weight
    return torch.where(count > 0, total / count.clamp_min(torch.finfo(count.dtype).tiny), base)


def _place(index: Index | None, base: Tensor) -> tuple[Tensor | slice, ...]:
    """One index per dimension, shaped so that together they select a block; slices alone need no index."""
    full = [slice(None) if axis is None else axis for axis in index or (None,) * base.dim()]
    if all(isinstance(axis, slice) for axis in full):
        return tuple(full)
    axes = [
        torch.arange(size, device=base.device)[axis] if isinstance(axis, slice) else axis
        for axis, size in zip(full, base.shape, strict=True)
    ]
    return tuple(
        axis.view([-1 if d == place else 1 for d in range(base.dim())]) for place, axis in enumerate(axes)
    )


def take_slice(tensor: Tensor, index: Index | None) -> Tensor:
    """The entries an index selects: what a client with a slice receives."""
    return tensor[_place(index, tensor)].clone()


def put_slice(tensor: Tensor, index: Index | None, piece: Tensor) -> Tensor:
    """The tensor with a piece written where an index says; it is changed in place."""
    tensor[_place(index, tensor)] = piece
    return tensor


def nested_index(full: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Index]:
    """The index of a client whose tensors are the first entries of the full ones along every dimension.

    >>> index = nested_index({"w": torch.arange(6.0).view(2, 3)}, {"w": (2, 2)})
    >>> take_slice(torch.arange(6.0).view(2, 3), index["w"])
    tensor([[0., 1.],
            [3., 4.]])
    """
    return {
        name: tuple(
            None if own == size else torch.arange(own, device=full[name].device)
            for own, size in zip(shape, full[name].shape, strict=True)
        )
        for name, shape in shapes.items()
    }
