"""Scores: one log, every protocol a view of it.

`metrics.jsonl` holds one value per client, round, moment and inference mode. Everything that papers call
"the accuracy" is computed here from those values: last round or best round, by client or by sample.

Held-out clients (they never trained) are kept apart from the first line on; no mean ever mixes the two.
A log that nobody wrote to may be absent: it reads as empty.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import yaml

from potluck.errors import ConfigError, RunError, nearest
from potluck.record import read_json

if TYPE_CHECKING:
    from potluck.rng import Rng

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
View = Literal["last", "best_by_validation", "best_by_test"]
VIEWS: tuple[View, ...] = get_args(View)
ACCURACY = "accuracy"
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


NOBODY = Scores((), np.empty(0), np.empty(0))


# --- all rounds -----------------------------------------------------------------------------------------


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


Key = tuple[str, str]  # moment, mode


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


# --- summary.json ---------------------------------------------------------------------------------------


def summarise(source: Path | Metrics, when: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """The `accuracy` block of `summary.json`, for one moment and mode (`Metrics.headline` picks by default).

    `last` is the mean over the clients evaluated in the last evaluated round, and `coverage` says how many
    they are. `best_by_validation` is the test accuracy of the round with the best mean validation accuracy.
    Values are fractions rounded to six digits, None where undefined. Where clients have tasks without an accuracy
    their task's score is in its place, and `metrics` says by client which one that is, also of those whose score is
    undefined; `further` has what else their tasks measure, each the mean over the clients that have it.
    """
    metrics = source if isinstance(source, Metrics) else read_metrics(source)
    key = metrics.headline(when, mode)
    series = metrics.series.get(key) if key else None
    block: dict[str, Any] = {"when": key[0] if key else None, "mode": key[1] if key else None}
    block |= _views(series)
    if series and metrics.names:
        block["metrics"] = {client: metrics.names[client] for client in series.evaluated("last")}
    if series and (further := series.further_means("last")):
        block["further"] = further
    if key and key in metrics.held_out:
        held_out = metrics.held_out[key].scores("last")
        block["held_out"] = {"clients": len(held_out.clients), "last": rounded(held_out.mean())}
    return block


def _views(series: Series | None) -> dict[str, Any]:
    scores = {view: series.scores(view) if series else NOBODY for view in VIEWS}
    rows = {view: series.row(view) if series else None for view in VIEWS}
    last = scores["last"]
    return {
        "last": rounded(last.mean()),
        "best_by_validation": rounded(scores["best_by_validation"].mean()),
        "best_by_test": rounded(scores["best_by_test"].mean()),
        "weighted_last": rounded(last.weighted()),
        "std_over_clients": rounded(last.spread()),
        "worst_tenth": rounded(last.worst_tenth()),
        "coverage": len(last.clients),
        "rounds": {
            view: None if row is None or not series else int(series.rounds[row]) for view, row in rows.items()
        },
        "per_client": {client: rounded(value) for client, value in last.per_client().items()},
    }


def messages_block(path: Path) -> dict[str, Any]:
    """The `messages` block of `summary.json`: scalars and bytes up and down, a mean per client and round.

    Only what crossed for training counts; the mean is over the pairs of client and round in which anything
    did. `total` has the sums by purpose, for the whole run. `as_published` are the scalars a paper counts, where a
    method was asked for them.
    """
    totals: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: {"scalars": 0, "bytes": 0})
    published: dict[str, int] = {}
    clients: dict[str, int] = {}
    pairs = array("q")
    for number, record in read_lines(path):
        try:
            purpose, total = record["purpose"], totals[record["purpose"], record["direction"]]
            total["scalars"] += int(record["scalars"])
            total["bytes"] += int(record["bytes"])
            if "as_published" in record:
                direction = str(record["direction"])
                published[direction] = published.get(direction, 0) + int(record["as_published"])
            if purpose == "train":
                client = clients.setdefault(str(record["client"]), len(clients))
                pairs.append((int(record["round"]) << 32) + client)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path}, line {number} is not an entry of the ledger: {error!r}") from None
    count = len(np.unique(np.array(pairs, np.int64)))
    shares = {direction: whole(amount / max(count, 1)) for direction, amount in sorted(published.items())}
    counted = {"as_published": shares} if shares else {}
    return _per_pair(totals, count) | {"total": _by_purpose(totals)} | counted


def _per_pair(totals: Mapping[tuple[str, str], Mapping[str, int]], count: int) -> dict[str, Any]:
    nothing = {"scalars": 0, "bytes": 0}
    return {
        direction: {
            unit: whole(amount / max(count, 1))
            for unit, amount in totals.get(("train", direction), nothing).items()
        }
        for direction in ("up", "down")
    }


def _by_purpose(totals: Mapping[tuple[str, str], Mapping[str, int]]) -> dict[str, Any]:
    nested: dict[str, dict[str, Any]] = {}
    for (purpose, direction), amounts in sorted(totals.items()):
        nested.setdefault(purpose, {})[direction] = dict(amounts)
    return nested


def seconds_per_round(path: Path) -> float | None:
    """The mean of `seconds` over all rounds of `timing.jsonl`, the first too; None when none was timed."""
    seconds: dict[int, float] = {}
    for number, record in read_lines(path):
        try:
            if record.get("seconds") is not None and record.get("round") is not None:
                seconds[int(record["round"])] = float(record["seconds"])
        except (TypeError, ValueError) as error:
            raise RunError(f"{path}, line {number} is not a timing: {error!r}") from None
    return rounded(math.fsum(seconds.values()) / len(seconds)) if seconds else None


def rounded(value: float | None) -> float | None:
    """Six digits, and None for what is not a number: JSON has no NaN."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


def over_seeds(values: Sequence[float]) -> dict[str, float | None]:
    """The mean and the sample deviation of one value per seed; None where there are too few."""
    return {
        "mean": rounded(float(np.mean(values))) if len(values) else None,
        "std_over_seeds": rounded(float(np.std(values, ddof=1))) if len(values) > 1 else None,
    }


def whole(value: float) -> float | int:
    """A mean of counts: an integer where it is one."""
    return int(value) if value == int(value) else round(value, 6)


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


# --- comparisons ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A paired difference in accuracy, with its bootstrap interval (None when one pair is all there is)."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def tie(self) -> bool | None:
        """Whether the interval holds 0; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= 0 <= self.high

    def to_json(self) -> dict[str, Any]:
        """The form the tables and pages take."""
        ends = {"low": rounded(self.low), "high": rounded(self.high)}
        return {"mean": rounded(self.mean), **ends, "tie": self.tie, "pairs": self.pairs}


def paired(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """`a` − `b` for every client that has both values, in client order."""
    return {client: a[client] - b[client] for client in sorted(a.keys() & b.keys(), key=natural)}


def bootstrap_interval(
    differences: npt.ArrayLike | Sequence[npt.ArrayLike],
    rng: np.random.Generator,
    draws: int = 2000,
    level: float = 0.95,
) -> tuple[float, float]:
    """A percentile bootstrap interval for the mean of paired differences.

    One row (one seed): clients are resampled, and the interval says nothing about other seeds. Several rows:
    seeds are resampled, then clients within each drawn seed; the statistic is the mean of the seeds' means.
    With few seeds (five or less) such an interval is narrower than it claims. One value gives (NaN, NaN).
    """
    seeds = _rows(differences)
    if sum(map(len, seeds)) < 2:
        return math.nan, math.nan
    means = np.array([_resampled_mean(seeds, rng) for _ in range(draws)])
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _rows(differences: npt.ArrayLike | Sequence[npt.ArrayLike]) -> list[Floats]:
    """One array per seed, without the clients that have no value."""
    nested = isinstance(differences, (list, tuple)) and any(np.ndim(row) for row in differences)
    rows = list(differences) if nested else np.atleast_2d(np.asarray(differences, np.float64))  # type: ignore[arg-type]
    arrays = [np.asarray(row, np.float64) for row in rows]
    kept = [row[np.isfinite(row)] for row in arrays]
    filled = [row for row in kept if len(row)]
    if not filled:
        raise RunError("there is nothing to compare: no client has a value under both methods")
    return filled


def _resampled_mean(seeds: Sequence[Floats], rng: np.random.Generator) -> float:
    chosen = rng.integers(len(seeds), size=len(seeds)) if len(seeds) > 1 else [0]
    means = [seeds[row][rng.integers(len(seeds[row]), size=len(seeds[row]))].mean() for row in chosen]
    return float(np.mean(means))


def difference(
    method: Mapping[str, Mapping[str, float]],
    baseline: Mapping[str, Mapping[str, float]],
    rng: np.random.Generator,
    draws: int = 2000,
    level: float = 0.95,
) -> Difference | None:
    """Compare two methods, each as seed → client → accuracy; None when no seed has a client in common."""
    rows = [
        np.array(list(paired(method[seed], baseline[seed]).values()))
        for seed in sorted(method.keys() & baseline.keys(), key=natural)
    ]
    rows = [row for row in rows if len(row)]
    if not rows:
        return None
    low, high = bootstrap_interval(rows, rng, draws, level)
    mean = float(np.mean([row.mean() for row in rows]))
    pairs = sum(map(len, rows))
    return Difference(mean, rounded(low), rounded(high), pairs)


@dataclass(frozen=True)
class _Result:
    """What a comparison needs of one run."""

    folder: Path
    method: str
    seed: str
    split: str | None
    key: Key | None
    scores: Scores
    curve: Curve | None
    messages: dict[str, Any]
    seconds: float | None
    about: dict[str, Any]
    names: dict[str, str]  # client → what it is measured by, where tasks or data sets differ
    data_sets: dict[str, str]
    further: dict[str, dict[str, Any]]


def compare_runs(
    runs: Sequence[Path] | Mapping[str, Sequence[Path]],
    rng: Rng,
    baseline: str = "local",
    view: View = "last",
    when: str | None = None,
    draws: int = 2000,
    level: float = 0.95,
    by_client: bool = False,
) -> dict[str, Any]:
    """Several finished runs side by side, each method paired with `baseline` by seed and client.

    `runs` are folders, or folders by label where one method appears under several settings. Runs of one seed
    must share their split. A method's interval does not depend on which others are compared. `by_client` adds the
    difference of every client. The result is plain data: `table.comparison_sheet` and `page.write_comparison`
    take it.
    """
    if view not in VIEWS:
        raise ConfigError(f"there is no view {view!r}; {nearest(view, VIEWS)}")
    labelled = runs.items() if isinstance(runs, Mapping) else [(None, runs)]
    results = [_read_result(folder, label, view, when) for label, folders in labelled for folder in folders]
    if not results:
        raise RunError("there is nothing to compare: give the folders of at least two runs")
    groups = _group(results)
    reference = {seed: run.scores.per_client() for seed, run in groups.get(baseline, {}).items()}
    names = {client: name for run in results for client, name in run.names.items()}
    methods = []
    for method, group in groups.items():
        own = {seed: run.scores.per_client() for seed, run in group.items()}
        stream = rng.child("bootstrap", method).numpy()
        against = None if method == baseline else difference(own, reference, stream, draws, level)
        methods.append(_method_entry(method, list(group.values()), against))
        if by_client and method != baseline:
            methods[-1]["by_client"] = client_gains(own, reference)
        if names:
            methods[-1] |= {"gain": rounded(relative_gain(own, reference)), "per_client": _over_seeds(own)}
    seeds = sorted({run.seed for run in results}, key=natural)
    measure: dict[str, Any] = {
        "view": view,
        "level": level,
        "draws": draws,
        "baseline": baseline,
        "seeds": seeds,
    }
    if names:
        measure["metrics"] = {client: names[client] for client in sorted(names, key=natural)}
        known = results[0].data_sets
        data_sets = {client: known[client] for client in measure["metrics"] if client in known}
        measure |= {"data_sets": data_sets} if data_sets else {}
    return results[0].about | measure | {"methods": methods}


def client_gains(
    method: Mapping[str, Mapping[str, float]], baseline: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """The difference of every client in every seed, and how many are better, equal or worse."""
    seeds = sorted(method.keys() & baseline.keys(), key=natural)
    differences = {
        seed: {client: rounded(value) for client, value in paired(method[seed], baseline[seed]).items()}
        for seed in seeds
    }
    values = [value for clients in differences.values() for value in clients.values() if value is not None]
    signs = {"better": sum(value > 0 for value in values), "worse": sum(value < 0 for value in values)}
    return {**signs, "equal": len(values) - sum(signs.values()), "differences": differences}


def relative_gain(
    method: Mapping[str, Mapping[str, float]], baseline: Mapping[str, Mapping[str, float]]
) -> float | None:
    """Δ %: the mean over clients, then seeds, of 100·(value − baseline)/baseline, whatever each is measured by.

    INFERRED from the Δ of FedMuscle's tables, whose definition was not at hand. Clients whose baseline is 0 are
    left out.
    """
    means = []
    for seed in sorted(method.keys() & baseline.keys()):
        both = method[seed].keys() & {client for client, value in baseline[seed].items() if value > 0}
        gains = [100 * (method[seed][one] / baseline[seed][one] - 1) for one in sorted(both, key=natural)]
        means += [math.fsum(gains) / len(gains)] if gains else []
    return math.fsum(means) / len(means) if means else None


def _over_seeds(values: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    """The mean over seeds of every client."""
    clients = sorted({client for seed in values.values() for client in seed}, key=natural)
    rows = {client: [seed[client] for seed in values.values() if client in seed] for client in clients}
    return {client: rounded(math.fsum(row) / len(row)) for client, row in rows.items()}


def _read_result(folder: Path, label: str | None, view: View, when: str | None) -> _Result:
    config = read_config(folder)
    metrics = read_metrics(folder)
    try:
        key = metrics.headline(when)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    series = metrics.series.get(key) if key else None
    split = read_mapping(folder / "split.json") or {}
    method = method_name(config)
    return _Result(
        folder=folder,
        method=label or method,
        seed=json.dumps(config.get("seed"), sort_keys=True),
        split=split.get("hash"),
        key=key,
        scores=series.scores(view) if series else NOBODY,
        curve=series.curve(label or method) if series else None,
        messages=messages_block(folder / "ledger.jsonl"),
        seconds=seconds_per_round(folder / "timing.jsonl"),
        about={name: config.get(name) for name in ("data", "partition")} | _federation(config),
        names=_names(config, metrics, series.evaluated(view) if series else ()),
        data_sets=_data_sets(split),
        further=series.further_means(view) if series else {},
    )


def _names(config: Mapping[str, Any], metrics: Metrics, clients: Sequence[str]) -> dict[str, str]:
    """What each client is measured by; empty where one data set and its accuracy are all there is."""
    groups = config.get("federation") or ()
    if not metrics.names and len(groups) < 2:
        return {}
    return {client: metrics.names.get(client, ACCURACY) for client in clients}


def _data_sets(split: Mapping[str, Any]) -> dict[str, str]:
    """The data set of each client, where groups have their own: `split.json` lists clients group by group."""
    groups, clients = split.get("groups") or (), split.get("clients") or ()
    names = [str(group["data"]) for group in groups for _ in range(group["clients"])]
    return {str(part["id"]): name for part, name in zip(clients, names, strict=False)}


def _federation(config: Mapping[str, Any]) -> dict[str, Any]:
    groups = config.get("federation")
    return {"federation": [{"data": group.get("data")} for group in groups]} if groups else {}


def _group(results: Sequence[_Result]) -> dict[str, dict[str, _Result]]:
    """Method → seed → run; refuses two runs of one seed, and runs of one seed on different splits."""
    groups: dict[str, dict[str, _Result]] = defaultdict(dict)
    splits: dict[str, _Result] = {}
    for run in results:
        other = groups[run.method].setdefault(run.seed, run)
        if other is not run:
            raise RunError(
                f"{other.folder} and {run.folder} are both {run.method} with seed {run.seed}: "
                "remove one, or give them labels"
            )
        first = splits.setdefault(run.seed, run)
        if first.split != run.split:
            raise RunError(
                f"{first.folder} and {run.folder} have seed {run.seed} but different splits: "
                "only runs on the same split can be compared"
            )
    return dict(groups)


def _method_entry(method: str, runs: Sequence[_Result], against: Difference | None) -> dict[str, Any]:
    means = [mean for run in runs if (mean := run.scores.mean()) is not None]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    key, further = runs[0].key, _further_over_seeds(runs)
    return {
        "method": method,
        "when": key[0] if key else None,
        "mode": key[1] if key else None,
        "seeds": len(runs),
        "clients": max(len(run.scores.clients) for run in runs),
        "accuracy": over_seeds(means),
        "difference": against.to_json() if against else None,
        "messages": _mean_messages(runs),
        "seconds_per_round": rounded(float(np.mean(seconds))) if seconds else None,
        "curve": _curve_over_seeds(runs),
        **({"further": further} if further else {}),
    }


def _further_over_seeds(runs: Sequence[_Result]) -> dict[str, dict[str, float | None]]:
    """The mean and the sample deviation over seeds of every further measure."""
    names = dict.fromkeys(name for run in runs for name in run.further)
    rows = {name: [run.further[name]["mean"] for run in runs if name in run.further] for name in names}
    return {name: over_seeds(row) for name, row in rows.items()}


def _mean_messages(runs: Sequence[_Result]) -> dict[str, Any]:
    return {
        direction: {
            unit: whole(float(np.mean([run.messages[direction][unit] for run in runs])))
            for unit in ("scalars", "bytes")
        }
        for direction in ("up", "down")
    }


def _curve_over_seeds(runs: Sequence[_Result]) -> dict[str, list[Any]] | None:
    """The mean over seeds in every round that all seeds evaluated, and the lowest and highest seed."""
    curves = [dict(zip(c.rounds.tolist(), c.mean.tolist(), strict=True)) for run in runs if (c := run.curve)]
    if not curves:
        return None
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[number] for curve in curves] for number in rounds]
    mean = [rounded(float(np.mean(row))) for row in values]
    ends = {"low": [rounded(min(row)) for row in values], "high": [rounded(max(row)) for row in values]}
    return {"rounds": rounds, "mean": mean} | ends


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
