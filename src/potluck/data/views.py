"""What a client sees of its rows: standardised by its own training rows, and with its feature shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.data.split import ClientSplit


def client_view(data: Dataset, client: ClientSplit) -> Callable[[Tensor], Tensor] | None:
    """What turns stored samples into those of a client; none where it sees them as they are stored."""
    shift = client.shift
    if not data.standardize:
        return shift
    columns, (mean, std) = list(data.standardize), _statistics(data, client)

    def seen(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, columns] = (x[:, columns] - mean) / std
        return x if shift is None else shift(x)

    return seen


def _statistics(data: Dataset, client: ClientSplit) -> tuple[Tensor, Tensor]:
    """Mean and deviation of a client's training rows; a column without spread is only centred."""
    rows = client.train if len(client.train) else np.concatenate(client.parts)
    values = data.x[torch.from_numpy(rows)][:, list(data.standardize)].double()
    std = values.std(0, correction=0)
    return values.mean(0).float(), torch.where(std > 1e-12, std, 1.0).float()


def client_samples(data: Dataset, clients: Sequence[ClientSplit]) -> Tensor | None:
    """All samples, each as its client sees it; none where everyone sees them as they are stored."""
    views = [client_view(data, client) for client in clients] if len(data) else []
    if not any(views):
        return None
    x = data.x.clone()
    for client, view in zip(clients, views, strict=True):
        rows = torch.from_numpy(np.sort(np.concatenate(client.parts)))
        if view is not None and len(rows):
            x[rows] = view(data.x[rows])
    return x
