"""Advice on the columns of a table: never measured at a client, the same in all its rows, or numbering them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.data import ClientSplit, Split
from potluck.federation.federation import Federation

MANY = 50  # rows: whole numbers that all differ in more of them look like the number of a patient
NAMED = 3  # columns that a sentence names


def column_advice(federation: Federation) -> Iterator[str]:
    """One sentence for each thing to know about the columns of the clients' tables."""
    groups = [(group.data, group.clients) for group in federation.clients.groups]
    if any(data.encoding is not None for data, _ in groups):
        for data, split in federation.split.by_group(groups):
            if data.encoding is not None and len(data):
                yield from _about(data, split)


def _about(data: Dataset, split: Split) -> Iterator[str]:
    empty = _by_client(data, split, lambda client: client.filling.empty if client.filling else [])
    if empty:
        yield (
            f"{_where(empty)} never measured, so it is 0 for this client, after standardising, and a value in a "
            "new row is passed over"
        )
    equal = _by_client(data, split, lambda client: _constant(data, client))
    if equal:
        yield (
            f"{_where(equal)} the same in all training rows, so it teaches nothing there, and another value in a "
            "new row is only centred, not scaled"
        )
    numbers = [data.encoding.names[column] for column in _row_numbers(data, split)] if data.encoding else []
    if numbers:
        yield (
            f"column {numbers[0]!r} of {data.name!r} holds another whole number in every row of a client; if it "
            "numbers patients or rows, leave it out of features"
        )


def _by_client(
    data: Dataset, split: Split, columns: Callable[[ClientSplit], list[int]]
) -> dict[str, list[str]]:
    """By client the names of some of its columns; clients without one are left out."""
    names = data.encoding.names if data.encoding is not None else ()
    found = {client.id: [names[column] for column in columns(client)] for client in split.clients}
    return {client: own for client, own in found.items() if own}


def _where(found: Mapping[str, list[str]]) -> str:
    """`column 'bmi' of client delta (and of 2 more clients) is`."""
    client, columns = next(iter(found.items()))
    more = f" (and columns of {len(found) - 1} more clients)" if len(found) > 1 else ""
    others = f" and {len(columns) - NAMED} more" if len(columns) > NAMED else ""
    named = ", ".join(map(repr, columns[:NAMED]))
    return f"{'each of the columns' if len(columns) > 1 else 'column'} {named}{others} of client {client}{more} is"


def _constant(data: Dataset, client: ClientSplit) -> list[int]:
    """The standardised columns with one value alone in the training rows; those never measured are left out."""
    x = _rows(data, client.train)[:, list(data.standardize)]
    if len(x) < 2 or client.scaling is None:
        return []
    empty = client.filling.empty if client.filling else []
    low, high = torch.where(x.isnan(), torch.inf, x).amin(0), torch.where(x.isnan(), -torch.inf, x).amax(0)
    same = (low == high).tolist()
    return [column for column, one in zip(data.standardize, same, strict=True) if one and column not in empty]


def _row_numbers(data: Dataset, split: Split) -> list[int]:
    """The standardised columns of whole numbers that differ from row to row, at every client."""
    if max((sum(map(len, client.parts)) for client in split.clients), default=0) <= MANY:
        return []
    every = [_rows(data, np.concatenate(client.parts))[:, list(data.standardize)] for client in split.clients]
    return [
        column
        for place, column in enumerate(data.standardize)
        if all(_all_different(x[:, place]) for x in every)
    ]


def _all_different(values: Tensor) -> bool:
    whole = bool((values == values.round()).all())  # NaN is no whole number
    return whole and len(np.unique(values.numpy())) == len(values)


def _rows(data: Dataset, rows: np.ndarray) -> Tensor:
    return data.x[torch.from_numpy(rows)]
