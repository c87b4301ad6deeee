"""The blocks of `summary.json`: scores under every protocol, messages, and seconds per round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from potluck.core.metrics import metric_facts
from potluck.report.format import rounded, whole
from potluck.report.log import (
    LEDGER,
    NOBODY,
    TIMING,
    VIEWS,
    Key,
    Metrics,
    Series,
    natural,
    read_metrics,
    read_table,
)

UNITS = ("scalars", "bytes")
DIRECTIONS = ("up", "down")


def summarise(source: Path | Metrics, when: str | None = None, mode: str | None = None) -> dict[str, Any]:
    """The `accuracy` block of `summary.json`, for one moment and mode (by default those of `Metrics.headline`).

    Values are fractions rounded to six digits, None where undefined.

    - `last`: the mean over the clients evaluated in the last evaluated round; `coverage` says how many they are.
    - `best_by_validation`: the test accuracy in the round with the best mean validation accuracy.
    - `metrics`: what each client is measured by, where a task has a score of its own in place of accuracy; also
      for clients whose score is undefined.
    - `measured`: every moment and mode in its last evaluated round, where there are several.
    - `metric`: what clients are judged by; `metric_facts`: the direction and range of that and of `further`. Both
      only where there is more than accuracy.
    - `further`: what else the tasks measure, each as the mean over the clients that have it.
    - `missing`: who was to be measured and was not, in the last round and in every round in which somebody was
      missing; only where that happened. `last` is a mean over the others then, and the best rounds are looked for
      among rounds and clients that can be compared (`Series.comparable`).
    """
    metrics = source if isinstance(source, Metrics) else read_metrics(source)
    key = metrics.headline(when, mode)
    series = metrics.series.get(key) if key else None
    block: dict[str, Any] = {"when": key[0] if key else None, "mode": key[1] if key else None}
    block |= _views(series)
    if series and series.missing:
        block["missing"] = _missing(series)
    if series and metrics.names:
        block["metrics"] = {client: metrics.names[client] for client in series.evaluated("last")}
    if series and (further := series.further_means("last")):
        block["further"] = further
    if len(metrics.series) > 1:
        block["measured"] = [_brief(found, one) for found, one in metrics.series.items()]
    if series and (metrics.names or "further" in block):
        block |= {"metric": metrics.facts.name, "metric_facts": _facts(metrics, block.get("further", ()))}
    if key and key in metrics.held_out:
        held_out = metrics.held_out[key].scores("last")
        block["held_out"] = {"clients": len(held_out.clients), "last": rounded(held_out.mean())}
    return block


def _brief(key: Key, series: Series) -> dict[str, Any]:
    """One moment and mode in a few numbers."""
    last = series.scores("last")
    numbers = {"last": last.mean(), "std_over_clients": last.spread(), "worst_tenth": last.worst_tenth()}
    means = {name: rounded(value) for name, value in numbers.items()}
    return {"when": key[0], "mode": key[1], **means, "clients": len(last.clients)}


def _missing(series: Series) -> dict[str, Any]:
    """Who was not measured; `last` is about the round of that view."""
    row = series.row("last")
    last = series.missing.get(-1 if row is None else int(series.rounds[row]), frozenset())
    rounds = {str(round_): sorted(clients, key=natural) for round_, clients in series.missing.items()}
    return {"last": sorted(last, key=natural), "rounds": rounds}


def _facts(metrics: Metrics, further: Iterable[str]) -> dict[str, Any]:
    """Direction and range of everything the clients are measured by."""
    names = dict.fromkeys([*metrics.names.values(), *further])
    each = [metrics.facts, *(metric_facts(name, metrics.stored) for name in names)]
    return {one.name: one.to_json() for one in each}


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


def disagreement(said: Any, found: Any, place: str = "") -> str | None:
    """Where a block of numbers is not the one that was found in the logs, None if it is; it may lack entries.

    The last digit may differ: machines do not sum alike.
    """
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(said, Mapping) and isinstance(found, Mapping):
        pairs = ((key, value, found.get(key)) for key, value in said.items())
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        pairs = zip(range(len(said)), said, found, strict=True)
    else:
        return None if said == found or _is_close(said, found) else place
    places = (disagreement(one, other, f"{place}.{key}".lstrip(".")) for key, one, other in pairs)
    return next((where for where in places if where is not None), None)


def _is_close(said: Any, found: Any) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (said, found))
    return numbers and math.isclose(said, found, rel_tol=1e-5, abs_tol=2e-6)


def messages_block(path: Path) -> dict[str, Any]:
    """The `messages` block of `summary.json`: scalars and bytes up and down, a mean per client and round.

    The mean counts what crossed for training, over the pairs of client and round in which anything did. `total`
    has the sums of the whole run by purpose. `as_published` has the scalars that a paper counts, where a method
    was asked for them.
    """
    ledger = read_table(path, LEDGER)
    sums = ledger.group_by(["purpose", "direction"]).aggregate(
        [("scalars", "sum"), ("bytes", "sum"), ("as_published", "sum")]
    )
    sums = sums.sort_by([("purpose", "ascending"), ("direction", "ascending")]).to_pylist()
    trained = ledger.filter(pc.field("purpose") == "train")
    pairs = max(trained.group_by(["round", "client"]).aggregate([]).num_rows, 1)
    total: dict[str, dict[str, dict[str, int]]] = {}
    for row in sums:
        total.setdefault(row["purpose"], {})[row["direction"]] = {unit: row[f"{unit}_sum"] for unit in UNITS}
    training = total.get("train", {})
    means = {
        direction: {unit: whole(training.get(direction, {}).get(unit, 0) / pairs) for unit in UNITS}
        for direction in DIRECTIONS
    }
    return {**means, "total": total, **_as_published(sums, pairs)}


def _as_published(sums: Sequence[Mapping[str, Any]], pairs: int) -> dict[str, Any]:
    published: dict[str, int] = {}
    for row in sums:
        if row["as_published_sum"] is not None:
            published[row["direction"]] = published.get(row["direction"], 0) + row["as_published_sum"]
    shares = {direction: whole(amount / pairs) for direction, amount in sorted(published.items())}
    return {"as_published": shares} if shares else {}


def seconds_per_round(path: Path) -> float | None:
    """The median of `seconds` over rounds in `timing.jsonl`, as the first has the start-up; None without any."""
    timing = read_table(path, TIMING).drop_null()
    seconds = dict(zip(timing["round"].to_pylist(), timing["seconds"].to_pylist(), strict=True))
    return rounded(statistics.median(seconds.values())) if seconds else None
