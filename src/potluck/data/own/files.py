"""CSV and Parquet files as a data set: one per client, or one with a column that names the clients."""

from __future__ import annotations

import csv
import glob
import inspect
import io
import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from potluck.core.dataset import Dataset
from potluck.data.own.arrays import TaskName
from potluck.data.own.datasets import pieces_of
from potluck.data.own.encoding import Missing
from potluck.data.own.frames import Categories, Standardize, Table
from potluck.data.parquet import FAULTS, LIMIT_VARIABLE, check_room, check_size, size_limit
from potluck.data.registry import register
from potluck.errors import DataError, check_path, first_line, first_twice
from potluck.files import SETTINGS, check_plain, in_home
from potluck.front_door import front_door

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 50_000
CELL = 8  # bytes of a value in memory, at least
Paths = str | Path | Sequence[str | Path] | Mapping[str, Any]


@front_door(DataError, apart=("by",))
def from_files(
    paths: Paths,
    *,
    target: str | Sequence[str],
    task: TaskName | None = None,
    features: Sequence[str] | None = None,
    categorical: Categories = "auto",
    by: str | None = None,
    missing: Missing = "refuse",
    standardize: Standardize = "client",
    class_names: Sequence[str] | None = None,
    dir: Path | str | None = None,
    name: str = "files",
) -> Dataset:
    """A data set from CSV or Parquet files.

    `paths` names a file per client, `{"north": "north.csv", "south": {"train": "a.csv", "test": "b.csv"}}`; or
    it is a pattern such as `hospitals/*.csv` or a list of files, whose names are then those of the clients; or one
    file, with `by`, its column of clients. Paths are relative to `dir`. The other arguments are those of
    `from_frame`.
    """
    asked = Table(target, task, features, categorical, by, missing, standardize, class_names, name)
    found = pieces_of(_by_client(paths, Path(dir or "."), by), name)
    for _, _, where, path in found:
        check_path(where, path, DataError)
    tables = []
    for client, part, _, path in found:
        table = read_table(Path(dir or ".") / path)
        if by is not None:
            _check_clients(Path(dir or ".") / path, table, by)
        tables.append((client, part, str(path), table))
    return asked.read(tables)


@register("files")
def _files(
    dir: Path | None,
    *,
    path: str | list[str] | dict[str, Any],
    target: str | list[str],
    task: TaskName | None = None,
    features: list[str] | None = None,
    categorical: str | list[str] | dict[str, list[Any]] = "auto",
    by: str | None = None,
    missing: Missing = "refuse",
    standardize: Standardize = "client",
    class_names: list[str] | None = None,
) -> Dataset:
    """CSV or Parquet files: `data: {name: files, path: "hospitals/*.csv", target: stay}`."""
    return from_files(
        path,
        target=target,
        task=task,
        features=features,
        categorical=categorical,
        by=by,
        missing=missing,
        standardize=standardize,
        class_names=class_names,
        dir=dir,
    )


def _by_client(paths: Paths, dir: Path, by: str | None) -> Any:
    """A path, or one per client."""
    if isinstance(paths, Mapping):
        return paths
    known = not isinstance(paths, Collection) or all(isinstance(path, str | Path) for path in paths)
    if not isinstance(paths, str | Path | Collection) or not known:
        raise DataError(f"paths: give the path of a file, a list of paths or one per client, not {paths!r}")
    found = _matching(paths, dir) if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if len(found) == 1 and (by is not None or not _is_pattern(paths)):
        return found[0]
    if by is not None:
        raise DataError(f"{len(found)} files, one per client, and by {by!r}: give one file, or leave out by")
    names = [path.stem for path in found]
    twice = first_twice(names)
    if twice is not None:
        raise DataError(f"two files are called {twice!r}: name the clients, {{{twice}: path, …}}")
    return dict(zip(names, found, strict=True))


def _is_pattern(paths: Any) -> bool:
    return not isinstance(paths, str | Path) or glob.has_magic(str(paths))


def _matching(path: str | Path, dir: Path) -> list[Path]:
    whole = (dir / in_home(path)).absolute()
    below = str(whole.relative_to(whole.anchor))
    if whole.is_dir():
        kind = "parquet" if any(whole.glob("*.parquet")) else "csv"
        raise DataError(f"{path} is a folder; write {Path(path) / f'*.{kind}'}, or name a file in it")
    found = sorted(Path(whole.anchor).glob(below)) if glob.has_magic(str(path)) else [whole]
    if not found:
        raise DataError(f"no file is called {whole}: check the path")
    return found


def read_table(path: Path) -> pd.DataFrame:
    """The table in a file."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it")
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise DataError(
            f"{path} is neither .csv nor .parquet: convert it, or read it with pandas and from_frame"
        )
    try:
        check_plain(path)
        return _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory: give less of it") from error
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}: check the path") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or first_line(error)}): check the file"
        ) from error
    # pandas says no more of a broken head, and runs out of levels in one that is nested
    except (*FAULTS, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)}): check the file") from error


def _check_clients(path: Path, table: pd.DataFrame, by: str) -> None:
    """Refuse names of clients in a CSV file that pandas reads as one value, such as 01 and 1."""
    import pandas as pd

    if path.suffix.lower() != ".csv" or by not in table or table[by].dtype.kind not in "biuf":
        return
    texts = pd.read_csv(path, usecols=[by], dtype=str, index_col=False)[by].str.strip()
    pairs = pd.DataFrame({"value": table[by], "text": texts}).drop_duplicates().dropna()
    odd = pairs[pairs["value"].duplicated(keep=False)]
    if len(odd):
        one, other = odd.loc[odd["value"] == odd["value"].iloc[0], "text"].tolist()[:2]
        raise DataError(
            f"{path}: {one!r} and {other!r} in the column {by!r} are read as the same value, so they would be one "
            "client: write a client in one way, and different ones with a letter"
        )


def _read_parquet(path: Path) -> pd.DataFrame:
    """The table in a Parquet file that is not too large; texts are looked at, as pandas keeps them as they are."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_size(path)
    names = pq.read_schema(path).names
    _check_columns(path, len(names))
    _check_different(path, names)
    table = pd.read_parquet(path, **_each_alone(pd.read_parquet))
    for _, column in table.items():
        if isinstance(column.dtype, pd.StringDtype | pd.CategoricalDtype):
            pa.array(column).validate(full=True)
    return table


def _each_alone(read: Any) -> dict[str, Any]:
    """How to say that no equal objects are looked for, if pandas can be told: some values would take hours."""
    known = "to_pandas_kwargs" in inspect.signature(read).parameters
    return {"to_pandas_kwargs": {"deduplicate_objects": False}} if known else {}


def _check_columns(path: Path, columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise DataError(f"{path} has more than {MOST_COLUMNS:,} columns: give fewer of them")


def _check_different(path: Path, names: Sequence[str]) -> None:
    twice = first_twice(names)
    if twice is not None:
        raise DataError(f"{path}: two columns are called {twice!r}: rename or remove one")


def _check_csv(path: Path) -> None:
    """Refuse a file that would take more memory than it may, or has more columns than can be learned from.

    What a short row lacks becomes missing values, which take memory as well.
    """
    size, limit = path.stat().st_size, size_limit()
    if size > limit:
        raise DataError(
            f"{path} has more than {limit / 2**30:,.1f} GiB; if that is right, set {LIMIT_VARIABLE} to more bytes"
        )
    with path.open("rb") as file:
        fields = _fields(file.read(SETTINGS))
        _check_columns(path, fields)
        if CELL * fields * size > limit:
            rows = _line_ends(file)
            check_room(path, CELL * fields * rows, rows)


def _fields(head: bytes) -> int:
    """How many fields the first record of a file has, or the second, which may have more.

    Quoted texts may hold commas and line ends, and be long: the limit of `csv` is for the whole process.
    """
    if len(head) == SETTINGS and b"\n" not in head:
        return SETTINGS
    usual = csv.field_size_limit(SETTINGS)
    try:
        records = filter(None, csv.reader(io.StringIO(head.decode("latin-1"), newline="")))
        return max(map(len, itertools.islice(records, 2)), default=0)
    except csv.Error:
        return SETTINGS
    finally:
        csv.field_size_limit(usual)


def _line_ends(file: BinaryIO) -> int:
    """How many lines a file has at most: they may end with two letters."""
    file.seek(0)
    news = returns = 0
    while piece := file.read(SETTINGS):
        news, returns = news + piece.count(b"\n"), returns + piece.count(b"\r")
    return max(news, returns) + 1


def _read_csv(path: Path) -> pd.DataFrame:
    """The table in a CSV file.

    pandas would rename the second of two columns with one name. Where rows have more fields than the first line, it
    would take the first ones for names of the rows, and what follows for the columns of other names. It reads large
    files in parts, and in a column with numbers in some of them and texts in others 01 would be two values.
    """
    import pandas as pd

    _check_csv(path)
    header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].dropna().str.strip()
    _check_different(path, header.tolist())
    if len(header) == 1 and ";" in header.iloc[0]:
        raise DataError(f"{path}: its columns are parted by semicolons: save it with commas")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            warnings.simplefilter("error", pd.errors.DtypeWarning)
            try:
                return pd.read_csv(path, index_col=False)
            except pd.errors.DtypeWarning:
                return pd.read_csv(path, index_col=False, low_memory=False)
    except pd.errors.ParserWarning as error:
        raise DataError(
            f"{path}: its rows have more fields than its first line names: give each column a name there"
        ) from error
