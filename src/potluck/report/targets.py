"""The cost of a score: the first evaluated round that reached it, and what had crossed for training until then."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from potluck.errors import ConfigError, RunError
from potluck.report.comparison import over_seeds
from potluck.report.format import whole
from potluck.report.log import read_config, read_lines, read_metrics

Amounts = dict[str, dict[str, int]]  # direction → scalars and bytes


def check_targets(targets: Sequence[float]) -> None:
    """Refuse what is no score."""
    for target in targets:
        if not 0 < target <= 1:
            raise ConfigError(
                f"the target {target:g} is no score; give numbers above 0 and up to 1, such as 0.9"
            )


def with_targets(
    comparison: Mapping[str, Any], runs: Mapping[str, Sequence[Path]], targets: Sequence[float]
) -> dict[str, Any]:
    """A comparison with what each target cost each method: takes what `views.compare_runs` gives, and its runs."""
    check_targets(targets)
    methods = [entry | {"targets": costs(runs[entry["method"]], targets)} for entry in comparison["methods"]]
    return {**comparison, "targets": list(targets), "methods": methods}


def costs(folders: Sequence[Path], targets: Sequence[float]) -> list[dict[str, Any]]:
    """For every target its cost in each run of a method, and their mean over the runs that reached it."""
    seeds = [json.dumps(read_config(folder).get("seed"), sort_keys=True) for folder in folders]
    found = [run_costs(folder, targets) for folder in folders]
    return [
        {"target": target, **_over_runs(dict(zip(seeds, runs, strict=True)))}
        for target, runs in zip(targets, zip(*found, strict=True), strict=True)
    ]


def run_costs(folder: Path, targets: Sequence[float]) -> list[dict[str, Any] | None]:
    """For every target the round that reached it and what had crossed by then; None where no round did.

    The score is the one the run is judged by (`Metrics.headline`): its mean over the clients evaluated, to six
    digits. Messages are summed over clients and rounds; those of evaluation and of setup do not count.
    """
    metrics = read_metrics(folder)
    key = metrics.headline()
    if key is None or key not in metrics.series:
        return [None for _ in targets]
    series = metrics.series[key]
    means = np.round(series.means(series.accuracy), 6)
    firsts = [next(iter(series.rounds[means >= target].tolist()), None) for target in targets]
    sent = sent_by_round(folder / "ledger.jsonl") if any(firsts) else {}
    unsent = int(key[0] == "before")  # that moment comes before the messages of its round
    return [None if first is None else {"round": first, **_until(sent, first - unsent)} for first in firsts]


def sent_by_round(path: Path) -> dict[int, Amounts]:
    """Round → what all clients sent and received for training."""
    sent: dict[int, Amounts] = defaultdict(_nothing)
    for number, record in read_lines(path):
        try:
            if record["purpose"] == "train":
                amounts = sent[int(record["round"])][record["direction"]]
                amounts["scalars"] += int(record["scalars"])
                amounts["bytes"] += int(record["bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{path}, line {number} is not an entry of the ledger: {error!r}") from None
    return dict(sent)


def _nothing() -> Amounts:
    return {direction: {"scalars": 0, "bytes": 0} for direction in ("up", "down")}


def _until(sent: Mapping[int, Amounts], last: int) -> Amounts:
    """The sums over all rounds up to the last."""
    total = _nothing()
    for amounts in (amounts for round_, amounts in sent.items() if round_ <= last):
        for direction, units in amounts.items():
            for unit, amount in units.items():
                total[direction][unit] += amount
    return total


def _over_runs(runs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Means and deviations over the runs that reached the target, and each run as it was."""
    reached = [run for run in runs.values() if run is not None]
    amounts = {
        direction: {unit: _spread([run[direction][unit] for run in reached]) for unit in ("scalars", "bytes")}
        for direction in ("up", "down")
    }
    return {
        "reached": len(reached),
        "round": _spread([run["round"] for run in reached]),
        **amounts,
        "runs": dict(runs),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    spread = over_seeds(values)
    return spread | {"mean": None if spread["mean"] is None else whole(spread["mean"])}
