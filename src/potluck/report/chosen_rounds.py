"""Scores at chosen rounds, for every moment and mode that was evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.report.comparison import over_seeds
from potluck.report.format import rounded
from potluck.report.log import Key, Series, read_metrics


def check_rounds(rounds: Sequence[int], last: int, every: int, who: str) -> None:
    """Refuse rounds that `who`, an experiment of `last` rounds with `evaluate.every`, does not evaluate."""
    for number in rounds:
        if not 1 <= number <= last:
            raise ConfigError(f"{who} has no round {number}; choose from 1 to {last}")
        if number % every and number != last:
            raise ConfigError(
                f"{who} does not evaluate round {number}; give multiples of evaluate.every, {every}, or {last}"
            )


def with_rounds(
    comparison: Mapping[str, Any], runs: Mapping[str, Sequence[Path]], rounds: Sequence[int]
) -> dict[str, Any]:
    """Add to the result of `compare_runs` the scores at these rounds; `runs` are the folders by method."""
    methods = [
        entry | {"rounds": scores_at(runs[entry["method"]], rounds)} for entry in comparison["methods"]
    ]
    return {**comparison, "rounds": list(rounds), "methods": methods}


def scores_at(folders: Sequence[Path], rounds: Sequence[int]) -> list[dict[str, Any]]:
    """For every moment and mode the mean score over clients at each of the rounds, and its spread over the runs."""
    found = [_by_round(folder) for folder in folders]
    keys = dict.fromkeys(key for run in found for key in run)
    return [
        {
            "when": when,
            "mode": mode,
            "scores": [
                _over_runs([run.get((when, mode), {}).get(number) for run in found]) for number in rounds
            ],
        }
        for when, mode in keys
    ]


def _by_round(folder: Path) -> dict[Key, dict[int, float]]:
    """Moment and mode → round → mean over the clients evaluated."""
    return {key: _finite_means(series) for key, series in read_metrics(folder).series.items()}


def _finite_means(series: Series) -> dict[int, float]:
    means = zip(series.rounds.tolist(), series.means(series.accuracy).tolist(), strict=True)
    return {number: mean for number, mean in means if math.isfinite(mean)}


def _over_runs(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return {**over_seeds(known), "runs": [rounded(value) for value in values]}
