"""The rows of every client, in one array: a client is an object only while somebody looks at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
from torch import Tensor

from potluck.data.filling import Filling
from potluck.data.partition import Rows
from potluck.data.scaling import Scaling
from potluck.data.shift import Shift

PARTS: tuple[Literal["train"], Literal["validation"], Literal["test"]] = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class ClientSplit:
    """One client's rows: ascending int64 row numbers of the data set."""

    id: str
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    _: KW_ONLY
    shift: Shift | None = None  # what its samples go through; none: they stay as they are
    scaling: Scaling | None = None  # how it standardises them before that; follows from data and rows
    filling: Filling | None = (
        None  # what it puts where a number is missing, before all; follows from them too
    )

    @property
    def view(self) -> dict[str, Any]:
        """Shift, scaling and filling as plain values, where there are any; `view_of` reads them."""
        return {key: value.to_json() for key, value in self.changes.items()}

    @property
    def changes(self) -> dict[str, Any]:
        """Shift, scaling and filling, where there are any."""
        own = {"shift": self.shift, "scaling": self.scaling, "filling": self.filling}
        return {key: value for key, value in own.items() if value}

    def sees(self, x: Tensor) -> Tensor:
        """Stored samples as this client sees them."""
        for change in (self.filling, self.scaling, self.shift):
            x = x if change is None else change(x)
        return x

    @property
    def parts(self) -> Rows:
        """Training, validation and test rows."""
        return self.train, self.validation, self.test


@dataclass(frozen=True, eq=False)
class ClientSplits(Sequence[ClientSplit]):
    """The rows of many clients. It reads like a list of `ClientSplit`, each made when it is asked for."""

    ids: tuple[str, ...]
    rows: np.ndarray  # client by client, each with its training, validation and test rows
    sizes: np.ndarray  # (clients, 3): how many rows each part has
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # of clients with a view, by place

    @classmethod
    def of(cls, clients: Iterable[ClientSplit]) -> ClientSplits:
        """Put clients together."""
        if isinstance(clients, ClientSplits):
            return clients
        clients = tuple(clients)
        parts = [part for client in clients for part in client.parts]
        sizes = np.array([len(part) for part in parts], dtype=np.int64).reshape(-1, len(PARTS))
        rows = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False)
        changes = {place: client.changes for place, client in enumerate(clients) if client.changes}
        return cls(tuple(client.id for client in clients), rows, sizes, changes)

    @classmethod
    def dealt(cls, ids: Iterable[str], owner: np.ndarray, part: np.ndarray, rows: np.ndarray) -> ClientSplits:
        """From lists of equal length: whose row it is (by place, -1: nobody's), of which part, and its number."""
        ids, mine = tuple(ids), owner >= 0
        cells = owner[mine] * len(PARTS) + part[mine]
        sizes = np.bincount(cells, minlength=len(PARTS) * len(ids)).reshape(-1, len(PARTS))
        span = int(rows.max(initial=0)) + 1
        return cls(ids, np.sort(cells * span + rows[mine]) % span, sizes)

    @overload
    def __getitem__(self, place: int) -> ClientSplit: ...

    @overload
    def __getitem__(self, place: slice) -> ClientSplits: ...

    def __getitem__(self, place: int | slice) -> ClientSplit | ClientSplits:
        if isinstance(place, slice):
            return self._some(range(len(self))[place])
        place = range(len(self))[place]
        start, low, high, end = self._bounds[3 * place : 3 * place + 4].tolist()
        rows, changes = self.rows, self.changes.get(place, {})
        return ClientSplit(self.ids[place], rows[start:low], rows[low:high], rows[high:end], **changes)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[ClientSplit]:
        return (self[place] for place in range(len(self)))

    def _some(self, places: range) -> ClientSplits:
        if places.step != 1:
            return ClientSplits.of(tuple(self[place] for place in places))
        if len(places) == len(self):
            return self
        start, stop = places.start, max(places.start, places.stop)
        rows = self.rows[self._bounds[3 * start] : self._bounds[3 * stop]]
        changes = {place - start: self.changes[place] for place in places if place in self.changes}
        return ClientSplits(self.ids[start:stop], rows, self.sizes[start:stop], changes)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """Where each part of each client begins; one longer than the parts."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each client in the order, by its id."""
        return {id: place for place, id in enumerate(self.ids)}

    def part(self, name: Literal["train", "validation", "test"]) -> tuple[np.ndarray, np.ndarray]:
        """All rows of one part, and the place of the client that has each."""
        place = PARTS.index(name)
        kind = np.repeat(np.tile(np.arange(len(PARTS), dtype=np.int8), len(self)), self.sizes.ravel())
        return self.rows[kind == place], np.repeat(np.arange(len(self)), self.sizes[:, place])

    def row_lists(self, block: int = 4096) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """The three parts of each client as lists, made some clients at a time."""
        for begin in range(0, len(self), block):
            bounds = self._bounds[3 * begin : 3 * min(begin + block, len(self)) + 1]
            rows, ends = self.rows[bounds[0] : bounds[-1]].tolist(), (bounds - bounds[0]).tolist()
            for at in range(0, len(ends) - 1, 3):
                start, low, high, end = ends[at : at + 4]
                yield rows[start:low], rows[low:high], rows[high:end]
