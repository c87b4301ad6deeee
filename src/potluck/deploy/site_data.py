"""Turns what a site's `--data` function returns into a data set, a split and public samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.data import Split, from_arrays
from potluck.data.client_splits import PARTS, ClientSplit
from potluck.data.views import with_views
from potluck.errors import ConfigError, DataError
from potluck.experiment.settings import ExperimentSettings

SPLIT_KEYS = ("train", "validation", "test")
ABOUT_KEYS = ("task", "mean", "std")


def site_data(value: Any, client: ClientId, classes: int | None) -> tuple[Dataset, Split]:
    """A site's data set and its split, from what its `load` function returned.

    `value` is a mapping with `train`, and perhaps `validation`, `test`, `task`, `mean`, `std` and `public`; or the
    training part alone. A part is a pair of arrays (x, y) or a map-style data set of such pairs. `data`, a
    `Dataset` of any task, may be given instead of `train` and `test`.
    """
    given = (
        value if isinstance(value, Mapping) else {"data" if isinstance(value, Dataset) else "train": value}
    )
    if isinstance(given.get("data"), Dataset) and set(given) <= {"data", "public"}:
        return _whole(given["data"], client)
    unknown = next((key for key in given if key not in (*SPLIT_KEYS, *ABOUT_KEYS, "public")), None)
    if unknown is not None or "train" not in given:
        raise DataError(
            f"client {client}: its data are {list(given)}; give train, validation, test, task, mean, std and "
            "public, or data and public"
        )
    parts = {key: _arrays(given[key], client, key) for key in SPLIT_KEYS if given.get(key) is not None}
    x, y = (np.concatenate([part[number] for part in parts.values()]) for number in (0, 1))
    about = {key: given[key] for key in ABOUT_KEYS if key in given}
    data = from_arrays(x, y, classes=classes, name=f"client {client}", **about)
    ends = np.cumsum([0, *(len(parts[key][1]) if key in parts else 0 for key in PARTS)])
    rows = {key: np.arange(ends[number], ends[number + 1]) for number, key in enumerate(PARTS)}
    return data, Split.of([ClientSplit(client, *rows.values())])


def _whole(data: Dataset, client: ClientId) -> tuple[Dataset, Split]:
    """A data set with its own validation and test parts; all other rows are training rows."""
    parts = np.split(np.arange(len(data.y)), [data.train_rows, data.test_start])
    return data, with_views(Split.of([ClientSplit(client, *parts)]), data)


def site_public(value: Any, experiment: ExperimentSettings, client: ClientId) -> Dataset:
    """A site's copy of the public samples: `public` in what its `load` returned, a `Dataset` or an array."""
    given = value.get("public") if isinstance(value, Mapping) else None
    if isinstance(given, Dataset):
        return given
    assert experiment.public is not None
    name = getattr(experiment.public.data, "name", "")
    if given is None:
        raise ConfigError(
            f"client {client}: {experiment.method.name} needs public data, those called {name!r}; give them as "
            "public in what --data loads"
        )
    return from_arrays(np.asarray(given), np.zeros(len(given), dtype="int64"), classes=2, name=name)


def _arrays(part: Any, client: ClientId, key: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        if isinstance(part, tuple) and len(part) == 2:
            x, y = part
        else:
            x, y = zip(*(part[row] for row in range(len(part))), strict=True)
            x, y = (np.stack([np.asarray(one) for one in each]) for each in (x, y))
            y = y.astype(np.int64) if y.dtype == bool and y.ndim == 1 else y
        return np.asarray(x), np.asarray(y)
    except Exception as error:  # the site's own code may raise anything
        raise DataError(
            f"client {client}: its {key} data cannot be read ({type(error).__name__}: {error}); give a pair of "
            "arrays (x, y), or a map-style data set of such pairs"
        ) from error
