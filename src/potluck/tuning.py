"""Options left open: short pilot runs choose the value, from validation accuracy against bytes.

`d1: auto` of FedMRL is one. The smallest candidate that comes within a tolerance of the best one is taken, and the
whole curve is kept in `tuning.json`. Test accuracy plays no part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from potluck.errors import ConfigError, RunError
from potluck.record import read_json
from potluck.report.views import messages_block, read_metrics, rounded
from potluck.settings import Settings

if TYPE_CHECKING:
    from potluck.experiment import Experiment
    from potluck.world import World

FILE = "tuning.json"
PILOTS = "pilots"  # the folder of the pilot runs, while they last


def _read_width(value: Any) -> Any:
    """Clients are named by text; whatever is wrong is told in one sentence."""
    if isinstance(value, Mapping):
        value = {str(client): width for client, width in value.items()}
    inside = list(value.values()) if isinstance(value, dict) else value
    widths = inside if isinstance(inside, list | tuple) else [inside]
    whole = all(isinstance(width, int) and not isinstance(width, bool) and width >= 1 for width in widths)
    if value != "auto" and (not widths or not whole):
        raise ValueError("give a whole number from 1, a list of them, a mapping from client to one, or auto")
    return value


Width = Annotated[
    int | Literal["auto"] | tuple[int, ...] | dict[str, int], BeforeValidator(_read_width)
]  # one for all, one to be chosen, a list dealt out in turn, or one per client


def _ascending(value: tuple[int, ...]) -> tuple[int, ...]:
    if list(value) != sorted(set(value)):
        raise ValueError("the widths must grow from each to the next")
    return value


Ascending = Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)]


class TuneSettings(Settings):
    """How an open option is chosen."""

    candidates: Ascending = ()  # values to try; none: an eighth, a quarter, a half and all of the largest
    rounds: int = Field(default=5, ge=1)  # of each pilot run
    tolerance: float = Field(default=0.01, ge=0, lt=1)  # validation accuracy given up for a smaller value

    def values(self, largest: int) -> tuple[int, ...]:
        """The values to try where none may be above `largest`."""
        shares = (max(1, largest // part) for part in (8, 4, 2, 1))
        return self.candidates or tuple(dict.fromkeys(shares))


@dataclass(frozen=True)
class OpenOption:
    """An option of a method without a value: its name and the values to try, ascending."""

    name: str
    candidates: Sequence[int]
    how: TuneSettings


def require_validation(world: World, key: str) -> None:
    """Refuse to choose without anything to choose by."""
    if not any(world.samples(client)["validation"] for client in world.trainers):
        raise ConfigError(
            f"{key}: auto chooses by validation accuracy, and no client has validation rows; set "
            "partition.validation to a share such as 0.1, or give a number"
        )


def tune(
    experiment: Experiment,
    option: OpenOption,
    play: Callable[[Experiment], Path],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Play a pilot run of every candidate (`play` gives its folder) and say which one was chosen, and why."""
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
    floor = max(point["validation"] for point in curve) - tolerance - 1e-9  # equal but for rounding is within
    return int(min(point["value"] for point in curve if point["validation"] >= floor))


def settled(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with the value that was chosen in a run folder, where one was."""
    if not (folder / FILE).exists():
        return experiment
    choice = read_json(folder / FILE)
    return with_option(experiment, choice["option"], choice["chosen"])


def with_option(experiment: Experiment, name: str, value: Any) -> Experiment:
    """The same experiment with one option of its method set."""
    return experiment.variant(method=experiment.method.model_copy(update={name: value}))


def _pilot(experiment: Experiment, option: OpenOption, value: int) -> Experiment:
    """A short run of one candidate, examined once, at its end, in the way that is reported first."""
    rounds, modes = option.how.rounds, experiment.evaluate.modes
    first = "first" if isinstance(modes, str) else modes[:1]
    return with_option(experiment, option.name, value).variant(
        training=experiment.training.model_copy(update={"rounds": rounds}),
        evaluate=experiment.evaluate.model_copy(
            update={"every": rounds, "who": "all", "when": ("after_aggregation",), "modes": first}
        ),
    )


def _scored(folder: Path) -> dict[str, Any]:
    """What a pilot run reached, and what it sent: per client and round, and in all."""
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
