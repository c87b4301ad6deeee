"""Pilot runs: short runs that choose the value of an option left open, before the run itself begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from potluck.core.open_options import OpenOption, TuneSettings
from potluck.core.validation import checked
from potluck.errors import RunError
from potluck.experiment.schema import Experiment
from potluck.files import read_json
from potluck.report.format import counted, rounded
from potluck.report.log import read_metrics
from potluck.report.reading import reading
from potluck.report.scores import messages_block

FILE = "tuning.json"
PILOTS = "pilots"  # folder of the pilot runs, removed when the value is chosen


class _Point(BaseModel):
    """What `tuning.json` says of a candidate."""

    value: int
    validation: float
    scalars: float
    bytes: float


class _Choice(BaseModel):
    """The form of `tuning.json`."""

    option: str
    chosen: int
    rounds: int
    tolerance: float
    curve: list[_Point] = Field(min_length=1)


def tune(
    experiment: Experiment,
    option: OpenOption,
    play: Callable[[Experiment], Path],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Play a pilot run of every candidate and choose one; what `tuning.json` says about it.

    `play` runs a pilot and gives its folder; `tell` hears how each one did.
    """
    curve, better_high = [], True
    for value in option.candidates:
        folder = play(_pilot(experiment, option, value))
        point, better_high = {"value": value} | _scored(folder), read_metrics(folder).facts.higher_is_better
        curve.append(point)
        tell(
            f"{option.name} = {value}: validation accuracy {point['validation']:.1%} after "
            f"{counted(option.how.rounds, 'round')}, {point['bytes']} bytes per client and round"
        )
    chosen = choose(curve, option.how.tolerance, better_high)
    tell(f"{option.name} = {chosen} is chosen")
    about = {"option": option.name, "chosen": chosen, "rounds": option.how.rounds}
    return about | {"tolerance": option.how.tolerance, "curve": curve}


def choose(curve: Sequence[dict[str, Any]], tolerance: float, higher_is_better: bool = True) -> int:
    """The smallest value whose validation accuracy, or other score, is within the tolerance of the best.

    >>> curve = [{"value": 1, "validation": 0.5}, {"value": 2, "validation": 0.79}, {"value": 4, "validation": 0.8}]
    >>> choose(curve, 0.01), choose(curve, 0.0)
    (2, 4)
    >>> choose(curve, 0.0, higher_is_better=False)
    1
    """
    sign = 1 if higher_is_better else -1
    floor = max(sign * point["validation"] for point in curve) - tolerance - 1e-9  # allow for rounding
    return int(min(point["value"] for point in curve if sign * point["validation"] >= floor))


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with the value that pilot runs chose in this run folder, if they did."""
    if not (folder / FILE).exists():
        return experiment
    with reading(folder / FILE):
        choice = checked(
            _Choice,
            read_json(folder / FILE),
            folder / FILE,
            "what pilot runs chose",
            "put a whole copy of it back",
        )
        if choice["option"] not in type(experiment.method).model_fields:
            raise RunError(
                f"{folder / FILE} chooses {choice['option']!r}, which {experiment.method.name} does not have; put "
                "a whole copy of it back"
            )
        if getattr(experiment.method, choice["option"]) == "auto":
            _same_way(experiment, choice, folder)
        return with_option(experiment, choice["option"], choice["chosen"])


def _same_way(experiment: Experiment, choice: dict[str, Any], folder: Path) -> None:
    """Refuse a value that was chosen in another way than the experiment asks for."""
    for key in _how(experiment):
        wanted = getattr(experiment.method, key).model_dump()
        there = {name: choice[name] for name in ("rounds", "tolerance")}
        if wanted["candidates"]:
            there["candidates"] = tuple(point["value"] for point in choice["curve"])
        for name, value in there.items():
            if value != wanted[name]:
                raise RunError(
                    f"{folder} was run with other settings (method.{key}.{name}: {value} there, {wanted[name]} "
                    "here); choose another folder with --out, or remove that one"
                )


def with_option(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The experiment with one option of its method set; how it was to be chosen goes back to its default."""
    method, how = experiment.method, _how(experiment)
    return experiment.variant(method=method.model_copy(update={**how, name: value}))


def _how(experiment: Experiment) -> dict[str, Any]:
    """The options that say how an open option is chosen, and their defaults."""
    fields = type(experiment.method).model_fields.items()
    return {key: field.default for key, field in fields if field.annotation is TuneSettings}


def _pilot(experiment: Experiment, option: OpenOption, value: int) -> Experiment:
    """A short run of one candidate, evaluated once, after its last round, in the reported mode."""
    rounds, modes = option.how.rounds, experiment.evaluate.modes
    first = "first" if isinstance(modes, str) else modes[:1]
    return with_option(experiment, option.name, value).variant(
        track={},
        training=experiment.training.model_copy(update={"rounds": rounds}),
        evaluate=experiment.evaluate.model_copy(
            update={"every": rounds, "who": "all", "when": ("after_aggregation",), "modes": first}
            | {"predictions": "none"}
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
