"""What models say of public samples: scores or representations by public row, on a client or on the server.

Public samples are named by their row in `Public`, which is the same on every side. A sample that a side has not got
in its modality is never learned from; where a message has a place for it, that place holds zeros.
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
from potluck.core.task import Batch
from potluck.errors import ConfigError
from potluck.training.collect import collect
from potluck.training.modes import still_statistics
from potluck.training.plan import rows_on


class OnPublicData(Method):
    """A method whose clients meet on public data; `P` in its shape formulas is the number of public samples."""

    needs_public_data = True
    public_size: int

    def check(self, population: Population) -> None:
        """There must be public data."""
        self.public_size = len(public_of(population))

    def symbols(self, card: Card) -> dict[str, int]:
        """P beside what a card tells."""
        return super().symbols(card) | {"P": self.public_size}


def public_of(population: Population) -> Public:
    """The public data of a population, or a sentence."""
    public = population.public()
    if public is None:
        raise ConfigError(f"{population.method_name} needs public data, and there is none here")
    return public


def readable(population: Population) -> dict[ClientId, np.ndarray]:
    """Which public samples each client has, on the host: what a step may ask without waiting for the device."""
    masks = {
        id(view): view.mask.cpu().numpy() for view in map(population.public, population.first_clients) if view
    }
    return {client: masks[id(population.public(client))] for client in population.ids}


def within(population: Population, option: str, value: int | None, usual: int) -> int:
    """How many public samples an option asks for; None is the usual number, or all where there are fewer."""
    public = public_of(population)
    if value is None:
        return min(usual, len(public))
    public.check_batch(value, f"method.{option}")
    return value


def drawn_rows(public: Public, round_: int, samples: int) -> np.ndarray:
    """So many public rows, drawn for a round from the shared seed: the same on every side."""
    return public.order(round_, samples)[0]


def public_stream(
    holder: Holder, rows: np.ndarray, batch_size: int, epochs: int, purpose: str, last: LastBatch = "keep"
) -> Stream:
    """Some public rows in batches, in an order of the holder's own; a single one left over is left out."""
    order = shuffled_batches(rows, batch_size, epochs, last, holder.rng.child(purpose))
    return Stream(holder.public.source, several_each(order))


def read_public(holder: Holder, function: Callable[[Batch], Tensor], rows: np.ndarray) -> Tensor:
    """What a function says of public rows, in evaluation mode and without gradients."""
    parts: list[Any] = collect(cast(Client, holder), function, rows=rows, source=holder.public.source)
    return torch.cat(parts)


def scores(holder: Holder, rows: np.ndarray, part: str = "model") -> Tensor:
    """The logits of public rows."""
    return read_public(holder, lambda batch: holder[part](batch.x).float(), rows)


def representations(holder: Holder, rows: np.ndarray, unit: bool = False, part: str = "model") -> Tensor:
    """The representations of public rows, perhaps brought to length 1; zero where a sample is missing."""

    def read(batch: Batch) -> Tensor:
        z = holder[part].features(batch.x).float()
        z = F.normalize(z, dim=1) if unit else z
        return z * holder.public.mask[batch.id].unsqueeze(1)

    return read_public(holder, read, rows)


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
    """Values of some public rows in a table of all: `table[batch.id]` finds them; the others are zero."""
    table = values.new_zeros(len(holder.public), *values.shape[1:])
    return table.index_copy_(0, rows_on(rows, holder.device), values)


def mean_where(values: Tensor, weight: Tensor) -> Tensor:
    """The mean of one value per sample over the samples that count; zero, also its gradient, where none does."""
    weight = weight.to(values.dtype)
    return (values * weight).sum() / weight.sum().clamp_min(1e-12)


def plain_mean(replies: Replies, name: str) -> Tensor:
    """The unweighted mean over the clients of one tensor each sent."""
    total: Tensor = functools.reduce(operator.add, (message[name] for message in replies.values()))
    return total / len(replies)
