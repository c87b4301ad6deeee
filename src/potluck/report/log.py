"""The log of a run, read into columns."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import yaml

from potluck.errors import ConfigError, RunError, nearest
from potluck.files import read_json
from potluck.report.format import rounded

Floats = npt.NDArray[np.float64]
View = Literal["last", "best_by_validation", "best_by_test"]
VIEWS: tuple[View, ...] = get_args(View)
ACCURACY = "accuracy"
Key = tuple[str, str]  # moment, mode

Integers = npt.NDArray[np.int64]
USUAL = {ACCURACY, "score", "metric", "loss", "samples"}  # what else a task logs are further measures
MOMENTS = ("after_aggregation", "after_training", "before")  # the headline is the first one logged


# --- one round ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The test accuracy of every client that was evaluated in one round, in client order."""

    clients: tuple[str, ...]
    accuracy: Floats
    samples: Floats

    def mean(self) -> float | None:
        """The mean over clients, each counting once."""
        return _mean(self.accuracy)

    def weighted(self) -> float | None:
        """The mean over test samples: each client counts by the size of its test part."""
        total = float(self.samples.sum())
        return float(self.accuracy @ self.samples) / total if total > 0 else None

    def spread(self) -> float | None:
        """The standard deviation over clients, of the population: these are all clients, not a sample."""
        return float(self.accuracy.std()) if len(self.accuracy) else None

    def worst_tenth(self) -> float | None:
        """The mean of the worst tenth of the clients, rounded up to whole clients."""
        return _mean(np.sort(self.accuracy)[: math.ceil(len(self.accuracy) / 10)])

    def per_client(self) -> dict[str, float]:
        """The accuracy of each client."""
        return dict(zip(self.clients, self.accuracy.tolist(), strict=True))


# --- all rounds -----------------------------------------------------------------------------------------


NOBODY = Scores((), np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Curve:
    """A line over rounds, with an optional band around it."""

    label: str
    rounds: Integers
    mean: Floats
    low: Floats | None = None
    high: Floats | None = None


@dataclass(frozen=True)
class Series:
    """All values of one moment and mode, sorted by round, then client; NaN where a part was not measured.

    Values are stored as they were logged, not as a grid: where a hundred of a million clients are evaluated
    per round, the memory follows the hundred.
    """

    names: tuple[str, ...]  # the clients, in natural order
    rounds: Integers  # the evaluated rounds, ascending
    starts: Integers  # where the values of each round begin; one longer than `rounds`
    client: Integers  # an index into `names` per value
    accuracy: Floats
    samples: Floats
    validation: Floats
    further: dict[str, Floats] = field(default_factory=dict)  # measures besides the one a client is judged by

    def at(self, row: int) -> Scores:
        """The test scores of the `row`-th evaluated round."""
        part = self._part(row)
        keep = np.isfinite(self.accuracy[part])
        clients = tuple(self.names[index] for index in self.client[part][keep])
        return Scores(clients, self.accuracy[part][keep], np.nan_to_num(self.samples[part][keep]))

    def means(self, values: Floats) -> Floats:
        """The mean over clients of `accuracy` or `validation` in every round, NaN where there is none."""
        parts = (values[self._part(row)] for row in range(len(self.rounds)))
        means = [_mean(part[np.isfinite(part)]) for part in parts]
        return np.array([math.nan if mean is None else mean for mean in means])

    def row(self, view: View) -> int | None:
        """Which evaluated round a view looks at; the earliest where several are equally good."""
        test = self.means(self.accuracy)
        if view == "last":
            evaluated = np.flatnonzero(np.isfinite(test))
            return int(evaluated[-1]) if len(evaluated) else None
        guide = test if view == "best_by_test" else self.means(self.validation)
        return int(np.nanargmax(guide)) if np.isfinite(guide).any() else None

    def scores(self, view: View) -> Scores:
        """The test scores under a view; nobody's where the view is not defined."""
        row = self.row(view)
        return NOBODY if row is None else self.at(row)

    def evaluated(self, view: View) -> tuple[str, ...]:
        """The clients with test data in the round of a view, those whose score is undefined too."""
        row = self._row_or_last(view)
        if row is None:
            return ()
        part = self._part(row)
        tested = np.isfinite(self.samples[part]) | np.isfinite(self.accuracy[part])
        return tuple(self.names[index] for index in self.client[part][tested])

    def further_means(self, view: View) -> dict[str, dict[str, Any]]:
        """Each further measure in the round of a view: the mean over the clients that have it, and their number."""
        row = self._row_or_last(view)
        if row is None:
            return {}
        parts = {name: values[self._part(row)] for name, values in self.further.items()}
        found = {name: part[np.isfinite(part)] for name, part in parts.items() if np.isfinite(part).any()}
        return {name: {"mean": rounded(_mean(part)), "clients": len(part)} for name, part in found.items()}

    def _row_or_last(self, view: View) -> int | None:
        """The round of a view; the last view has one even where no score is defined in any."""
        row = self.row(view)
        return len(self.rounds) - 1 if row is None and view == "last" and len(self.rounds) else row

    def grid(self, values: Floats) -> Floats:
        """`accuracy`, `samples` or `validation` as rounds × clients, NaN where absent."""
        grid = np.full((len(self.rounds), len(self.names)), np.nan)
        grid[np.repeat(np.arange(len(self.rounds)), np.diff(self.starts)), self.client] = values
        return grid

    def curve(self, label: str, band: Literal["spread", "range"] | None = None) -> Curve:
        """Mean accuracy over rounds; the band is one standard deviation, or from worst to best client."""
        rows = [row for row, mean in enumerate(self.means(self.accuracy)) if np.isfinite(mean)]
        rounds, accuracies = self.rounds[rows], [self.at(row).accuracy for row in rows]
        mean = np.array([values.mean() for values in accuracies])
        if band is None:
            return Curve(label, rounds, mean)
        if band == "range":
            low, high = ([values.min() for values in accuracies], [values.max() for values in accuracies])
            return Curve(label, rounds, mean, np.array(low), np.array(high))
        spread = np.array([values.std() for values in accuracies])
        return Curve(label, rounds, mean, np.clip(mean - spread, 0, 1), np.clip(mean + spread, 0, 1))

    def _part(self, row: int) -> slice:
        return slice(int(self.starts[row]), int(self.starts[row + 1]))


@dataclass(frozen=True)
class Metrics:
    """All series of a run, by moment and mode, in the order they were first logged."""

    series: dict[Key, Series]
    held_out: dict[Key, Series]
    names: dict[str, str] = field(
        default_factory=dict
    )  # client → what it is measured by, where not all by accuracy

    def headline(self, when: str | None = None, mode: str | None = None) -> Key | None:
        """The series a run is judged by; None when nothing was logged.

        The moment is the first of `MOMENTS` that was logged, the mode the first one logged at that moment.
        """
        keys = list(self.series) or list(self.held_out)
        for position, wanted, word in ((0, when, "moment"), (1, mode, "mode")):
            known = {key[position] for key in keys}
            if wanted is not None and keys and wanted not in known:
                raise ConfigError(
                    f"the {word} {wanted!r} was not evaluated in this run; {nearest(wanted, known)}"
                )
            keys = [key for key in keys if wanted in (None, key[position])]
        return min(keys, key=lambda key: _moment_rank(key[0]), default=None)


def _moment_rank(moment: str) -> int:
    return MOMENTS.index(moment) if moment in MOMENTS else len(MOMENTS)


# --- reading --------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a log, numbered from 1, one at a time.

    A last line without its end is a write in progress and is left out; any other broken line is an error.
    """
    if not path.parent.is_dir():
        raise RunError(f"there is no folder {path.parent}: give the folder of a run")
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise RunError(f"{path}, line {number} is not JSON ({error}): repair or remove it") from None
            if not isinstance(record, dict):
                raise RunError(f"{path}, line {number} is not a mapping: repair or remove it")
            yield number, record


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`, given as such or by its folder. Of a value logged twice the later one counts."""
    path = path if path.suffix == ".jsonl" else path / "metrics.jsonl"
    numbers: dict[str, int] = {}
    measures: dict[str, str] = {}
    columns: dict[tuple[bool, Key], _Columns] = defaultdict(_Columns)
    for number, record in read_lines(path):
        try:
            key = (str(record["when"]), str(record.get("mode") or "default"))
            client = numbers.setdefault(str(record["client"]), len(numbers))
            columns[bool(record.get("held_out")), key].add(client, record)
            if part := record.get("test") or record.get("validation"):
                measures[str(record["client"])] = str(part.get("metric", ACCURACY))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path}, line {number} is not a measurement: {error!r}") from None
    names = tuple(sorted(numbers, key=natural))
    order = np.zeros(len(names), np.int64)
    order[[numbers[name] for name in names]] = np.arange(len(names))
    series: dict[bool, dict[Key, Series]] = {False: {}, True: {}}
    for (held_out, key), column in columns.items():
        series[held_out][key] = column.series(names, order)
    mixed = bool({*measures.values()} - {ACCURACY})
    others = {client: measures[client] for client in names if mixed and client in measures}
    return Metrics(series[False], series[True], others)


@dataclass
class _Columns:
    """A series while it is being read: flat machine arrays, 40 bytes a value."""

    round: array[int] = field(default_factory=lambda: array("q"))
    client: array[int] = field(default_factory=lambda: array("q"))
    accuracy: array[float] = field(default_factory=lambda: array("d"))
    samples: array[float] = field(default_factory=lambda: array("d"))
    validation: array[float] = field(default_factory=lambda: array("d"))
    further: dict[str, _Sparse] = field(default_factory=lambda: defaultdict(_Sparse))

    def add(self, client: int, record: Mapping[str, Any]) -> None:
        test, validation = record.get("test") or {}, record.get("validation") or {}
        values = (_score(test), _number(test, "samples"), _score(validation))
        self.round.append(int(record["round"]))
        self.client.append(client)
        for column, value in zip((self.accuracy, self.samples, self.validation), values, strict=True):
            column.append(value)
        for name, value in test.items():
            if name not in USUAL and name != test.get("metric") and isinstance(value, (int, float)):
                self.further[name].add(len(self.round) - 1, float(value))

    def series(self, names: tuple[str, ...], order: Integers) -> Series:
        rounds = np.array(self.round, np.int64)
        client = order[np.array(self.client, np.int64)]
        sorting = np.lexsort((client, rounds))
        newest = _last_of_equals(rounds[sorting], client[sorting])
        sorting = sorting[newest]
        unique, starts = np.unique(rounds[sorting], return_index=True)
        columns = (self.accuracy, self.samples, self.validation)
        accuracy, samples, validation = (np.array(column)[sorting] for column in columns)
        further = {name: self.further[name].column(len(rounds))[sorting] for name in self.further}
        starts = np.append(starts, len(sorting))
        return Series(names, unique, starts, client[sorting], accuracy, samples, validation, further)


@dataclass
class _Sparse:
    """A column that few lines of a log have."""

    place: array[int] = field(default_factory=lambda: array("q"))
    value: array[float] = field(default_factory=lambda: array("d"))

    def add(self, place: int, value: float) -> None:
        self.place.append(place)
        self.value.append(value)

    def column(self, length: int) -> Floats:
        """With a value per line, NaN where there is none."""
        column = np.full(length, np.nan)
        column[np.array(self.place, np.int64)] = np.array(self.value)
        return column


def _last_of_equals(rounds: Integers, client: Integers) -> npt.NDArray[np.bool_]:
    """Of neighbours with the same round and client only the last; they are in the order of the log."""
    changes = (np.diff(rounds) != 0) | (np.diff(client) != 0)
    return np.append(changes, True)


def _number(part: Mapping[str, Any], name: str) -> float:
    value = part.get(name)
    return math.nan if value is None else float(value)


def _score(part: Mapping[str, Any]) -> float:
    """The accuracy, or what the client's task has in its place."""
    return _number(part, "score" if "score" in part else "accuracy")


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sorting key that puts client 9 before client 10, and `site-9` before `site-10`."""
    chunks = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(chunk), chunk) if chunk.isdecimal() else (1, 0, chunk) for chunk in chunks)


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


# --- the small files of a run ---------------------------------------------------------------------------


def read_mapping(path: Path) -> dict[str, Any] | None:
    """A JSON mapping of a run; None when the file is absent."""
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunError(f"{path} is not a mapping: repair or remove it")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved experiment of a run, `config.yaml`."""
    path = folder / "config.yaml"
    if not path.exists():
        raise RunError(f"{folder} is not the folder of a run: it has no config.yaml")
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not YAML ({' '.join(str(error).split())}): repair it") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is not a mapping: repair it")
    return value


def method_name(config: Mapping[str, Any]) -> str:
    """The name of the method in a resolved experiment."""
    method = config.get("method")
    return str(method.get("name") if isinstance(method, Mapping) else method)
