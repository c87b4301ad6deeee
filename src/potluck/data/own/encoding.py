"""How the columns of a table become numbers. A data set keeps it, so that new rows are read in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from potluck.errors import DataError, nearest

if TYPE_CHECKING:
    import pandas as pd

Missing = Literal["refuse", "mean"]


@dataclass(frozen=True)
class Column:
    """One column as numbers: one, or a 0 or 1 for each of its categories."""

    name: str
    categories: tuple[str, ...] | None = None
    scaled: bool = False  # whether clients may standardise it

    @property
    def names(self) -> list[str]:
        """What its numbers are called: `age`, or `sex=f` and `sex=m`."""
        return [self.name] if self.categories is None else [f"{self.name}={one}" for one in self.categories]

    def encode(self, where: str, frame: pd.DataFrame) -> np.ndarray:
        """The numbers of every row; NaN where a number is missing, only 0 where a category is."""
        if self.categories is None:
            return numbers(where, frame, [self.name])
        values, empty = frame[self.name].map(as_text).to_numpy(object), frame[self.name].isna().to_numpy()
        hot: np.ndarray = values[:, None] == np.array(self.categories, dtype=object)
        stray = np.flatnonzero(~hot.any(1) & ~empty)
        if len(stray):
            raise DataError(
                f"{where}: column {self.name!r} has {values[stray[0]]!r}, which is none of its categories: "
                f"{', '.join(self.categories)}; "
                "correct it, or add it to them"
            )
        return hot.astype(np.float32)


@dataclass(frozen=True)
class Encoding:
    """The columns that are learned from, in order, and what is done where a value is missing."""

    columns: tuple[Column, ...]
    missing: Missing = "refuse"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the numbers of a sample are called."""
        return tuple(name for column in self.columns for name in column.names)

    @property
    def filled(self) -> tuple[int, ...]:
        """The numbers of a sample that may be missing: every client fills them with its own mean."""
        return self._places([column.categories is None and self.missing == "mean" for column in self.columns])

    @property
    def scaled(self) -> tuple[int, ...]:
        """The numbers of a sample that clients may standardise."""
        return self._places([column.scaled for column in self.columns])

    def _places(self, chosen: Sequence[bool]) -> tuple[int, ...]:
        each = np.repeat(chosen, [len(column.names) for column in self.columns])
        return tuple(np.flatnonzero(each).tolist())

    def encode(self, frame: Any, where: str) -> np.ndarray:
        """The rows of a pandas frame as vectors; columns that are not learned from are left alone."""
        check_frame(where, frame)
        have = dict.fromkeys(column for column in frame.columns if isinstance(column, str))
        for column in self.columns:
            if column.name not in have:
                raise DataError(f"{where}: there is no column {column.name!r}; {nearest(column.name, have)}")
            check_missing(where, column.name, frame[column.name], self.missing)
        return np.concatenate([column.encode(where, frame) for column in self.columns], 1)

    def to_json(self) -> dict[str, Any]:
        """The encoding as plain values."""
        return {"columns": [asdict(column) for column in self.columns], "missing": self.missing}

    @classmethod
    def from_json(cls, value: Any) -> Encoding:
        """The inverse of `to_json`; a `ValueError` says what is wrong."""
        entries = value.get("columns") if isinstance(value, Mapping) else None
        if not isinstance(entries, list) or value.get("missing") not in get_args(Missing):
            raise ValueError("an encoding has columns, and refuses missing values or takes the mean")
        return cls(tuple(_column_of(entry) for entry in entries), value["missing"])


def _column_of(entry: Any) -> Column:
    known = isinstance(entry, Mapping) and set(entry) == {"name", "categories", "scaled"}
    if not known or not isinstance(entry["name"], str) or not isinstance(entry["scaled"], bool):
        raise ValueError("a column of an encoding has name, categories and scaled")
    categories = entry["categories"]
    if categories is None:
        return Column(entry["name"], None, entry["scaled"])
    if not isinstance(categories, list) or not all(isinstance(one, str) for one in categories):
        raise ValueError(f"the categories of column {entry['name']!r} are texts")
    return Column(entry["name"], tuple(categories), entry["scaled"])


def numbers(where: str, frame: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Columns of numbers; NaN where one is missing."""
    for column in columns:
        values = frame[column]
        if values.dtype.kind not in "biuf" and not values.isna().all():
            raise DataError(
                f"{where}: column {column!r} holds no numbers but {values.dtype}; "
                "turn it into numbers, or leave it out"
            )
    found: np.ndarray = frame[list(columns)].to_numpy(dtype=np.float32, na_value=np.nan)
    endless = np.argwhere(np.isinf(found))
    if len(endless):
        row, place = endless[0]
        raise DataError(
            f"{where}: column {columns[place]!r} holds an infinite value (row {row}): clean it first"
        )
    return found


def as_text(value: Any) -> str:
    """A class or category by name; 3.0 is written as 3."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def check_missing(where: str, column: str, values: Any, rule: Missing) -> None:
    """Refuse missing values where nobody fills them."""
    missing = int(values.isna().sum())
    if missing and rule == "refuse":
        raise DataError(
            f"{where}: column {column!r} lacks {missing} of {len(values)} values: fill them, or ask for "
            "missing='mean'"
        )


def check_frame(where: str, frame: Any) -> None:
    """Refuse what is not a table, or names a column twice."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{where}: this is a {type(frame).__name__}; give a pandas frame")
    twice = frame.columns[frame.columns.duplicated()].tolist()
    if twice:
        raise DataError(f"{where}: two columns are called {twice[0]!r}: rename one")
