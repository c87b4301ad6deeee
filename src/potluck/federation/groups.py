"""Groups of clients: a data set each, and how its samples are prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.core.dataset import Dataset
from potluck.core.streams import Prepare
from potluck.data import ClientSplit


@dataclass(frozen=True)
class GroupData:
    """What a group of clients works on: a data set, which is also their task, and its preparation."""

    data: Dataset
    clients: int  # how many, in the order of the split
    prepare: Prepare | None = None
    augmented: bool = True


def shared_test(data: Dataset, clients: Sequence[ClientSplit]) -> np.ndarray:
    """The rows of the test set that clients share: the official one, or else their own test parts together.

    Where clients have their own rows or their own view of them, a row of nobody in the split is not measured: it
    would be seen as no client sees it.
    """
    official = np.arange(data.test_start, len(data.y))
    if not len(data):
        return official
    trained, owned = np.zeros(len(data.y), dtype=bool), np.zeros(len(data.y), dtype=bool)
    for client in clients:
        trained[client.train] = True
        owned[np.concatenate(client.parts)] = True
    own = np.sort(np.concatenate([client.test for client in clients]))
    if data.owners is not None or any(client.view for client in clients):
        official = official[owned[official]]
    if not len(official) or trained[official].any():
        return own
    return official if data.owners is None else np.union1d(official, own)
