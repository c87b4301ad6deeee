"""Observers that end a run early: when it no longer gets better, and when time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, get_args

from potluck.core.settings import seconds_of
from potluck.engine.evaluation.checks import measured_by
from potluck.engine.evaluation.examined import Examined
from potluck.engine.evaluation.settings import EvaluateSettings, Moment, chosen_modes
from potluck.errors import ConfigError, RunError, check_whole_number, nearest
from potluck.federation.federation import Federation
from potluck.front_door import front_door
from potluck.runs.observers.base import Observer, RoundEnd, StopRun


class EarlyStopping(Observer):
    """Ends a run when the mean of a metric over clients was not better for `patience` evaluations in a row.

    `metric` is a name in the log, by default what the clients are judged by; whether higher or lower is better
    follows from it. Better means by more than `min_delta`. `mode` is a way to predict, by default the reported one.
    Clients that are held out do not count.
    A run that is resumed with the same rule ends where it would have ended without the interruption.
    """

    @front_door(apart=("patience", "min_delta"))
    def __init__(
        self,
        patience: int = 10,
        *,
        metric: str | None = None,
        min_delta: float = 0.0,
        split: str = "validation",
        moment: Moment = "after_aggregation",
        mode: str | None = None,
    ) -> None:
        check_whole_number("EarlyStopping: patience", patience)
        if not isinstance(min_delta, int | float):
            raise ConfigError(f"EarlyStopping: min_delta: give a number, not {min_delta!r}")
        if patience < 1 or not min_delta >= 0:
            raise ConfigError("EarlyStopping: patience must be at least 1, and min_delta at least 0")
        _one_of("split", split, ("validation", "test"))
        _one_of("moment", moment, get_args(Moment))
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self.split, self.moment, self.mode = split, moment, mode
        self._forget()

    def check(self, evaluate: EvaluateSettings, federation: Federation) -> None:
        """Refuse a metric, moment or mode that the run does not measure, before it begins."""
        population, known = federation.population, measured_by(federation)
        modes = chosen_modes(evaluate, federation.method.modes)
        if evaluate.when and self.moment not in evaluate.when:
            raise ConfigError(_other_moment(self.moment, evaluate.when[-1]))
        if self.mode is not None and self.mode not in modes:
            raise ConfigError(_other_mode(self.mode, modes))
        if not any(population.samples(client).get(self.split) for client in population.ids):
            raise ConfigError(_no_samples(self.split))
        if self.metric is not None and self.metric not in known:
            raise ConfigError(_other_metric(self.metric, known))

    def _forget(self) -> None:
        self.best: float | None = None
        self.best_round = self.waited = 0

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Forget other runs."""
        self._forget()

    def recall(self, found: Examined) -> None:
        """Count an evaluation from before the run was interrupted."""
        self.examined(found)
        self._decide()

    def examined(self, found: Examined) -> None:
        """Compare an evaluation with the best one before."""
        if found.when != self.moment:
            return
        value = self._mean(found)
        change = math.inf if self.best is None else value - self.best
        gain = change if self.best is None or found.facts(self.metric).higher_is_better else -change
        if gain > self.min_delta:
            self.best, self.best_round, self.waited = value, found.round, 0
        else:
            self.waited += 1

    def round(self, end: RoundEnd) -> None:
        """Stop if patience is over."""
        moments = [found.when for found in end.examined]
        if moments and self.moment not in moments:
            raise RunError(_other_moment(self.moment, moments[-1]))
        self._decide()

    def _decide(self) -> None:
        if self.waited >= self.patience:
            what = f"{self.split} {self.metric or 'score'}"
            raise StopRun(
                f"{what} was not better than in round {self.best_round} for {self.waited} evaluations"
            )

    def _mean(self, found: Examined) -> float:
        """The mean of the metric over clients."""
        parts = self._parts(found)
        names = [self.metric or str(part.get("metric", "accuracy")) for part in parts]
        values = [part.get(name) for part, name in zip(parts, names, strict=True)]
        measured = [float(value) for value in values if value is not None]
        if not measured:
            raise RunError(self._missing(found))
        return sum(measured) / len(measured)

    def _parts(self, found: Examined) -> list[Mapping[str, Any]]:
        """What the clients measured that train; those held out have no say in when to stop."""
        held_out = {line["client"] for line in found.lines if line.get("held_out")}
        parts = found.parts(self.split, self.mode)
        return [part for client, part in parts.items() if client not in held_out]

    def _missing(self, found: Examined) -> str:
        parts = self._parts(found)
        modes = {str(line["mode"]) for line in found.lines}
        if self.mode is not None and self.mode not in modes:
            return _other_mode(self.mode, modes)
        if not parts:
            return _no_samples(self.split)
        known = [name for name in parts[0] if name not in ("samples", "metric", "score")]
        return _other_metric(str(self.metric), known)


def _other_moment(moment: str, last: str) -> str:
    return f"EarlyStopping: add {moment} to evaluate.when, or watch {last}"


def _other_mode(mode: str, modes: Iterable[str]) -> str:
    return f"EarlyStopping: {mode!r} is not evaluated; {nearest(mode, modes)}"


def _no_samples(split: str) -> str:
    return f"EarlyStopping: no client has {split} samples; set partition.validation, or split='test'"


def _other_metric(metric: str, known: Iterable[str]) -> str:
    return f"EarlyStopping: no client measures {metric!r}; {nearest(metric, known)}"


class TimeLimit(Observer):
    """Ends a run before a round that would pass a limit of time if it took as long as the round before it.

    The limit is a number of seconds or a text such as "90m", "2h" or "1h30m". It counts from the start of this run
    or resume, and at least one round is trained. `potluck resume` continues.
    """

    def __init__(self, limit: float | str) -> None:
        self.limit, self.text = _limit(limit), str(limit)
        self._started = time.monotonic()

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def round(self, end: RoundEnd) -> None:
        """Stop if another round would be too long."""
        if time.monotonic() - self._started + end.seconds > self.limit:
            raise StopRun(f"the time limit of {self.text} leaves no room for another round")


def _limit(given: float | str) -> float:
    """A time limit in seconds."""
    seconds = seconds_of(given) if isinstance(given, str) else given
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds > 0:
        raise ConfigError(
            f"TimeLimit: {given!r} is not a duration; give seconds, or a text such as '90m' or '1h30m'"
        )
    return float(seconds)


def check_observers(observers: Sequence[Observer]) -> None:
    """Refuse what is no list of observers."""
    if not isinstance(observers, list | tuple):
        shown = type(observers).__name__ if isinstance(observers, Observer) else "EarlyStopping"
        raise ConfigError(f"observers: give a list of observers, such as [{shown}(…)], not {observers!r}")
    for one in observers:
        if not isinstance(one, Observer):
            made = isinstance(one, type) and issubclass(one, Observer)
            hint = f"write {one.__name__}()" if made else "make a class of it, derived from potluck.Observer"
            raise ConfigError(f"observers: {one!r} is not an observer; {hint}")


def check_rules(observers: Sequence[Observer], evaluate: EvaluateSettings, federation: Federation) -> None:
    """Refuse a rule for early stopping that the run could not follow."""
    for one in observers:
        if isinstance(one, EarlyStopping):
            one.check(evaluate, federation)


def _one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ConfigError(f"EarlyStopping: there is no {what} {given!r}; {nearest(given, known)}")
