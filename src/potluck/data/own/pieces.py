"""A user's data set, put together from pieces: the rows that one client, or all of them, bring for one part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Owners
from potluck.errors import DataError

Array = np.ndarray | Tensor | Sequence[Any]
PART_NAMES = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class Piece:
    """Rows of one part, and who brings them: one client, a value per row, or nobody in particular."""

    where: str  # as an error names it
    x: Any
    y: Any
    part: str = "train"  # or validation, or test
    client: str | None = None
    clients: Array | None = None

    def owners(self) -> np.ndarray | None:
        """The client of every row as text or number."""
        if self.client is not None:
            return np.full(len(self.y), self.client, dtype=object)
        if self.clients is None:
            return None
        values = np.array(self.clients)
        if values.shape != (len(self.y),):
            raise DataError(f"{self.where}: clients must be one name per row ({len(self.y)} rows)")
        # As numpy makes the text "nan" of a missing value among texts, and "1" of 1, look at what was given.
        given = list(self.clients) if isinstance(self.clients, list | tuple) else values.tolist()
        missing = [_is_missing(value) for value in given]
        if any(missing):
            raise DataError(f"{self.where}: row {missing.index(True)} names no client: give every row one")
        check_names(self.where, given)
        if values.dtype.kind == "f" and all(isinstance(value, int) for value in given):
            values = np.array(given, dtype=object)  # numpy makes 2⁶³ and 2⁶³ + 1 beside 1 the same float
        return values.astype(object)


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value)


def check_names(where: str, clients: Iterable[Any]) -> None:
    """Refuse a blank name, and a number and a text that would become one client, such as 1 and "1"."""
    seen: dict[str, bool] = {}
    for client in clients:
        if not str(client).strip():
            raise DataError(f"{where}: a client is called {client!r}: give it a name that can be seen")
        if seen.setdefault(str(client), isinstance(client, str)) != isinstance(client, str):
            raise DataError(
                f"{where}: the number {client} and the text {str(client)!r} would be one client: use one"
            )


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """All training rows first, then those for validation, then those for testing."""
    order = ("train", "validation", "test")
    return sorted(pieces, key=lambda piece: order.index(piece.part))


def rows_of(pieces: Sequence[Piece], part: str) -> int:
    """How many rows a part has."""
    return sum(len(piece.y) for piece in pieces if piece.part == part)


def own_rows_of(pieces: Sequence[Piece]) -> Tensor | None:
    """The number of each row in the piece that it comes from; none if there is only one piece."""
    return torch.cat([torch.arange(len(piece.y)) for piece in pieces]) if len(pieces) > 1 else None


def owners_of(pieces: Sequence[Piece], by: str | None) -> Owners | None:
    """Who brings each row: clients in the order they were given in, or those of a column sorted."""
    values = [piece.owners() for piece in pieces]
    known = [one for one in values if one is not None]
    if not known:
        return None
    if len(known) < len(values):
        lost = next(piece for piece, one in zip(pieces, values, strict=True) if one is None)
        raise DataError(f"{lost.where} names no clients, as the other parts do: give it as (x, y, clients)")
    everyone = np.concatenate(known).tolist()
    check_names(pieces[0].where, everyone)
    given = all(piece.client is not None for piece in pieces)
    texts = list(map(str, everyone))
    names = list(dict.fromkeys(texts if given else map(str, _sorted(everyone))))
    place = {name: number for number, name in enumerate(names)}
    return Owners(tuple(names), torch.tensor([place[name] for name in texts]), by)


def _sorted(values: list[Any]) -> list[Any]:
    numbers = all(isinstance(value, int | float) for value in values)
    return sorted(set(values) if numbers else set(map(str, values)))
