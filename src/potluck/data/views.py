"""What clients see of their rows: standardised by their own training rows, and with their feature shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.data.scaling import Scaling
from potluck.data.split import ClientSplit, Split


def with_scaling(split: Split, data: Dataset) -> Split:
    """The split whose clients know how to standardise their samples, where the data set asks for it."""
    if not data.standardize:
        return split
    clients = tuple(
        one if one.scaling else replace(one, scaling=_scaling(data, one)) for one in split.clients
    )
    return replace(split, clients=clients)


def _scaling(data: Dataset, client: ClientSplit) -> Scaling | None:
    """By the client's training rows; a held-out client may only have others."""
    rows = client.train if len(client.train) else np.concatenate(client.parts)
    return Scaling.of(data, rows) if len(rows) else None


def client_samples(data: Dataset, clients: Sequence[ClientSplit]) -> Tensor | None:
    """All samples, each as its client sees it; none where everyone sees them as they are stored."""
    if not len(data) or not any(client.shift or client.scaling for client in clients):
        return None
    x = data.x.clone()
    for client in clients:
        rows = torch.from_numpy(np.sort(np.concatenate(client.parts)))
        if len(rows):
            x[rows] = client.sees(data.x[rows])
    return x
