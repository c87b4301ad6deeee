"""The natural split: every client has the rows that it brought."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, field_validator, model_validator

from potluck.core.dataset import Dataset, Owners
from potluck.core.rng import Rng
from potluck.core.settings import Strict
from potluck.data.partition import Fraction, Rows, check_shares, cut_client
from potluck.errors import DataError, nearest


class NaturalConfig(Strict):
    """Every client has the rows it brought: `{kind: natural}`, or by a column, `{kind: natural, by: hospital}`.

    A client's own validation and test rows stay what they are; where it brings none, a share of its training rows
    is cut off. Clients with fewer than `min_size` rows are left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["natural"] = "natural"
    by: str | None = None  # a column of the data set; none: the clients it was made of
    validation: Fraction = 0.0  # share of a client's rows, where it has no validation rows of its own
    test: Fraction = 0.25  # the same for test rows
    min_size: int = Field(default=1, ge=1)  # rows, all parts together
    held_out: int | float | tuple[str, ...] = 0  # clients that never train: a number, a share or names

    @field_validator("held_out", mode="before")
    @classmethod
    def _names_as_text(cls, value: Any) -> Any:
        """One name, or a list of names, which YAML may read as numbers."""
        names = [value] if isinstance(value, str) else value
        return tuple(map(str, names)) if isinstance(names, list | tuple) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_shares(self.validation, self.test)
        if not isinstance(self.held_out, tuple) and not (
            self.held_out >= 0 and (isinstance(self.held_out, int) or self.held_out < 1)
        ):
            raise ValueError(f"held_out is {self.held_out}: give a number, a fraction below 1, or names")
        return self


def natural_rows(data: Dataset, config: NaturalConfig, rng: Rng) -> dict[str, Rows]:
    """The training, validation and test rows of every client that has enough."""
    owners = _owners(data, config)
    rows = np.argsort(owners.rows.numpy(), kind="stable")
    bounds = np.cumsum(np.bincount(owners.rows.numpy(), minlength=len(owners.names)))[:-1]
    everyone = dict(zip(owners.names, np.split(rows, bounds), strict=True))
    found = {
        name: _parts(data, mine, config, rng.child("natural", name))
        for name, mine in everyone.items()
        if len(mine) >= config.min_size
    }
    if not found:
        raise DataError(f"no client of data set {data.name!r} has {config.min_size} rows: lower min_size")
    return found


def _owners(data: Dataset, config: NaturalConfig) -> Owners:
    if data.owners is None and config.by is not None and data.encoding is not None:
        raise DataError(
            f"data set {data.name!r} was read without its column of clients: name it where the table is read, "
            f"from_frame(…, by={config.by!r}) or from_files(…, by={config.by!r})"
        )
    if data.owners is None and config.by is not None:
        raise DataError(
            f"data set {data.name!r} has no column {config.by!r} that says which client a row comes from: leave "
            "out by, and choose another kind of partition"
        )
    if data.owners is None:
        raise DataError(
            f"data set {data.name!r} does not say which client a row comes from: name a column (by), give a "
            "data set or file for each client, or choose another kind of partition"
        )
    if config.by not in (None, data.owners.by):
        known = "leave out by" if data.owners.by is None else f"write by: {data.owners.by}"
        raise DataError(f"data set {data.name!r} cannot be split by {config.by!r}; {known}")
    return data.owners


def _parts(data: Dataset, mine: np.ndarray, config: NaturalConfig, rng: Rng) -> Rows:
    train, validation, test = np.split(mine, np.searchsorted(mine, [data.train_rows, data.test_start]))
    cut = cut_client(
        rng.numpy().permutation(train),
        0.0 if len(validation) else config.validation,
        0.0 if len(test) else config.test,
    )
    return cut[0], validation if len(validation) else cut[1], test if len(test) else cut[2]


def natural_held_out(config: NaturalConfig, parts: dict[str, Rows], rng: Rng) -> list[str]:
    """The held-out clients; all others must have training rows."""
    names, asked = list(parts), config.held_out
    if isinstance(asked, tuple):
        stray = next((name for name in asked if name not in parts), None)
        if stray is not None:
            raise DataError(
                f"partition.held_out names {stray!r}, which is not a client: {nearest(stray, names)}"
            )
        chosen = [name for name in names if name in asked]
    else:
        number = round(asked * len(names)) if isinstance(asked, float) else asked
        number = min(number, len(names))
        chosen = [names[place] for place in sorted(rng.numpy().choice(len(names), number, replace=False))]
    if len(chosen) == len(names):
        raise DataError(f"held_out {asked} of {len(names)} clients leaves none to train: hold out fewer")
    empty = next((name for name in names if not len(parts[name][0]) and name not in chosen), None)
    if empty is not None:
        raise DataError(f"client {empty!r} has no training rows: give it some, or name it in held_out")
    return chosen
