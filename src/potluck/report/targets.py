"""What it costs to reach a score: the first evaluated round that did, and what had crossed for training by then."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from potluck.core.metrics import ACCURACY, MetricFacts
from potluck.errors import ConfigError
from potluck.report.comparison import over_seeds
from potluck.report.format import whole
from potluck.report.log import LEDGER, Floats, Series, read_config, read_metrics, read_table
from potluck.report.scores import DIRECTIONS, UNITS


def check_targets(targets: Sequence[float], facts: MetricFacts = ACCURACY) -> None:
    """Refuse a target that no score can reach, or that every score has reached."""
    for target in targets:
        worst = facts.low if facts.higher_is_better else facts.high
        if not facts.low <= target <= facts.high or target == worst:
            such = "above 0 and up to 1, such as 0.9" if facts == ACCURACY else _range(facts)
            raise ConfigError(f"the target {target:g} is not a score; give numbers {such}")


def _range(facts: MetricFacts) -> str:
    better = "higher" if facts.higher_is_better else "lower"
    return f"from {facts.low:g} to {facts.high:g}, as those of {facts.name} are, where {better} is better"


def with_targets(
    comparison: Mapping[str, Any], runs: Mapping[str, Sequence[Path]], targets: Sequence[float]
) -> dict[str, Any]:
    """Add to the result of `compare_runs` what each target cost each method; `runs` are the folders by method."""
    for folders in runs.values():
        check_targets(targets, read_metrics(folders[0]).facts)
    methods = [entry | {"targets": costs(runs[entry["method"]], targets)} for entry in comparison["methods"]]
    return {**comparison, "targets": list(targets), "methods": methods}


def costs(folders: Sequence[Path], targets: Sequence[float]) -> list[dict[str, Any]]:
    """For every target its cost in each run of a method, and the mean over the runs that reached it."""
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
    firsts = [_first(series, means, target) for target in targets]
    ledger = read_table(folder / "ledger.jsonl", LEDGER)
    unsent = int(key[0] == "before")  # that moment comes before the messages of its round
    return [None if first is None else {"round": first, **_sent(ledger, first - unsent)} for first in firsts]


def _first(series: Series, means: Floats, target: float) -> int | None:
    """The first evaluated round whose mean is as good as a target."""
    reached = (series.facts.reached(mean, target) for mean in means.tolist())
    return next((int(at) for at, yes in zip(series.rounds, reached, strict=True) if yes), None)


def _sent(ledger: pa.Table, last: int) -> dict[str, dict[str, int]]:
    """What all clients sent and received for training in the rounds up to the last: direction → unit → sum."""
    training = ledger.filter((pc.field("purpose") == "train") & (pc.field("round") <= last))
    parts = {direction: training.filter(pc.field("direction") == direction) for direction in DIRECTIONS}
    return {
        direction: {unit: pc.sum(part[unit], min_count=0).as_py() for unit in UNITS}
        for direction, part in parts.items()
    }


def _over_runs(runs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Means and deviations over the runs that reached the target, and the cost in each run."""
    reached = [run for run in runs.values() if run is not None]
    amounts = {
        direction: {unit: _spread([run[direction][unit] for run in reached]) for unit in UNITS}
        for direction in DIRECTIONS
    }
    return {
        "reached": len(reached),
        "round": _spread([run["round"] for run in reached]),
        **amounts,
        "runs": dict(runs),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and deviation over seeds; a whole mean is shown as an integer."""
    spread = over_seeds(values)
    return spread | {"mean": None if spread["mean"] is None else whole(spread["mean"])}
