"""Pictures of one run from its files, finished or not: split, scores of clients, time line, wire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from matplotlib.figure import Figure

from potluck.errors import RunError
from potluck.files import read_json
from potluck.report.format import size
from potluck.report.log import LogFormat, read_mapping, read_table
from potluck.report.pictures.clients import client_bars
from potluck.report.pictures.split import split_picture
from potluck.report.pictures.timeline import rounds_picture, trace_picture
from potluck.report.pictures.wire import Sizes, wire_picture
from potluck.report.reading import reading
from potluck.report.scores import messages_block
from potluck.runs.observers.trace import TRACE
from potluck.runs.pictures.asked import Asked, RunFiles

AGAIN = "record it again with potluck.RoundTrace"
LARGEST_TRACE = 1 << 26  # bytes
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


def split(asked: Asked) -> Figure:
    """Who has which class, from `split.json`; of a comparison that of its first run."""
    run = asked.runs[0] if asked.comparison else asked.only
    path = run.folder / "split.json"
    found = read_mapping(path) or {}
    with reading(path):
        counts, ids, names = _blocks(found)
        if counts:
            return split_picture(counts, ids, names)
    raise RunError(
        f"{path} counts no classes: the task of {run.folder} has none, or its data are at sites; draw another "
        "kind, such as clients"
    )


def _blocks(found: Mapping[str, Any]) -> tuple[list[list[int]], list[str], list[str] | None]:
    """Samples per client and class, the clients, and the classes; groups with their own data stand side by side."""
    every = list(found.get("clients") or ())
    groups = found.get("groups") or [dict(found) | {"clients": len(every)}]
    names: list[str] = []
    rows: list[dict[int, int]] = []  # place of the class → samples
    ids: list[str] = []
    for group in groups:
        own, every = every[: group["clients"]], every[group["clients"] :]
        told, start = [client for client in own if client.get("counts")], len(names)
        names += _class_names(
            group, max((len(client["counts"]) for client in told), default=0), len(groups) > 1
        )
        rows += [dict(enumerate(client["counts"], start)) for client in told]
        ids += [str(client["id"]) for client in told]
    return [[row.get(place, 0) for place in range(len(names))] for row in rows], ids, names or None


def _class_names(group: Mapping[str, Any], classes: int, with_data: bool) -> list[str]:
    """What the classes of a group are called, with its data set where there are several."""
    known = [str(name) for name in group.get("class_names") or ()]
    names = known if len(known) == classes else [str(place) for place in range(classes)]
    return [f"{name} · {group['data']}" for name in names] if with_data else names


def clients(asked: Asked) -> Figure:
    """The score of each client in the last evaluated round."""
    run = asked.only
    values = run.scores["per_client"]
    if not values:
        raise run.no_score()
    return client_bars(values, run.measure)


def wire(asked: Asked) -> Figure:
    """What crosses in a round, from `contract.json` and the ledger."""
    run = asked.only
    contract = read_mapping(run.folder / "contract.json")
    if contract is None:
        raise RunError(
            f"{run.folder} has no contract.json; copy the folder again, or run the experiment again"
        )
    ledger = run.folder / "ledger.jsonl"
    with reading(run.folder / "contract.json"):
        sizes = _sizes(ledger)
        many = len((read_mapping(run.folder / "split.json") or {}).get("clients") or ()) or 1
        note = "Scalars are those of the client shown. Sizes are of whole messages of all clients, from the ledger."
        nothing = f"Nothing has crossed in this run{run.until_now}."
        return wire_picture(contract, sizes, many, _totals(ledger), note if sizes else nothing)


def _totals(ledger: Path) -> list[str]:
    """What crossed for training: the mean per client and round, and in the whole run."""
    found = messages_block(ledger)
    every = sum(part["bytes"] for directions in found["total"].values() for part in directions.values())
    if not every:
        return []
    mean = [f"{size(found[direction]['bytes'])} {direction}" for direction in ("down", "up")]
    return ["per client", "and round:", *mean, "", "whole run,", "evaluation too:", size(every)]


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
    return _traced(file) if file.exists() else _rounds(run)


def _traced(file: Path) -> Figure:
    trace = read_json(file, AGAIN, most=LARGEST_TRACE)
    with reading(file, AGAIN):
        if not isinstance(trace, dict) or not trace.get("lanes"):
            raise RunError(f"{file} holds no trace of a round; {AGAIN}")
        return trace_picture(
            trace, "Pauses below 1/2000 of the round are closed. Which client a bar is of is not recorded."
        )


def _rounds(run: RunFiles) -> Figure:
    timing = read_table(run.folder / "timing.jsonl", _TIMING)
    lines = list({line["round"]: line for line in timing.to_pylist()}.values())
    if not lines:
        raise RunError(
            f"{run.folder} has no finished round yet; wait for the first one, or go on with it: {run.onward}"
        )
    return rounds_picture(
        lines,
        "What a GPU did within a round was not recorded; for that, run with observers=[potluck.RoundTrace(2)].",
    )
