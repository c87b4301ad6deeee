"""What models say about public samples: scores or representations by row, on a client or on the server.

A public sample is named by its row in `Public`, which is the same on every side. A side never learns from a sample
that it lacks in its modality; where a message has a place for the sample, the place holds zeros.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.method import Method
from potluck.core.population import Population
from potluck.core.public import Public
from potluck.core.replies import Replies
from potluck.core.settings import LastBatch
from potluck.core.state import Holder
from potluck.core.streams import Stream, several_each, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.training.collect import collect
from potluck.training.modes import still_statistics
from potluck.training.plan import rows_on


class OnPublicData(Method):
    """The base of methods that exchange something about public samples; shape formulas call their number `P`."""

    needs_public_data = True
    public_size: int

    def setup(self, population: Population) -> None:
        """Count the public samples."""
        self.public_size = len(public_of(population))

    def symbols(self, card: Card) -> dict[str, int]:
        """What a card tells, and P, the number of public samples."""
        return super().symbols(card) | {"P": self.public_size}


def public_of(population: Population) -> Public:
    """The public data of a population; refuses a population without any."""
    public = population.public()
    if public is None:
        raise ConfigError(
            f"{population.method_name} needs public data, and there is none here; name some, such as public: "
            "{data: cifar100, samples: 5000}, or choose a method that needs none, such as fedmrl"
        )
    return public


def public_samples(population: Population, asked: int | None, usual: int) -> int:
    """How many public samples to take: as asked; by default the usual number, or all if there are fewer."""
    return min(usual, len(public_of(population))) if asked is None else asked


def require_public_samples(population: Population, option: str, asked: int | None) -> None:
    """Refuse an option that asks for more public samples than there are."""
    if asked is not None:
        public_of(population).check_batch(asked, f"method.{option}")


def available_samples(population: Population) -> dict[ClientId, np.ndarray]:
    """Which public samples each client has; on the host, so a step can ask without waiting for the device."""
    masks = {
        id(view): view.mask.cpu().numpy() for view in map(population.public, population.first_clients) if view
    }
    return {client: masks[id(population.public(client))] for client in population.ids}


MODALITIES = ("image", "pair", "text", "vector", "window")  # all that `modality` can say


def modality(task: Task) -> str:
    """What a client with this task sees of a public sample: an image, text, pair of both, window or vector."""
    kinds = {"text-classification": "text", "retrieval": "pair"}
    axes = {1: "vector", 2: "window"}
    return kinds.get(task.kind, axes.get(len(task.input), "image"))


def drawn_rows(public: Public, round_: int, samples: int) -> np.ndarray:
    """So many public rows, drawn for a round from the shared seed: the same on every side."""
    return public.order(round_, samples)[0]


def public_stream(
    holder: Holder, rows: np.ndarray, batch_size: int, epochs: int, purpose: str, last: LastBatch = "keep"
) -> Stream:
    """Batches of some public rows in the holder's own order; a last batch of one sample is left out."""
    order = shuffled_batches(rows, batch_size, epochs, last, holder.rng.child(purpose))
    return Stream(holder.public.source, several_each(order))


def scores(holder: Holder, rows: np.ndarray | None = None, part: str = "model") -> Tensor:
    """The logits of public rows, by default of all."""
    return _read(holder, lambda batch: holder[part](batch.x).float(), rows)


def representations(holder: Holder, rows: np.ndarray | None = None, unit: bool = False) -> Tensor:
    """The representations of public rows, by default of all; of length 1 with `unit`; zero for a missing sample."""

    def read(batch: Batch) -> Tensor:
        z = holder["model"].features(batch.x).float()
        z = F.normalize(z, dim=1) if unit else z
        return z * holder.public.mask[batch.id].unsqueeze(1)

    return _read(holder, read, rows)


def _read(holder: Holder, function: Callable[[Batch], Tensor], rows: np.ndarray | None) -> Tensor:
    """The function of public rows, in evaluation mode and without gradients."""
    rows = np.arange(len(holder.public)) if rows is None else rows
    parts: list[Any] = collect(cast(Client, holder), function, rows=rows, source=holder.public.source)
    return torch.cat(parts)


def foreign_features(holder: Holder, batch: Batch) -> Tensor:
    """The representations of a public batch in a training step; batch norm does not remember its statistics."""
    with still_statistics(holder["model"].content):
        z: Tensor = holder["model"].features(batch.x)
    return z.float()


def rows_of(batch: Batch) -> Tensor:
    """The public rows of a batch."""
    assert batch.id is not None
    return batch.id


def by_row(holder: Holder, rows: np.ndarray, values: Tensor) -> Tensor:
    """A table of all public rows, read as `table[batch.id]`, from the values of some; the others are zero."""
    table = values.new_zeros(len(holder.public), *values.shape[1:])
    return table.index_copy_(0, rows_on(rows, holder.device), values)


def plain_mean(replies: Replies, name: str) -> Tensor:
    """The unweighted mean over the clients of one tensor that each sent."""
    total: Tensor = functools.reduce(operator.add, (message[name] for message in replies.values()))
    return total / len(replies)
