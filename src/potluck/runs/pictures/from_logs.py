"""Pictures of what a run has logged: finished runs and running ones alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.files import read_json
from potluck.report.comparison import compare_runs
from potluck.report.format import capital, counted, moment, size
from potluck.report.log import LogFormat, read_mapping, read_table
from potluck.report.measures import Measure
from potluck.report.pictures.clients import client_bars, gain_bars
from potluck.report.pictures.cost import cost_picture
from potluck.report.pictures.curves import accuracy_over_rounds, curves_picture
from potluck.report.pictures.differences import interval_picture
from potluck.report.pictures.grids import Grid, heat_map
from potluck.report.pictures.options import OptionLine, Value, option_picture
from potluck.report.pictures.split import split_picture
from potluck.report.pictures.timeline import rounds_picture, trace_picture
from potluck.report.pictures.wire import Sizes, wire_picture
from potluck.report.reading import reading
from potluck.report.scores import messages_block
from potluck.runs.observers.trace import TRACE
from potluck.runs.pictures.asked import Asked, RunFiles
from potluck.runs.pictures.settings import flat, in_words, keys_over, labels, short, shown, varied

_TIMING = LogFormat(
    "a timing",
    pa.schema(
        {"round": pa.int64(), "train": pa.float64(), "evaluate": pa.float64(), "seconds": pa.float64()}
    ),
    required=("round", "seconds"),
)
_MESSAGES = LogFormat(
    "an entry of the ledger",
    pa.schema({"step": pa.string(), "direction": pa.string(), "bytes": pa.int64()}),
    required=("step", "direction", "bytes"),
)


# --- one run --------------------------------------------------------------------------------------------


def split(asked: Asked) -> Figure:
    """Who has which class, from `split.json`; of a comparison that of its first run."""
    run = asked.runs[0] if asked.comparison else asked.only
    path = run.folder / "split.json"
    found = read_mapping(path) or {}
    with reading(path):
        counts, ids, names = _blocks(found)
    if not counts:
        raise RunError(
            f"{path} counts no classes: the task of {run.folder} has none, or its data are at sites; draw "
            "another kind, such as clients"
        )
    return split_picture(counts, ids, names)


def _blocks(found: Mapping[str, Any]) -> tuple[list[list[int]], list[str], list[str] | None]:
    """Samples per client and class, the clients, and the classes; groups with their own data stand side by side."""
    every = list(found.get("clients") or ())
    groups = found.get("groups") or [dict(found) | {"clients": len(every)}]
    several, names, blocks, ids = len(groups) > 1, [], [], []
    for group in groups:
        own, every = every[: group["clients"]], every[group["clients"] :]
        counted_ = [client for client in own if client.get("counts")]
        width = max((len(client["counts"]) for client in counted_), default=0)
        words = [str(name) for name in group.get("class_names") or range(width)][:width]
        words += [str(place) for place in range(len(words), width)]
        names += [f"{word} · {group['data']}" if several else word for word in words]
        blocks.append([list(client["counts"]) for client in counted_])
        ids += [str(client["id"]) for client in counted_]
    total, start, rows = len(names), 0, []
    for block in blocks:
        for row in block:
            rows.append([0] * start + row + [0] * (total - start - len(row)))
        start += len(block[0]) if block else 0
    return rows, ids, names or None


def clients(asked: Asked) -> Figure:
    """The score of each client in the last evaluated round."""
    run = asked.only
    values = run.scores["per_client"]
    if not values:
        raise run.no_score()
    return client_bars(values, run.measure)


def wire(asked: Asked) -> Figure:
    """What crosses in a round, from `contract.json` and the ledger."""
    run = asked.runs[0] if asked.comparison and len(_methods(asked.runs)) == 1 else asked.only
    contract = read_mapping(run.folder / "contract.json")
    if contract is None:
        raise RunError(
            f"{run.folder} has no contract.json; copy the folder again, or run the experiment again"
        )
    with reading(run.folder / "contract.json"):
        sizes = _sizes(run.folder / "ledger.jsonl")
        every = run.environment.get("models")
        many = len(every) if isinstance(every, Mapping) else 1
        split_ = read_mapping(run.folder / "split.json") or {}
        many = len(split_.get("clients") or ()) or many
        note = "Scalars are those of the client shown. Sizes are of whole messages of all clients, from the ledger."
        if not sizes:
            note = "Nothing has crossed in this run" + ("." if run.finished else " so far.")
        return wire_picture(contract, sizes, many, _totals(run.folder / "ledger.jsonl"), note)


def _totals(ledger: Path) -> list[str]:
    """What crossed for training: the mean per client and round, and in the whole run."""
    found = messages_block(ledger)
    every = sum(part["bytes"] for directions in found["total"].values() for part in directions.values())
    if not every:
        return []
    mean = [f"{size(found[direction]['bytes'])} {direction}" for direction in ("down", "up")]
    return ["per client", "and round:", *mean, "", "whole run,", "evaluation too:", size(every)]


def _methods(runs: Sequence[RunFiles]) -> set[str]:
    return set(labels(runs))


def _sizes(ledger: Path) -> Sizes:
    sums = (
        read_table(ledger, _MESSAGES)
        .group_by(["step", "direction"])
        .aggregate([("bytes", "min"), ("bytes", "max")])
    )
    return {(row["step"], row["direction"]): (row["bytes_min"], row["bytes_max"]) for row in sums.to_pylist()}


def timeline(asked: Asked) -> Figure:
    """What the device did in a recorded round; without a record, what each round took."""
    run = asked.only
    file = run.folder if run.folder.is_file() else run.folder / TRACE
    if file.exists():
        trace = read_json(file, "record it again with potluck.RoundTrace")
        with reading(file, "record it again with potluck.RoundTrace"):
            if not isinstance(trace, dict) or not trace.get("lanes"):
                raise RunError(f"{file} holds no trace of a round; record one with potluck.RoundTrace")
            return trace_picture(
                trace,
                "Pauses below 1/2000 of the round are closed. Which client a bar is of is not recorded.",
            )
    timing = read_table(run.folder / "timing.jsonl", _TIMING)
    lines = list({line["round"]: line for line in timing.to_pylist()}.values())
    if not lines:
        raise RunError(
            f"{run.folder} has played no round yet; wait for its first one, or go on with it: {run.onward}"
        )
    return rounds_picture(
        lines,
        "What a GPU did within a round was not recorded; for that, run with observers=[potluck.RoundTrace(2)].",
    )


# --- several runs ---------------------------------------------------------------------------------------


def curves(asked: Asked) -> Figure:
    """Scores over rounds: of one run at every moment and mode, of several a line per method or setting."""
    if len(asked.runs) == 1:
        return _curves_of(asked.runs[0])
    found = _side_by_side(asked)
    several = len(found.get("seeds") or ()) > 1
    figure = curves_picture(found, "Band: from the lowest to the highest seed." if several else "")
    if figure is None:
        raise RunError("none of these runs has measured anything; give runs whose clients have test samples")
    return figure


def _curves_of(run: RunFiles) -> Figure:
    metrics = run.metrics
    first = metrics.headline()
    keys = sorted(metrics.series, key=lambda key: key != first)
    lines = [metrics.series[key].curve(f"{moment(key[0])}, by {key[1]}", band=key == first) for key in keys]
    if first in metrics.held_out:
        lines.append(metrics.held_out[first].curve("held-out clients"))
    if not any(len(line.rounds) for line in lines):
        raise run.no_score()
    return accuracy_over_rounds(
        lines, measure=run.measure, about="Band: one standard deviation over clients."
    )


def cost(asked: Asked) -> Figure:
    """Scores over rounds and over bytes."""
    figure = cost_picture(_side_by_side(asked))
    if figure is None:
        raise RunError(
            "nothing was sent for training in these runs, or nothing was measured; give runs of a method that "
            "sends something"
        )
    return figure


def gains(asked: Asked) -> Figure:
    """What each client gains over the reference."""
    figure = gain_bars(_compared(asked))
    if figure is None:
        raise RunError(_no_pairs(asked))
    return figure


def differences(asked: Asked) -> Figure:
    """The paired difference of each method to the reference, with its interval."""
    found = _compared(asked)
    if not any(entry.get("difference") for entry in found["methods"]):
        raise RunError(_no_pairs(asked))
    return interval_picture(found)


def _no_pairs(asked: Asked) -> str:
    return (
        f"{asked.kind} sets runs against a reference on the same split, and there is none here; give a comparison, "
        "or the folder of a run of Local and then the others"
    )


def _side_by_side(asked: Asked) -> dict[str, Any]:
    """Runs as the methods of a comparison, each over its seeds; they need not share their split."""
    if asked.comparison is not None:
        return asked.comparison.comparison
    for run in asked.runs:
        _ = run.metrics
    groups: dict[str, list[Path]] = {}
    for run, label in zip(asked.runs, labels(asked.runs), strict=True):
        groups.setdefault(label, []).append(run.folder)
    each = [compare_runs({label: folders}, Rng(0), draws=1) for label, folders in groups.items()]
    seeds = sorted({seed for one in each for seed in one["seeds"]})
    return each[0] | {"seeds": seeds, "methods": [entry for one in each for entry in one["methods"]]}


def _compared(asked: Asked) -> dict[str, Any]:
    """Runs as a comparison; the first of several runs is the reference, unless one is of Local."""
    if asked.comparison is not None:
        return asked.comparison.comparison
    if len(asked.runs) < 2:
        raise ConfigError(_no_pairs(asked))
    groups: dict[str, list[Path]] = {}
    for run, label in zip(asked.runs, labels(asked.runs), strict=True):
        _ = run.metrics
        groups.setdefault(label, []).append(run.folder)
    baseline = "local" if "local" in groups else next(iter(groups))
    return compare_runs(groups, Rng(0).child("picture"), baseline)


# --- over options ---------------------------------------------------------------------------------------


def option(asked: Asked) -> Figure:
    """Scores over the values of one setting, a line per method."""
    (key,) = keys_over(asked.runs, asked.options.over, 1)
    points: dict[str, dict[Value | None, list[float]]] = {}
    for run, label in zip(asked.runs, labels(asked.runs, [key]), strict=True):
        values = flat(run.config)
        value = _value(values[key]) if values.get(key) is not None else None
        points.setdefault(label, {}).setdefault(value, []).append(_score(run))
    lines = [_line(in_words(label), own) for label, own in points.items()]
    measure = asked.runs[0].measure
    lines.sort(key=lambda line: (line.flat, measure.rank(line.mean[-1])))
    about = _about(asked, measure, "; the band is one standard deviation over seeds")
    return option_picture(lines, key, measure, about, in_words("local"))


def _value(value: Any) -> Value:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else shown(value)


def _line(label: str, own: Mapping[Value | None, list[float]]) -> OptionLine:
    known: Mapping[Value | None, list[float]] = {
        value: scores for value, scores in own.items() if value is not None
    } or own
    numbers = all(isinstance(value, float) for value in known)
    ordered = sorted(known, key=lambda value: float(value or 0)) if numbers else list(known)
    means = tuple(math.fsum(known[value]) / len(known[value]) for value in ordered)
    spread = tuple(
        float(np.std(known[value], ddof=1)) if len(known[value]) > 1 else None for value in ordered
    )
    return OptionLine(label, tuple(ordered), means, spread)


def grid(asked: Asked) -> Figure:
    """Scores over the values of two settings, as a heat map per method."""
    down, across = keys_over(asked.runs, asked.options.over, 2)
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for run, label in zip(asked.runs, labels(asked.runs, [down, across]), strict=True):
        values = flat(run.config)
        if values.get(down) is not None and values.get(across) is not None:
            place = shown(values[down]), shown(values[across])
            found.setdefault(label, {}).setdefault(place, []).append(_score(run))
    if not found:
        raise ConfigError(f"no run has both {down} and {across}; name two settings of the same runs")
    keys = varied(asked.runs)
    maps = [_grid(label, own, short(down, keys), short(across, keys)) for label, own in found.items()]
    measure = asked.runs[0].measure
    return heat_map(maps, measure, _about(asked, measure))


def _grid(label: str, own: Mapping[tuple[str, str], list[float]], down: str, across: str) -> Grid:
    rows, columns = (list(dict.fromkeys(place[side] for place in own)) for side in (0, 1))
    values = tuple(
        tuple(float(np.mean(own[row, column])) if (row, column) in own else None for column in columns)
        for row in rows
    )
    return Grid(in_words(label), tuple(rows), tuple(columns), values, down, across)


def _score(run: RunFiles) -> float:
    last: float | None = run.scores["last"]
    if last is None:
        raise run.no_score()
    return last


def _about(asked: Asked, measure: Measure, more: str = "") -> str:
    seeds = len({str(run.config.get("seed")) for run in asked.runs})
    if seeds < 2:
        return f"{capital(measure.with_unit)}: mean over clients, last round, one seed."
    return f"{capital(measure.with_unit)}: mean over clients and {counted(seeds, 'seed')}, last round{more}."
