"""What clients see of their rows: filled and standardised by their training rows, and with their feature shift."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.data.client_splits import ClientSplit, ClientSplits
from potluck.data.filling import Filling
from potluck.data.scaling import Scaling
from potluck.data.split import Split


def with_views(split: Split, data: Dataset) -> Split:
    """The split whose clients know how to fill and standardise their samples, where the data set asks for it."""
    if not data.standardize and not data.filled:
        return split
    return replace(split, clients=ClientSplits.of(_with_view(data, one) for one in split.clients))


def _with_view(data: Dataset, client: ClientSplit) -> ClientSplit:
    """By the client's training rows; a held-out client may only have others."""
    rows = client.train if len(client.train) else np.concatenate(client.parts)
    if not len(rows):
        return client
    x, filling, scaling = data.x[torch.from_numpy(rows)], client.filling, client.scaling
    if data.filled:
        filling = filling or Filling.of(x, data.filled)
        x = filling(x)
    if data.standardize:
        scaling = scaling or Scaling.of(x, data.standardize)
    return replace(client, filling=filling, scaling=scaling)


def client_samples(data: Dataset, clients: ClientSplits) -> Tensor | None:
    """All samples, each as its client sees it; none where everyone sees them as they are stored."""
    if not len(data) or not clients.changes:
        return None
    x = data.x.clone()
    for client in clients:
        rows = torch.from_numpy(np.sort(np.concatenate(client.parts)))
        if len(rows):
            x[rows] = client.sees(data.x[rows])
    return x
