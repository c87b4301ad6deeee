"""Reads the logs of a run into columns.

Every evaluation protocol is a view of `metrics.jsonl`: a `Series` holds the values of one moment and mode, and
gives the scores of the round that a view looks at.
"""

from __future__ import annotations

import io
import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from potluck.core import metrics as facts_of
from potluck.core.metrics import MetricFacts
from potluck.errors import ConfigError, RunError, nearest
from potluck.experiment.overrides import read_yaml
from potluck.files import read_json, sha256
from potluck.report.again import to_go_on
from potluck.report.format import rounded
from potluck.report.reading import check_width, fields_in, log_lines, reading

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
View = Literal["last", "best_by_validation", "best_by_test"]
VIEWS: tuple[View, ...] = get_args(View)
Key = tuple[str, str]  # moment, mode
ACCURACY = "accuracy"
CONTRACT = "contract.json"
ENVIRONMENT = "environment.json"
MOMENTS = ("after_aggregation", "after_training", "before")  # the headline is the first one logged


# --- one round ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The test accuracy of every client that was evaluated in one round, in client order."""

    clients: tuple[str, ...]
    accuracy: Floats
    samples: Floats
    facts: MetricFacts = facts_of.ACCURACY

    def mean(self) -> float | None:
        """The mean over clients, each counting once."""
        return _mean(self.accuracy)

    def weighted(self) -> float | None:
        """The mean over test samples: each client counts by the size of its test part."""
        total = float(self.samples.sum())
        return float(self.accuracy @ self.samples) / total if total > 0 else None

    def spread(self) -> float | None:
        """The population standard deviation over clients: these are all clients, not a sample of them."""
        return float(self.accuracy.std()) if len(self.accuracy) else None

    def worst_tenth(self) -> float | None:
        """The mean of the worst tenth of the clients, rounded up to whole clients."""
        ranked = np.sort(self.accuracy) if self.facts.higher_is_better else -np.sort(-self.accuracy)
        return _mean(ranked[: math.ceil(len(ranked) / 10)])

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

    Values are kept as they were logged, not as a grid of rounds and clients, so that memory follows the clients
    evaluated per round and not the number of clients.

    Where clients were missing, rounds are compared over the same clients: those that were not missing in the last
    round, in the rounds in which none of these was.
    """

    names: tuple[str, ...]  # the clients, in natural order
    rounds: Integers  # the evaluated rounds, ascending
    starts: Integers  # where the values of each round begin; one longer than `rounds`
    client: Integers  # an index into `names` per value
    accuracy: Floats
    samples: Floats
    validation: Floats
    further: dict[str, Floats] = field(default_factory=dict)  # measures besides the one a client is judged by
    facts: MetricFacts = facts_of.ACCURACY  # direction and range of what clients are judged by
    missing: Mapping[int, frozenset[str]] = field(default_factory=dict)  # round → who was to be measured

    def comparable(self) -> Series:
        """The rounds that can be compared, each with the same clients; the series itself if nobody was missing."""
        last = self.row("last") if self.missing else None
        if last is None:
            return self
        left = self.missing.get(int(self.rounds[last]), frozenset())
        alike = [row for row, round_ in enumerate(self.rounds) if self.missing.get(int(round_), left) <= left]
        there = np.array([name not in left for name in self.names])
        kept = [np.flatnonzero(there[self.client[self._part(row)]]) + self.starts[row] for row in alike]
        places = np.concatenate(kept)
        return replace(
            self,
            rounds=self.rounds[alike],
            starts=np.cumsum([0, *map(len, kept)]),
            client=self.client[places],
            accuracy=self.accuracy[places],
            samples=self.samples[places],
            validation=self.validation[places],
            further={name: values[places] for name, values in self.further.items()},
            missing={},
        )

    def at(self, row: int) -> Scores:
        """The test scores of the `row`-th evaluated round."""
        part = self._part(row)
        keep = np.isfinite(self.accuracy[part])
        clients = tuple(self.names[index] for index in self.client[part][keep])
        return Scores(clients, self.accuracy[part][keep], np.nan_to_num(self.samples[part][keep]), self.facts)

    def means(self, values: Floats) -> Floats:
        """The mean over clients of `accuracy` or `validation` in every round, NaN where there is none."""
        parts = (values[self._part(row)] for row in range(len(self.rounds)))
        means = [_mean(part[np.isfinite(part)]) for part in parts]
        return np.array([math.nan if mean is None else mean for mean in means])

    def row(self, view: View) -> int | None:
        """Which evaluated round a view looks at; the earliest where several are equally good."""
        if view == "last":
            evaluated = np.flatnonzero(np.isfinite(self.means(self.accuracy)))
            return int(evaluated[-1]) if len(evaluated) else None
        alike = self.comparable()
        guide = alike.means(alike.accuracy if view == "best_by_test" else alike.validation)
        best = np.nanargmax if self.facts.higher_is_better else np.nanargmin
        if not np.isfinite(guide).any():
            return None
        return int(np.flatnonzero(self.rounds == alike.rounds[best(guide)])[0])

    def scores(self, view: View) -> Scores:
        """The test scores in the round of a view; `NOBODY` where the view has no round."""
        row = self.row(view)
        if row is None:
            return NOBODY
        alike = self.comparable() if view != "last" else self
        return alike.at(int(np.flatnonzero(alike.rounds == self.rounds[row])[0]))

    def evaluated(self, view: View) -> tuple[str, ...]:
        """The clients with test data in the round of a view, including those whose score is undefined."""
        row = self._row_or_last(view)
        if row is None:
            return ()
        part = self._part(row)
        tested = np.isfinite(self.samples[part]) | np.isfinite(self.accuracy[part])
        return tuple(self.names[index] for index in self.client[part][tested])

    def further_means(self, view: View) -> dict[str, dict[str, Any]]:
        """Each further measure in the round of a view: its mean over the clients that have it, and their number."""
        row = self._row_or_last(view)
        if row is None:
            return {}
        parts = {name: values[self._part(row)] for name, values in self.further.items()}
        found = {name: part[np.isfinite(part)] for name, part in parts.items() if np.isfinite(part).any()}
        return {name: {"mean": rounded(_mean(part)), "clients": len(part)} for name, part in found.items()}

    def _row_or_last(self, view: View) -> int | None:
        """The round of a view; the view "last" has one even if no score is defined in any round."""
        row = self.row(view)
        return len(self.rounds) - 1 if row is None and view == "last" and len(self.rounds) else row

    def curve(self, label: str, band: bool = False) -> Curve:
        """Mean accuracy over rounds; the band is one standard deviation over clients to either side.

        Where clients were missing, it has the rounds that can be compared, with the same clients in each.
        """
        alike = self.comparable()
        rows = [row for row, mean in enumerate(alike.means(alike.accuracy)) if np.isfinite(mean)]
        rounds, accuracies = alike.rounds[rows], [alike.at(row).accuracy for row in rows]
        mean = np.array([values.mean() for values in accuracies])
        if not band:
            return Curve(label, rounds, mean)
        spread = np.array([values.std() for values in accuracies])
        low, high = self.facts.low, self.facts.high
        return Curve(
            label, rounds, mean, np.clip(mean - spread, low, high), np.clip(mean + spread, low, high)
        )

    def _part(self, row: int) -> slice:
        return slice(int(self.starts[row]), int(self.starts[row + 1]))


@dataclass(frozen=True)
class Metrics:
    """All series of a run, by moment and mode, in the order they were first logged."""

    series: dict[Key, Series]
    held_out: dict[Key, Series]
    names: dict[str, str] = field(default_factory=dict)  # client → its metric, where not all have accuracy
    stored: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # facts of the run's own metrics

    @property
    def facts(self) -> MetricFacts:
        """Direction and range of what clients are judged by."""
        return judged_by(self.names, self.stored)

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


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


# --- logs as tables -------------------------------------------------------------------------------------


FIRST_LINES = 200  # whose fields are taken for those of all


@dataclass(frozen=True)
class LogFormat:
    """The columns of a log."""

    entry: str  # what an error message calls a line
    schema: pa.Schema
    required: tuple[str, ...] = ()  # the columns that every line must have
    open: bool = False  # whether fields outside the schema are read too


_PART = pa.struct(
    {"accuracy": pa.float64(), "score": pa.float64(), "metric": pa.string(), "samples": pa.float64()}
)
METRICS = LogFormat(
    "a measurement",
    pa.schema(
        {
            "round": pa.int64(),
            "client": pa.string(),
            "when": pa.string(),
            "mode": pa.string(),
            "held_out": pa.bool_(),
            "test": _PART,
            "validation": _PART,
            "missing": pa.string(),
        }
    ),
    required=("round", "client", "when"),
    open=True,  # tasks log further measures
)
LEDGER = LogFormat(
    "an entry of the ledger",
    pa.schema(
        {
            "round": pa.int64(),
            "client": pa.string(),
            "direction": pa.string(),
            "purpose": pa.string(),
            "scalars": pa.int64(),
            "bytes": pa.int64(),
            "as_published": pa.int64(),
        }
    ),
    required=("round", "client", "direction", "purpose", "scalars", "bytes"),
)
TIMING = LogFormat("a timing", pa.schema({"round": pa.int64(), "seconds": pa.float64()}))


def read_table(path: Path, format: LogFormat) -> pa.Table:
    """A log as a table with a row per line; no rows where the file is absent.

    A last line without its end is a write in progress and is left out; any other broken line is an error.
    """
    if not path.parent.is_dir():
        raise RunError(f"there is no folder {path.parent}: give the folder of a run")
    if not path.exists():
        return format.schema.empty_table()
    for _ in log_lines(path):  # what the parser could not survive is refused here
        pass
    with path.open("rb") as file:
        try:
            return _parse(file, format)
        except pa.ArrowException:
            file.seek(0)
            lines = [line for line in file if line.endswith(b"\n")]
    try:
        return _parse(io.BytesIO(b"".join(lines)), format)
    except pa.ArrowException:
        raise _refusal(path, lines, format) from None


def _parse(file: BinaryIO, format: LogFormat) -> pa.Table:
    if not file.read(1):
        return format.schema.empty_table()
    file.seek(0)
    table = _all_fields(file, format.schema) if format.open else _read(file, format.schema, "ignore")
    for name in format.required:
        if table[name].null_count:
            raise pa.ArrowInvalid(f"it has no {name}")
    return table


def _read(file: BinaryIO, schema: pa.Schema, unexpected: str) -> pa.Table:
    """A log from its start; `unexpected` is what to do about fields outside the schema."""
    file.seek(0)
    return arrow_json.read_json(
        file,
        arrow_json.ReadOptions(use_threads=False),
        arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected),
    )


def _all_fields(file: BinaryIO, schema: pa.Schema) -> pa.Table:
    """A log with every field that a line has; a `ValueError` for one whose lines have ever more of them.

    Arrow takes memory for every field in every line, and a few bytes may name a new field. So the fields of the
    first lines are counted and taken for all; only if there are others, those of all lines are counted.
    """
    first = list(islice(file, FIRST_LINES))
    lines = len(first) + sum(1 for _ in file)
    size = file.tell()
    check_width(fields_in(first), lines, size)
    try:
        known = _read(io.BytesIO(b"".join(first)), schema, "infer").schema
        return _read(file, pa.schema([_as_floats(entry, schema.names) for entry in known]), "error")
    except pa.ArrowInvalid:
        file.seek(0)
        check_width(fields_in(file), lines, size)
        return _read(file, schema, "infer")


def _as_floats(entry: pa.Field, known: Sequence[str] = ()) -> pa.Field:
    """A field in which later lines may have any number where the first ones had whole ones, or none.

    Those that are `known` have their type.
    """
    kind = entry.type
    if pa.types.is_struct(kind):
        return entry.with_type(pa.struct([_as_floats(kind.field(place)) for place in range(kind.num_fields)]))
    whole = pa.types.is_integer(kind) or pa.types.is_null(kind)
    return entry.with_type(pa.float64()) if whole and entry.name not in known else entry


def _refusal(path: Path, lines: list[bytes], format: LogFormat) -> RunError:
    """The error that names the first broken line.

    Arrow does not say which line it refused. But once a line is refused, every longer part of the log is refused
    too, so bisection finds it.
    """

    def reason(last: int) -> str:
        try:
            _parse(io.BytesIO(b"".join(lines[: last + 1])), format)
        except pa.ArrowException as error:
            return re.sub(r"^JSON parse error: | in row \d+$", "", str(error))
        return ""

    broken = bisect_left(range(len(lines)), True, key=lambda last: reason(last) != "")
    where = f"{path}, line {broken + 1}"
    try:
        json.loads(lines[broken])
    except ValueError as error:
        return RunError(f"{where} is not JSON ({error}): repair or remove it")
    return RunError(f"{where} is not {format.entry} ({reason(broken)}): repair or remove it")


# --- metrics.jsonl --------------------------------------------------------------------------------------

_SERIES = ("held_out", "when", "mode")  # what tells one series from another
MOST_SERIES = 1000
_FURTHER = "further."  # in front of the column of a further measure


def kept_round(folder: Path) -> int | None:
    """The newest round whose models are in a run folder; None if there are none."""
    names = (about.parent.name.removeprefix("round-") for about in folder.glob("models/round-*/about.json"))
    return max((int(name) for name in names if name.isdecimal()), default=None)


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`, given as such or by its folder. Of a value logged twice the later one counts."""
    path = path if path.suffix == ".jsonl" and not path.is_dir() else path / "metrics.jsonl"
    with reading(path):
        return _metrics(path)


def _metrics(path: Path) -> Metrics:
    lines = _flat(read_table(path, METRICS))
    stored = (read_mapping(path.with_name(ENVIRONMENT)) or {}).get("metrics") or {}
    names = tuple(sorted(lines["client"].unique().to_pylist(), key=natural))
    lines = lines.append_column("place", pc.index_in(lines["client"], pa.array(names, pa.string())))
    first = lines.group_by(_SERIES).aggregate([("line", "min")]).sort_by("line_min")
    if len(first) > MOST_SERIES:
        raise ValueError(f"it has {len(first):,} pairs of moments and modes")
    judges = _metrics_by_client(lines, names)
    with reading(path.with_name(ENVIRONMENT)):
        facts = judged_by(judges, stored)
    series: dict[bool, dict[Key, Series]] = {False: {}, True: {}}
    for held_out, when, mode in zip(*(first[name].to_pylist() for name in _SERIES), strict=True):
        own = (pc.field("held_out") == held_out) & (pc.field("when") == when) & (pc.field("mode") == mode)
        series[held_out][when, mode] = _series(names, lines.filter(own), facts)
    return Metrics(series[False], series[True], judges, stored)


def judged_by(names: Mapping[str, str], stored: Mapping[str, Mapping[str, Any]] | None = None) -> MetricFacts:
    """The facts of what clients are judged by, given the metric of each (empty: accuracy)."""
    each = dict.fromkeys(names.values()) or [ACCURACY]
    return facts_of.common_facts([facts_of.metric_facts(name, stored) for name in each])


def _flat(table: pa.Table) -> pa.Table:
    """A column for every number in `test` and `validation`, and one that numbers the lines."""
    parts = table.flatten()
    measured = pc.or_(table["test"].is_valid(), table["validation"].is_valid())
    metric = pc.coalesce(parts["test.metric"], parts["validation.metric"], ACCURACY)
    columns = {
        "line": np.arange(len(parts)),
        "round": parts["round"],
        "client": parts["client"],
        "when": parts["when"],
        "mode": parts["mode"].fill_null("default"),
        "held_out": parts["held_out"].fill_null(False),
        "metric": pc.if_else(measured, metric, None),
        "accuracy": _score(parts, "test"),
        "samples": parts["test.samples"],
        "validation": _score(parts, "validation"),
        "missing": parts["missing"].is_valid(),
    }
    return pa.table(columns | _further(parts))


def _score(parts: pa.Table, part: str) -> pa.ChunkedArray:
    """The accuracy, or the score of a task that names its own metric, null where that is undefined."""
    score, accuracy = parts[f"{part}.score"], parts[f"{part}.accuracy"]
    return pc.if_else(parts[f"{part}.metric"].is_valid(), score, pc.coalesce(score, accuracy))


def _further(parts: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns of the other numbers in `test`, without the one that a client is judged by."""
    known = {"loss", *(entry.name for entry in _PART)} - {ACCURACY}
    metric = pc.coalesce(parts["test.metric"], ACCURACY)
    further = {}
    for entry in parts.schema:
        name = entry.name.removeprefix("test.")
        if entry.name != name and name not in known and _is_number(entry.type):
            values = parts[entry.name].cast(pa.float64())
            further[_FURTHER + name] = pc.if_else(pc.equal(metric, name), None, values)
    return further


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _series(names: tuple[str, ...], lines: pa.Table, facts: MetricFacts) -> Series:
    values = lines.sort_by([(name, "ascending") for name in ("round", "place", "line")])
    value = np.stack([values["round"].to_numpy(), values["place"].to_numpy()])
    latest = np.append(np.diff(value).any(0), True)  # of several lines with one round and client the last
    values = values.filter(pa.array(latest))
    rounds, starts = np.unique(values["round"].to_numpy(), return_index=True)
    absent = values.filter(pc.field("missing"))
    missing: dict[int, frozenset[str]] = {}
    for round_, client in zip(absent["round"].to_pylist(), absent["client"].to_pylist(), strict=True):
        missing[round_] = missing.get(round_, frozenset()) | {client}
    return Series(
        names=names,
        rounds=rounds,
        starts=np.append(starts, len(values)),
        client=values["place"].to_numpy(),
        accuracy=values["accuracy"].to_numpy(),
        samples=values["samples"].to_numpy(),
        validation=values["validation"].to_numpy(),
        further=_further_values(values),
        facts=facts,
        missing=missing,
    )


def _further_values(values: pa.Table) -> dict[str, Floats]:
    """The further measures that a series has, in the order they were first logged."""
    columns = {name: values[name] for name in values.column_names if name.startswith(_FURTHER)}
    found = {name: column for name, column in columns.items() if column.null_count < len(column)}
    first = {name: pc.min(values["line"].filter(column.is_valid())).as_py() for name, column in found.items()}
    return {
        name.removeprefix(_FURTHER): found[name].to_numpy() for name in sorted(found, key=first.__getitem__)
    }


def _metrics_by_client(lines: pa.Table, names: tuple[str, ...]) -> dict[str, str]:
    """What each client is measured by, by its last line; empty where all have accuracy."""
    measured = lines.select(["client", "metric"]).drop_null()
    if set(measured["metric"].unique().to_pylist()) <= {ACCURACY}:
        return {}
    newest = dict(zip(measured["client"].to_pylist(), measured["metric"].to_pylist(), strict=True))
    return {client: newest[client] for client in names if client in newest}


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sorting key that puts client 9 before client 10, and `site-9` before `site-10`."""
    chunks = re.findall(r"[0-9]{1,18}|[^0-9]+", name)  # Python refuses to read numbers of thousands of digits
    return tuple((0, int(chunk), chunk) if chunk.isdecimal() else (1, 0, chunk) for chunk in chunks)


# --- the small files of a run ---------------------------------------------------------------------------


def read_mapping(path: Path) -> dict[str, Any] | None:
    """A JSON mapping of a run; None when the file is absent."""
    if not path.exists():
        return None
    remedy = _remedy(path)
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise RunError(f"{path} is not a mapping; {remedy}")
    return value


def _remedy(path: Path) -> str:
    """What to do about a damaged file."""
    if path.name in (ENVIRONMENT, "split.json"):
        return start_remedy(path.parent)
    return _anew(path.parent) if path.name == CONTRACT else "repair or remove it"


def read_contract(folder: Path, environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `contract.json` says, None when it is absent; refused if it is not what `environment.json` knows."""
    path = folder / CONTRACT
    found, known = read_mapping(path), environment.get("contract")
    if found is not None and isinstance(known, str) and sha256(path) != known:
        raise RunError(f"{path} is damaged: its SHA-256 is not the one that was noted; {_anew(folder)}")
    return found


def _anew(folder: Path) -> str:
    onward = to_go_on(folder, portable=True)
    return f"put a whole copy of it back, or resume the run, which writes it anew: {onward}"


def start_remedy(folder: Path) -> str:
    """What to do about a damaged file that only the start of a run can write."""
    return f"put a whole copy of it back, or start a new run, with the settings in {folder / 'config.yaml'}"


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved experiment of a run, `config.yaml`."""
    path = folder / "config.yaml"
    if not path.exists():
        raise RunError(f"{folder} is not the folder of a run: it has no config.yaml; put it back")
    try:
        return read_yaml(path)
    except ConfigError as error:
        raise RunError(f"{error}; repair it") from error


def method_name(config: Mapping[str, Any]) -> str:
    """The name of the method in a resolved experiment."""
    method = config.get("method")
    return str(method.get("name") if isinstance(method, Mapping) else method)
