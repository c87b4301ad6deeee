"""Class means: a sum and a count per class, gathered on clients and merged on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.replies import Replies


class ClassStats:
    """Sums of vectors by class.

    >>> stats = ClassStats(3, 2)
    >>> stats.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 2]))
    >>> stats.means([2])
    tensor([[2., 3.]])
    """

    def __init__(self, classes: int, width: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(classes, width, device=device)
        self.counts = torch.zeros(classes, device=device)

    @classmethod
    def into(cls, sums: Tensor, counts: Tensor) -> ClassStats:
        """Gather from zero into tensors of the declared state, where a captured step can write every time."""
        stats = cls(0, 0, sums.device)
        stats.sums, stats.counts = sums.zero_(), counts.zero_()
        return stats

    def add(self, vectors: Tensor, y: Tensor) -> None:
        """Add a batch."""
        self.sums.index_add_(0, y, vectors.detach().to(self.sums.dtype))
        self.counts.index_add_(0, y, torch.ones_like(y, dtype=self.counts.dtype))

    def means(self, classes: Sequence[int] | None = None) -> Tensor:
        """The mean vector of the given classes (default: all; zero for a class never seen)."""
        means = self.sums / self.counts.clamp_min(1).unsqueeze(1)
        return means if classes is None else means[self._index(classes)]

    def _index(self, classes: Sequence[int]) -> Tensor:
        return torch.tensor(list(classes), dtype=torch.long).to(self.sums.device, non_blocking=True)


def class_counts(client: Client) -> Tensor:
    """How many training samples of each class a client has."""
    y = client.source.y.index_select(0, client.numbers(client.rows["train"].tolist()))
    return torch.zeros(client.task.classes, device=y.device).index_add_(
        0, y, torch.ones(len(y), device=y.device)
    )


def merge_classes(
    replies: Replies,
    vectors: str,
    classes: int,
    weights: Literal["uniform", "count"] = "uniform",
    label: str = "classes",
    counts: str = "counts",
) -> tuple[Tensor, Tensor]:
    """The mean vector of each class over the clients that hold it, and which classes anyone holds.

    `uniform` gives every holder one vote, `count` weighs a holder by its samples of the class. Where counts were
    sent, a client that counted 0 samples of a class is no holder of it.
    """
    total: Tensor | None = None
    for client in replies:
        y, rows = _weighed(replies[client], vectors, weights, label, counts)
        if total is None:
            total = torch.zeros(classes, rows.shape[1], device=rows.device)
        total.index_add_(0, y, rows)
    if total is None:
        raise ValueError("there are no replies to merge")
    return means_of(total)


def class_sums(
    replies: Replies, vectors: str, classes: int, weights: Literal["uniform", "count"] = "uniform"
) -> dict[str, Tensor]:
    """What each client adds to the merged means: a row per class, its vector times its weight, then the weight."""
    return {
        client: rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)
        for client, message in replies.items()
        for y, rows in [_weighed(message, vectors, weights)]
    }


def means_of(sums: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each class from sums whose last column is the weight, and which classes have any weight."""
    mass = sums[:, -1:]
    return sums[:, :-1] / mass.clamp_min(torch.finfo(mass.dtype).tiny), mass.squeeze(1) > 0


def _weighed(
    message: Message,
    vectors: str,
    weights: Literal["uniform", "count"],
    label: str = "classes",
    counts: str = "counts",
) -> tuple[Tensor, Tensor]:
    """The classes of a message, and for each its vector times its weight, then the weight."""
    rows, y = message[vectors], message[label]
    counted = weights == "count" or counts in message
    weight = message[counts] if counted else torch.ones(len(y), device=rows.device)
    if weights == "uniform":
        weight = (weight > 0).to(rows.dtype)
    return y, torch.cat([rows * weight.unsqueeze(1), weight.unsqueeze(1)], dim=1)
