"""Tables as data sets: pandas frames, one per client or one with a column that names the clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from potluck.core.dataset import Dataset
from potluck.data.own.arrays import Settings, TaskName, check_class_names, check_classes_repeat, from_pieces
from potluck.data.own.datasets import Found, pieces_of
from potluck.data.own.encoding import (
    Column,
    Encoding,
    Missing,
    as_text,
    check_frame,
    check_missing,
    numbers,
)
from potluck.data.own.pieces import Piece
from potluck.errors import DataError, first_twice, nearest
from potluck.front_door import front_door

if TYPE_CHECKING:
    import pandas as pd

    Frame = pd.DataFrame
    Values = pd.Series[Any]

Categories = str | Sequence[str] | Mapping[str, Sequence[Any]]
Standardize = Literal["client", "none"]
MOST_CATEGORIES = 100  # more of them look like names or free text
DATE = re.compile(r"\s*\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\s*\d{1,2}[/.]\d{1,2}[/.]\d{4}")
LONGEST_TEXT = 1_000  # letters


@front_door(DataError, apart=("by",))
def from_frame(
    frames: Any,
    *,
    target: str | Sequence[str],
    task: TaskName | None = None,
    features: Sequence[str] | None = None,
    categorical: Categories = "auto",
    by: str | None = None,
    missing: Missing = "refuse",
    standardize: Standardize = "client",
    class_names: Sequence[str] | None = None,
    name: str = "frame",
) -> Dataset:
    """A data set of vectors from pandas frames: one, one per client, or `{"north": {"train": …, "test": …}, …}`.

    `target` names the column to predict (several for multi-label and for regression with several outputs); a text
    or a truth value is a class, a number with a point is regressed, and for whole numbers `task` must say which.
    `by` names the column of one frame whose value is the client. All other columns are `features`, unless named.

    Text columns are one-hot. `categorical` may list such columns, or give the categories of each, `{"sex": ["f",
    "m"]}`: at real sites they must be given, as no site sees the values of the others. With `missing="mean"` every
    client fills a number with the mean of its own training rows, and a category stays without a one; until then `x`
    holds NaN. A number that a client never measured is 0 there. `standardize="client"` lets every client subtract
    the mean and divide by the deviation of its own training rows; one-hot columns stay 0 and 1.
    """
    asked = Table(target, task, features, categorical, by, missing, standardize, class_names, name)
    return asked.read(pieces_of(frames, name))


@dataclass(frozen=True)
class Table:
    """How tables are read; see `from_frame`."""

    target: str | Sequence[str]
    task: TaskName | None
    features: Sequence[str] | None
    categorical: Categories
    by: str | None
    missing: Missing
    standardize: Standardize
    class_names: Sequence[str] | None
    name: str

    def __post_init__(self) -> None:
        for key, allowed in (("missing", Missing), ("standardize", Standardize)):
            value = getattr(self, key)
            if value not in get_args(allowed):
                raise DataError(f"{self.name}: {key} is {value!r}; choose {' or '.join(get_args(allowed))}")
        self._check_names("target", self.target)
        if self.features is not None:
            self._check_names("features", self.features)
        if self.by is not None and not isinstance(self.by, str):
            raise DataError(f"{self.name}: by: give the name of a column, not {self.by!r}")
        if self.by in self.targets:
            raise DataError(f"{self.name}: {self.by!r} is target and by; name two different columns")
        if not isinstance(self.categorical, str | Mapping):
            self._check_names("categorical", self.categorical, empty=True)
        for column, values in self.categorical.items() if isinstance(self.categorical, Mapping) else ():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise DataError(
                    f"{self.name}: categorical.{column}: give a list of categories, not {values!r}"
                )
        check_class_names(self.name, self.class_names)

    def _check_names(self, key: str, given: Any, empty: bool = False) -> None:
        """Refuse what is neither the name of a column nor a list of such names, each once."""
        names: list[Any] = _as_list(given) if isinstance(given, Iterable) else [None]
        if not all(isinstance(one, str) for one in names) or not (names or empty):
            raise DataError(
                f"{self.name}: {key}: give the name of a column, or a list of names, not {given!r}"
            )
        if (twice := first_twice(names)) is not None:
            raise DataError(f"{self.name}: {key} names {twice!r} twice; name each column once")

    @property
    def targets(self) -> list[str]:
        """The columns to predict."""
        return _as_list(self.target)

    @property
    def declared(self) -> list[str]:
        """The columns that are said to be categories."""
        return [] if self.categorical == "auto" else _as_list(self.categorical)

    def read(self, found: Sequence[Found]) -> Dataset:
        """The data set of all tables."""
        for client, _, where, frame in found:
            check_frame(where, frame)
            odd = next((column for column in frame.columns if not isinstance(column, str)), None)
            if odd is not None:
                raise DataError(
                    f"{where}: the column {odd!r} is not called by a text: rename the columns, "
                    "frame.rename(columns=str)"
                )
            if not len(frame):
                raise DataError(f"{where}: there is no row in it; give rows, or leave this table out")
            if self.by is not None and client is not None:
                raise DataError(f"{where}: the clients are given one by one: leave out by")
        tables = [(where, frame) for _, _, where, frame in found]
        columns = self._features(tables)
        for where, frame in tables:
            for column in (*columns, *self.targets, *([self.by] if self.by else [])):
                _refuse_long(where, column, frame[column])
        encoding = Encoding(tuple(self._column(column, tables) for column in columns), self.missing)
        task = self.task or self._guess(tables)
        pieces = [
            Piece(
                where,
                encoding.encode(frame, where),
                self._labels(where, frame, task),
                part,
                client,
                frame[self.by].tolist() if self.by else None,
            )
            for client, part, where, frame in found
        ]
        names = self._class_names(task, tables)
        about = Settings(task, class_names=names, name=self.name, gaps=self.missing == "mean")
        standardize = encoding.scaled if self.standardize == "client" else ()
        return replace(from_pieces(pieces, about, self.by), standardize=standardize, encoding=encoding)

    def _features(self, tables: Sequence[tuple[str, Frame]]) -> list[str]:
        """The columns that are learned from; every table must have them."""
        first = list(tables[0][1].columns)
        apart = [*self.targets, *([self.by] if self.by else [])]
        rest = [column for column in first if column not in apart]
        chosen = rest if self.features is None else _as_list(self.features)
        everywhere = list(dict.fromkeys(column for _, frame in tables for column in frame.columns))
        if stray := next((column for column in self.declared if column not in everywhere), None):
            raise DataError(
                f"{self.name}: categorical names {stray!r}, which is not a column; {nearest(stray, everywhere)}"
            )
        if idle := next((column for column in self.declared if column not in chosen), None):
            missing = "" if idle in apart else "add it to features, or "
            raise DataError(
                f"{self.name}: categorical names {idle!r}, which is not learned from: {missing}take it out of "
                "categorical"
            )
        wanted = dict.fromkeys([*apart, *chosen])
        for where, frame in tables:
            have = dict.fromkeys(frame.columns)
            lost = next((column for column in wanted if column not in have), None)
            if lost is not None:
                raise DataError(f"{where}: there is no column {lost!r}; {nearest(lost, have)}")
            more = next((column for column in have if column not in wanted), None)
            if more is not None and self.features is None:
                raise DataError(
                    f"{where}: the column {more!r} is not in {tables[0][0]}: leave it out, or name the features"
                )
        if twice := next((column for column in chosen if column in apart), None):
            raise DataError(f"{self.name}: {twice!r} is not to be learned from: take it out of features")
        if not chosen:
            raise DataError(
                f"{self.name}: there is no column to learn from beside {', '.join(apart)}; add one"
            )
        return chosen

    # --- features -----------------------------------------------------------------------------------------

    def _column(self, column: str, tables: Sequence[tuple[str, Frame]]) -> Column:
        declared = self.categorical if isinstance(self.categorical, Mapping) else {}
        for where, frame in tables:
            self._check_column(where, column, frame[column])
        if column in declared:
            return Column(column, tuple(map(str, declared[column])))
        tables = self._measured(column, tables)
        texts = [_is_text(frame[column]) for _, frame in tables]
        listed = column in self.declared
        if any(texts) and not (self.categorical == "auto" or listed):
            raise DataError(
                f"{self.name}: column {column!r} holds texts: name it in categorical, or leave it out of features"
            )
        if not any(texts) and not listed:
            return Column(column, scaled=any(frame[column].dtype.kind != "b" for _, frame in tables))
        if not listed:
            self._check_texts(column, tables)
        return Column(column, self._found(column, tables))

    def _check_texts(self, column: str, tables: Sequence[tuple[str, Frame]]) -> None:
        """Refuse a column of categories that is one of numbers but for a few texts, or numbers in other tables."""
        texts = [_is_text(frame[column]) for _, frame in tables]
        for where, frame in (one for one, text in zip(tables, texts, strict=True) if text):
            stray = _stray_texts(frame[column])
            values = int(frame[column].notna().sum())
            few = 0 < len(stray) < values and (2 * len(stray) < values or not all(texts))
            if few:
                row, value = stray[0]
                raise DataError(
                    f"{where}: column {column!r} holds numbers but for {len(stray)} of {values} values (row "
                    f"{row}: {value!r}): clean it, or name it in categorical"
                )
            if not all(texts):
                value = next(str(one) for one in frame[column].dropna())
                raise DataError(
                    f"{where}: column {column!r} holds the text {value!r}, other tables numbers: clean it, or name "
                    "it in categorical"
                )

    def _check_column(self, where: str, column: str, values: Values) -> None:
        _refuse_lists(where, column, values)
        dates = values.dtype.kind in "mM" or (_is_text(values) and _are_dates(values))
        if dates:
            raise DataError(
                f"{where}: column {column!r} holds dates: turn them into numbers, such as days, or leave the "
                "column out of features"
            )
        check_missing(where, column, values, self.missing)

    def _measured(self, column: str, tables: Sequence[tuple[str, Frame]]) -> list[tuple[str, Frame]]:
        """The tables that have a value in a column, which tell what kind of column it is."""
        found = [(where, frame) for where, frame in tables if frame[column].notna().any()]
        if not found:
            raise DataError(
                f"{tables[0][0]}: column {column!r} has no value at all: fill it, or leave it out of features"
            )
        return found

    def _found(self, column: str, tables: Sequence[tuple[str, Frame]]) -> tuple[str, ...]:
        values = sorted({as_text(one) for _, frame in tables for one in frame[column].dropna()})
        if len(values) > MOST_CATEGORIES:
            raise DataError(
                f"{self.name}: column {column!r} has {len(values)} different texts, which look like names or free "
                "text: leave it out of features, or give its categories in categorical"
            )
        return tuple(values)

    # --- labels -------------------------------------------------------------------------------------------

    def _guess(self, tables: Sequence[tuple[str, Frame]]) -> TaskName:
        columns = [frame[column] for _, frame in tables for column in self.targets]
        if len(self.targets) == 1 and all(_is_text(values) or values.dtype.kind == "b" for values in columns):
            return "classification"
        if all(values.dtype.kind == "f" for values in columns):
            return "regression"
        other = "classification" if len(self.targets) == 1 else "multi-label"
        raise DataError(
            f"{self.name}: the target {', '.join(self.targets)} holds whole numbers: say task='regression' or "
            f"task={other!r}"
        )

    def _class_names(self, task: TaskName, tables: Sequence[tuple[str, Frame]]) -> Sequence[str] | None:
        """Classes by name: those given, or all values of the target in order."""
        if task != "classification":
            return self.class_names or (self.targets if task == "multi-label" else None)
        if len(self.targets) > 1:
            raise DataError(
                f"{self.name}: a class is one column, but the targets are {', '.join(self.targets)}; "
                "name one of them"
            )
        values = {one for _, frame in tables for one in frame[self.targets[0]].dropna().tolist()}
        texts = any(isinstance(value, str) for value in values)
        if self.class_names:
            return self.class_names
        check_classes_repeat(f"{self.name}, target {self.targets[0]!r}", _together(self.targets[0], tables))
        return [as_text(one) for one in sorted(map(str, values) if texts else values)]

    def _labels(self, where: str, frame: Frame, task: TaskName) -> np.ndarray:
        for column in self.targets:
            missing = int(frame[column].isna().sum())
            if missing:
                raise DataError(
                    f"{where}: the target {column!r} lacks {missing} of {len(frame)} values: leave out these rows"
                )
            _refuse_lists(where, column, frame[column])
        if task == "classification":
            return np.array([as_text(one) for one in frame[self.targets[0]].tolist()])
        values = numbers(where, frame, self.targets)
        return values if len(self.targets) > 1 else values[:, 0]


def _together(column: str, tables: Sequence[tuple[str, Frame]]) -> np.ndarray:
    """The values of a column in all tables, as texts."""
    return np.array([as_text(one) for _, frame in tables for one in frame[column].dropna()])


def _as_list(names: str | Iterable[str]) -> list[str]:
    """Names of columns, where one may be given alone."""
    return [names] if isinstance(names, str) else list(names)


def _refuse_lists(where: str, column: str, values: Values) -> None:
    """Refuse a column whose cells are lists, arrays, mappings, or bytes that are no text."""
    if values.dtype != object:
        return
    cell = next((one for one in values if _is_no_value(one)), None)
    if cell is not None:
        raise DataError(
            f"{where}: column {column!r} holds a {type(cell).__name__} in a cell: give a number or a text in each"
        )


def _refuse_long(where: str, column: str, values: Values) -> None:
    """Refuse a column with a long name or long texts: each row would take as much memory as the longest."""
    longest = max((len(one) for one in values if isinstance(one, str)), default=0) if _is_text(values) else 0
    if max(longest, len(column)) > LONGEST_TEXT:
        raise DataError(
            f"{where}: column {column[:20]!r} has a text of more than {LONGEST_TEXT:,} letters: columns, classes, "
            "categories and clients need short names; leave this column out, or give texts to from_datasets"
        )


def _is_no_value(cell: Any) -> bool:
    """Whether a cell holds more than one value, or bytes that are no text."""
    if not isinstance(cell, bytes):
        return isinstance(cell, list | tuple | set | dict | np.ndarray)
    try:
        cell.decode()
    except UnicodeDecodeError:
        return True
    return False


def _is_text(values: Values) -> bool:
    return values.dtype.kind not in "biufcmM"


def _stray_texts(values: Values) -> list[tuple[int, str]]:
    """The rows of a column whose text is no number, numbered from 0."""
    import pandas as pd

    stray = (pd.to_numeric(values, errors="coerce").isna() & values.notna()).to_numpy()
    return [(int(row), str(values.iloc[row])) for row in np.flatnonzero(stray)]


def _are_dates(values: Values) -> bool:
    texts = values.dropna().astype(str)
    return len(texts) > 0 and all(DATE.match(text) for text in texts)
