"""Comparisons as pandas frames: every client of every run, and a row per method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from potluck.errors import RunError
from potluck.report.log import ACCURACY, Key, Metrics, Series, View, read_metrics

Row = dict[str, Any]
FORMULAS = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
)  # how texts begin that a spreadsheet computes instead of showing them


def csv_of(frame: pd.DataFrame) -> bytes:
    """A frame as CSV; a text that a spreadsheet would compute gets an apostrophe, as one types it there."""
    shown = frame.map(_as_text)
    shown.columns = pd.Index([_as_text(str(name)) for name in shown.columns])
    return str(shown.to_csv(index=False)).encode()


def _as_text(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value


def comparison_frame(folder: Path, comparison: Mapping[str, Any]) -> pd.DataFrame:
    """A row per method, seed, client, moment and mode, in the round that the comparison looks at.

    Each has its measures (`accuracy`, or those of its task), the number of test samples, and `difference`: the
    score minus that of the same client under the reference (`against`), at the same moment.
    """
    runs = {entry["method"]: entry for entry in comparison["methods"]}
    read = {
        (name, seed): read_metrics(_there(folder / place))
        for name, entry in runs.items()
        for seed, place in entry["runs"].items()
    }
    view, keys = comparison.get("view", "last"), _own_keys(comparison)
    references = {key: _by_client(metrics, view) for key, metrics in read.items()}
    rows = [
        {**_names(runs[name], keys), "seed": _seed(seed), "against": runs[name].get("against"), **row}
        | _difference(row, references.get((runs[name].get("against"), seed)))
        for (name, seed), metrics in read.items()
        for row in client_rows(metrics, view)
    ]
    frame = pd.DataFrame(rows).drop(columns="score")
    first = ["method", *keys, "seed", "client", "moment", "mode", "round", "metric"]
    last = ["difference", "against", "held_out", "samples"]
    return frame[[*first, *(name for name in frame.columns if name not in {*first, *last}), *last]]


def _there(run: Path) -> Path:
    """The folder of a run, or its log; refuses one that is gone."""
    for path in (run, run / "metrics.jsonl"):
        if not path.exists():
            raise RunError(f"{path} is gone: put it back, or remove {run} and run potluck compare again")
    return run


def _own_keys(comparison: Mapping[str, Any]) -> list[str]:
    """The columns that tell variants apart: the name of the method, and the keys that some variant changes."""
    entries = comparison["methods"]
    keys = dict.fromkeys(key for entry in entries for key in entry.get("settings") or ())
    named = keys or any(entry.get("method_name", entry["method"]) != entry["method"] for entry in entries)
    return [*(["method.name"] if named else []), *keys]


def _names(entry: Mapping[str, Any], keys: Sequence[str]) -> Row:
    """The label of a row, and its values of these columns."""
    values = {"method.name": entry.get("method_name")} | (entry.get("settings") or {})
    return {"method": entry["method"]} | {key: values.get(key) for key in keys}


def _measured(one: Mapping[str, Any]) -> Row:
    """When and how the scores of a row were measured."""
    return {"moment": one["when"], "mode": one["mode"]}


def _seed(seed: str) -> Any:
    return int(seed) if seed.isdecimal() else seed


def client_rows(metrics: Metrics, view: View) -> Iterator[Row]:
    """Every client at every moment and mode of a run, in the round of the view."""
    for held_out, found in ((False, metrics.series), (True, metrics.held_out)):
        for key, series in found.items():
            row = series.row(view)
            if row is not None:
                yield from _rows(key, series, row, metrics.names, held_out)


def _rows(key: Key, series: Series, row: int, names: Mapping[str, str], held_out: bool) -> Iterator[Row]:
    start, end = int(series.starts[row]), int(series.starts[row + 1])
    for place in range(start, end):
        client = series.names[series.client[place]]
        metric, score = names.get(client, ACCURACY), float(series.accuracy[place])
        yield {
            "client": client,
            "moment": key[0],
            "mode": key[1],
            "round": int(series.rounds[row]),
            "metric": metric,
            "score": score,
            metric: score,
            **{name: float(values[place]) for name, values in series.further.items() if name != metric},
            "held_out": held_out,
            "samples": float(series.samples[place]),
        }


def _by_client(metrics: Metrics, view: View) -> dict[tuple[str, str], float]:
    """Client and moment → score, in the reported mode."""
    headline = metrics.headline()
    rows = client_rows(metrics, view)
    return {
        (row["client"], row["moment"]): row["score"]
        for row in rows
        if headline and row["mode"] == headline[1]
    }


def _difference(row: Row, reference: Mapping[tuple[str, str], float] | None) -> Row:
    other = (reference or {}).get((row["client"], row["moment"]))
    return {"difference": None if other is None else row["score"] - other}


def summary_frame(comparison: Mapping[str, Any]) -> pd.DataFrame:
    """A row per method, moment and mode: means over clients and seeds, and the paired difference."""
    keys = _own_keys(comparison)
    rows = [
        {
            **_names(entry, keys),
            **_measured(one),
            "reported": (one["when"], one["mode"]) == (entry["when"], entry["mode"]),
            "clients": one.get("clients"),
            "mean": one["accuracy"]["mean"],
            "std_over_seeds": one["accuracy"]["std_over_seeds"],
            "std_over_clients": one["std_over_clients"]["mean"],
            "worst_tenth": one["worst_tenth"]["mean"],
            "against": entry.get("against"),
            **_interval(one.get("difference")),
            **{f"{way}_bytes": round(entry["messages"][way]["bytes"]) for way in ("up", "down")},
            "seconds_per_round": entry.get("seconds_per_round"),
        }
        for entry in comparison["methods"]
        for one in entry["measured"]
    ]
    return pd.DataFrame(rows)


def _interval(difference: Mapping[str, Any] | None) -> Row:
    known = difference or {}
    return {"difference": known.get("mean")} | {name: known.get(name) for name in ("low", "high", "tie")}


def targets_frame(comparison: Mapping[str, Any]) -> pd.DataFrame:
    """A row per method and target: the round that reached it, and what was sent for training until then."""
    keys = _own_keys(comparison)
    rows = [
        {
            **_names(entry, keys),
            **_measured(entry),
            "target": cost["target"],
            "seeds": len(cost["runs"]),
            "reached": cost["reached"],
            "round": cost["round"]["mean"],
            "round_std": cost["round"]["std_over_seeds"],
            **{
                f"{unit}_{way}": cost[way][unit]["mean"]
                for unit in ("scalars", "bytes")
                for way in ("up", "down")
            },
        }
        for entry in comparison["methods"]
        for cost in entry["targets"]
    ]
    return pd.DataFrame(rows)


def rounds_frame(comparison: Mapping[str, Any]) -> pd.DataFrame:
    """A row per method, moment, mode and chosen round."""
    keys = _own_keys(comparison)
    rows = [
        {
            **_names(entry, keys),
            **_measured(one),
            "round": number,
            "mean": score["mean"],
            "std_over_seeds": score["std_over_seeds"],
        }
        for entry in comparison["methods"]
        for one in entry["rounds"]
        for number, score in zip(comparison["rounds"], one["scores"], strict=True)
    ]
    return pd.DataFrame(rows)


def gains_frame(comparison: Mapping[str, Any]) -> pd.DataFrame:
    """A row per method that is compared: how many clients are better, equal and worse, a client once per seed."""
    keys = _own_keys(comparison)
    rows = [
        {
            **_names(entry, keys),
            **_measured(entry),
            "against": entry["against"],
            **{sign: entry["by_client"][sign] for sign in ("better", "equal", "worse")},
        }
        for entry in comparison["methods"]
        if entry.get("by_client")
    ]
    return pd.DataFrame(rows)
