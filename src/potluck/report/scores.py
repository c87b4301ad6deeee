"""Evaluation protocols: every one is a view of the log."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.errors import RunError

if TYPE_CHECKING:
    pass

from potluck.report.format import rounded, whole
from potluck.report.log import NOBODY, VIEWS, Metrics, Series, read_lines, read_metrics

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
