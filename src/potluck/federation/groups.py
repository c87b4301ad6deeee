"""Groups of clients: a data set each, and how its samples are prepared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.core.dataset import Dataset
from potluck.core.streams import Prepare
from potluck.data.client_splits import ClientSplits


@dataclass(frozen=True)
class GroupData:
    """What a group of clients works on: a data set, which is also their task, and its preparation."""

    data: Dataset
    clients: int  # how many, in the order of the split
    prepare: Prepare | None = None
    augmented: bool = True


def shared_test(data: Dataset, clients: ClientSplits) -> np.ndarray:
    """The rows of the test set that clients share: the official one, or else their own test parts together.

    Where clients have their own rows or their own view of them, a row of nobody in the split is not measured: it
    would be seen as no client sees it.
    """
    official = np.arange(data.test_start, len(data.y))
    if not len(data):
        return official
    trained, owned = np.zeros(len(data.y), dtype=bool), np.zeros(len(data.y), dtype=bool)
    trained[clients.part("train")[0]] = True
    owned[clients.rows] = True
    own = np.sort(clients.part("test")[0])
    if data.owners is not None or clients.changes:
        official = official[owned[official]]
    if not len(official) or trained[official].any():
        return own
    return official if data.owners is None else np.union1d(official, own)
