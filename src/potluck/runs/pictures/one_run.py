"""Pictures of one run from its files, finished or not: split, scores of clients, time line, wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from matplotlib.figure import Figure

from potluck.errors import RunError
from potluck.files import read_json
from potluck.report.format import size
from potluck.report.log import LogFormat, read_contract, read_mapping, read_table
from potluck.report.pictures.clients import client_bars
from potluck.report.pictures.split import split_picture
from potluck.report.pictures.timeline import rounds_picture, trace_picture
from potluck.report.pictures.wire import Sizes, wire_picture
from potluck.report.reading import reading
from potluck.report.scores import messages_block
from potluck.report.split_chart import MOST
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
        blocks = _blocks(found)
        if blocks.counts:
            return blocks.picture()
    raise RunError(
        f"{path} counts no classes: the task of {run.folder} has none, or its data are at sites; draw another "
        "kind, such as clients"
    )


@dataclass
class _Blocks:
    """Samples per client and class: the first of both, as many as are drawn, and how many there are of each.

    Groups with their own data stand side by side, so that a table of all of them would be clients of all groups by
    classes of all groups, however short the file is.
    """

    counts: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    clients: int = 0
    classes: int = 0

    def add(self, group: Mapping[str, Any], own: Sequence[Mapping[str, Any]], with_data: bool) -> None:
        """Add a group, some of whose clients tell of their classes."""
        told = [client for client in own if client.get("counts")]
        classes = max((len(client["counts"]) for client in told), default=0)
        for client in told[: max(MOST - self.clients, 0)]:
            row = [0] * min(self.classes, MOST) + list(client["counts"])
            self.counts.append(row[:MOST])
            self.sizes.append(sum(client["counts"]))
            self.ids.append(str(client["id"]))
        if self.classes < MOST:
            self.names += _class_names(group, classes, with_data)[: MOST - self.classes]
        self.clients += len(told)
        self.classes += classes

    def picture(self) -> Figure:
        """The picture of it."""
        width = len(self.names)
        counts = [(row + [0] * width)[:width] for row in self.counts]
        return split_picture(counts, self.ids, self.names or None, (self.clients, self.classes), self.sizes)


def _blocks(found: Mapping[str, Any]) -> _Blocks:
    every = list(found.get("clients") or ())
    groups = found.get("groups") or [dict(found) | {"clients": len(every)}]
    blocks, start = _Blocks(), 0
    for group in groups:
        blocks.add(group, every[start : start + group["clients"]], len(groups) > 1)
        start += group["clients"]
    return blocks


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
    contract = read_contract(run.folder, read_mapping(run.folder / "environment.json") or {})
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
            trace, "Pauses below 1/2000 of the round are not drawn. Bars are not told apart by client."
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
