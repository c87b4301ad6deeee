"""Pictures of several runs side by side: curves, cost, gains, differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.report.comparison import compare_runs
from potluck.report.format import moment
from potluck.report.pictures.clients import gain_bars
from potluck.report.pictures.cost import cost_picture
from potluck.report.pictures.curves import accuracy_over_rounds, curves_picture
from potluck.report.pictures.differences import interval_picture
from potluck.runs.pictures.asked import Asked, RunFiles
from potluck.runs.pictures.settings import labels


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
    each = [compare_runs({label: folders}, Rng(0), draws=1) for label, folders in _by_label(asked).items()]
    seeds = sorted({seed for one in each for seed in one["seeds"]})
    return each[0] | {"seeds": seeds, "methods": [entry for one in each for entry in one["methods"]]}


def _compared(asked: Asked) -> dict[str, Any]:
    """Runs as a comparison; the first of several runs is the reference, unless one is of Local."""
    if asked.comparison is not None:
        return asked.comparison.comparison
    if len(asked.runs) < 2:
        raise ConfigError(_no_pairs(asked))
    groups = _by_label(asked)
    baseline = "local" if "local" in groups else next(iter(groups))
    return compare_runs(groups, Rng(0).child("picture"), baseline)


def _by_label(asked: Asked) -> dict[str, list[Path]]:
    """The folders of runs by their labels; a run that has measured nothing is refused."""
    groups: dict[str, list[Path]] = {}
    for run, label in zip(asked.runs, labels(asked.runs), strict=True):
        run.check_measured()
        groups.setdefault(label, []).append(run.folder)
    return groups
