"""Pilot runs: short runs that choose the value of an option left open, before the run itself begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from potluck.core.open_options import OpenOption
from potluck.errors import RunError
from potluck.experiment.schema import Experiment
from potluck.files import read_json
from potluck.report.format import rounded
from potluck.report.log import read_metrics
from potluck.report.scores import messages_block

FILE = "tuning.json"
PILOTS = "pilots"  # folder of the pilot runs, removed when the value is chosen


def tune(
    experiment: Experiment,
    option: OpenOption,
    play: Callable[[Experiment], Path],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Play a pilot run of every candidate and choose one; what `tuning.json` says about it.

    `play` runs a pilot and gives its folder; `tell` hears how each one did.
    """
    curve = []
    for value in option.candidates:
        point = {"value": value} | _scored(play(_pilot(experiment, option, value)))
        curve.append(point)
        tell(
            f"{option.name} = {value}: validation accuracy {point['validation']:.1%} after "
            f"{option.how.rounds} rounds, {point['bytes']} bytes per client and round"
        )
    chosen = choose(curve, option.how.tolerance)
    tell(f"{option.name} = {chosen} is chosen")
    about = {"option": option.name, "chosen": chosen, "rounds": option.how.rounds}
    return about | {"tolerance": option.how.tolerance, "curve": curve}


def choose(curve: Sequence[dict[str, Any]], tolerance: float) -> int:
    """The smallest value whose validation accuracy is within the tolerance of the best.

    >>> curve = [{"value": 1, "validation": 0.5}, {"value": 2, "validation": 0.79}, {"value": 4, "validation": 0.8}]
    >>> choose(curve, 0.01), choose(curve, 0.0)
    (2, 4)
    """
    floor = max(point["validation"] for point in curve) - tolerance - 1e-9  # allow for rounding
    return int(min(point["value"] for point in curve if point["validation"] >= floor))


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with the value that pilot runs chose in this run folder, if they did."""
    if not (folder / FILE).exists():
        return experiment
    choice = read_json(folder / FILE)
    return with_option(experiment, choice["option"], choice["chosen"])


def with_option(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The experiment with one option of its method set."""
    return experiment.variant(method=experiment.method.model_copy(update={name: value}))


def _pilot(experiment: Experiment, option: OpenOption, value: int) -> Experiment:
    """A short run of one candidate, evaluated once, after its last round, in the reported mode."""
    rounds, modes = option.how.rounds, experiment.evaluate.modes
    first = "first" if isinstance(modes, str) else modes[:1]
    return with_option(experiment, option.name, value).variant(
        training=experiment.training.model_copy(update={"rounds": rounds}),
        evaluate=experiment.evaluate.model_copy(
            update={"every": rounds, "who": "all", "when": ("after_aggregation",), "modes": first}
        ),
        keep="none",
    )


def _scored(folder: Path) -> dict[str, Any]:
    """The validation accuracy of a pilot run, and what it sent: per client and round, and in total."""
    metrics = read_metrics(folder)
    key = metrics.headline()
    series = metrics.series[key] if key else None
    reached = math.nan if series is None else float(series.means(series.validation)[-1])
    if not math.isfinite(reached):
        raise RunError(
            f"{folder}: no client was measured on validation rows; nothing can be chosen from that"
        )
    messages = messages_block(folder / "ledger.jsonl")
    sent = {unit: messages["up"][unit] + messages["down"][unit] for unit in ("scalars", "bytes")}
    return {"validation": rounded(reached), **sent, "total": messages["total"]}
