"""Evaluation, both halves: what a client measures, and whom the server asks at which moment of a round.

Every value is logged per client, round, moment and mode; means, spreads and "best" are views of that log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client, SplitName
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.metrics import MetricFacts, common_facts, metric_facts
from potluck.core.own_metrics import MetricFailed, OwnMetric, told_by
from potluck.core.settings import Settings
from potluck.core.task import Batch, Task
from potluck.engine.acceptance import no_message
from potluck.engine.lapses import Lapses
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Answer, Examination, Failure, Outcome
from potluck.engine.retries import Tries, Waits
from potluck.engine.rounds import Rounds
from potluck.errors import ConfigError, RunError, nearest
from potluck.federation.federation import Federation
from potluck.training.collect import collect

Moment = Literal["before", "after_training", "after_aggregation"]
Line = dict[str, Any]  # one line of a log
# What is gathered for metrics beside those of the task, and for predictions.
RAW = ("raw scores", "raw labels")
SPLITS = ("test", "validation")
SLACK = 1e-5  # by how much rounding may take a metric out of its range
# Tasks with predictions to keep.
PREDICTED = ("classification", "text-classification", "multi-label", "regression")


class EvaluateSettings(Settings):
    """When clients are measured, and on what.

    `before`: with the newest downlink, before training. `after_training`: the clients that trained, as they are
    then, before the server combines. `after_aggregation`: with the new downlink. `who` chooses between all
    clients and the round's cohort for the first and the last.
    """

    every: int = Field(default=1, ge=1)
    who: Literal["all", "sampled"] = "all"
    when: tuple[Moment, ...] = ("after_training", "after_aggregation")
    on: Literal["own", "global"] = "own"
    modes: Literal["first", "all"] | tuple[str, ...] = "first"  # ways to predict; "first": the reported one
    judge: str | None = None  # the metric that clients are compared by; none: the first one of their task
    predictions: Literal["none", "last", "all"] = "none"  # of which evaluated rounds they are kept

    @field_validator("when", "modes", mode="before")
    @classmethod
    def _some(cls, value: Any, info: ValidationInfo) -> Any:
        """The name of a moment or mode stands for a list of one."""
        if value in ([], ()):
            known = get_args(Moment) if info.field_name == "when" else ("first", "all", "the method's modes")
            raise ValueError(f"nothing would be measured; give one or more of: {', '.join(known)}")
        return [value] if isinstance(value, str) and value not in ("first", "all") else value

    @field_validator("predictions", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        """`true`: those of the last evaluated round."""
        return {True: "last", False: "none"}.get(value, value) if isinstance(value, bool) else value


def check_modes(settings: EvaluateSettings, method: Method) -> None:
    """Refuse an inference mode that the method does not have."""
    for mode in chosen_modes(settings, method.modes):
        if mode not in method.modes:
            raise ConfigError(
                f"evaluate.modes: {method.name} has no mode {mode!r}; {nearest(mode, method.modes)}"
            )


def chosen_modes(settings: EvaluateSettings, known: tuple[str, ...]) -> tuple[str, ...]:
    """The inference modes to evaluate, the reported one first."""
    named = {"first": known[:1], "all": known}
    return named[settings.modes] if isinstance(settings.modes, str) else settings.modes


def check_evaluation(settings: EvaluateSettings, federation: Federation) -> None:
    """Refuse modes, a judge or predictions that the method or the clients' tasks do not have."""
    check_modes(settings, federation.method)
    population, own = federation.population, federation.clients.metrics
    tasks = {client: population.task_of(client) for client in population.first_clients}
    known = dict.fromkeys([*own, *(name for task in tasks.values() for name in told_by(task.rules.told))])
    if settings.judge is not None and settings.judge not in known:
        raise ConfigError(
            f"evaluate.judge: no client is measured by {settings.judge!r} (further ones are named under "
            f"metrics); {nearest(settings.judge, known)}"
        )
    _check_directions(_judges(settings, federation))
    for client, task in tasks.items() if settings.predictions != "none" else ():
        if task.kind not in PREDICTED:
            raise ConfigError(
                f"evaluate.predictions: none are kept for {task.kind}, the task of client {client}"
            )


def judged_by(settings: EvaluateSettings, federation: Federation) -> MetricFacts:
    """Direction and range of what the clients of an experiment will be compared by."""
    return common_facts([*_judges(settings, federation).values()])


def _judges(settings: EvaluateSettings, federation: Federation) -> dict[ClientId, MetricFacts]:
    """What one client of each group will be judged by."""
    population, own = federation.population, federation.clients.metrics
    found = {}
    for client in population.first_clients:
        task = population.task_of(client)
        told = (*told_by(task.rules.told), *(name for name, metric in own.items() if metric.fits(task)))
        name = settings.judge if settings.judge in told else told[0]
        found[client] = own[name].facts if name in own else metric_facts(name)
    return found


def _check_directions(judges: Mapping[ClientId, MetricFacts]) -> None:
    """Refuse to judge some clients by a metric that is better high, and others by one that is better low."""
    first = {facts.higher_is_better: (client, facts.name) for client, facts in reversed([*judges.items()])}
    if len(first) == 2:
        (high, above), (low, below) = first[True], first[False]
        raise ConfigError(
            f"evaluate.judge: client {low} would be judged by {below}, where lower is better, and client {high} "
            f"by {above}, where higher is better: no mean says which round is best; leave judge out, or choose "
            "one that all clients have, such as loss"
        )


# --- the client's half ----------------------------------------------------------------------------------


def measure(
    method: Method,
    client: Client,
    modes: tuple[str, ...],
    on: str,
    own: Sequence[OwnMetric] = (),
    predictions: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The numbers of the client's task per mode and split, on the device: `mode/split/correct`.

    Metrics beside those of the task are computed on the host, from the scores of the whole split; only then are
    scores gathered at all. Second, where predictions are asked for, scores and labels: `mode/split/scores`.
    """
    numbers: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    whole = bool(own) or predictions
    splits: tuple[SplitName, ...] = ("validation", "test")
    for split in splits:
        rows = "global" if on == "global" and split == "test" else split
        parts = collect(client, partial(_measure_batch, method, client, modes, whole), rows)  # type: ignore[arg-type]
        for mode, found in zip(modes, _put_together(client.task, parts, len(modes), whole), strict=False):
            place = f"{mode}/{split}"
            scores, labels = (found.pop(name) for name in RAW) if whole else (None, None)
            concluded = client.task.rules.conclude(found)
            numbers |= {f"{place}/{name}": value.double() for name, value in concluded.items()}
            if own and scores is not None and labels is not None:
                numbers |= _own_numbers(own, scores, labels, client, place)
            if predictions and scores is not None and labels is not None:
                seen |= {f"{place}/scores": scores, f"{place}/labels": labels}
    return numbers, seen


def _own_numbers(
    own: Sequence[OwnMetric], scores: Tensor, labels: Tensor, client: Client, place: str
) -> dict[str, Tensor]:
    """The values of metrics beside those of the task. Here the host waits for the device."""
    here = scores.cpu(), labels.cpu()
    values = {f"{place}/{metric.facts.name}": _value(metric, *here, client) for metric in own}
    return {
        name: torch.tensor(value, dtype=torch.float64, device=client.device) for name, value in values.items()
    }


def _value(metric: OwnMetric, scores: Tensor, labels: Tensor, client: Client) -> float:
    """The value of one metric; NaN if it fails, and then the report has the error."""
    try:
        return metric.value(scores, labels, client.task)
    except MetricFailed as error:
        client.report.errors[metric.facts.name] = str(error)
        return math.nan


def _measure_batch(method: Method, client: Client, modes: tuple[str, ...], whole: bool, batch: Batch) -> Any:
    """What a batch contributes in all modes: its sums as one tensor, then tensors that have a row per sample.

    With `whole` these include the scores and labels themselves.
    """
    scores = [method.predict(client, batch, mode).float() for mode in modes]
    found = [client.task.measure(one, batch.y) for one in scores]
    if whole:
        found = [
            one | dict(zip(RAW, (given, batch.y), strict=True))
            for one, given in zip(found, scores, strict=True)
        ]
    added, rows = client.task.rules.sums(client.task.classes), _rows(client.task, whole)
    sums = torch.cat([one[name].double().reshape(-1) for one in found for name in added])
    return (sums, *(one[name] for one in found for name in rows)) if rows else sums


def _rows(task: Task, whole: bool) -> tuple[str, ...]:
    """What a batch gives one row per sample of."""
    return (*task.rules.whole, *RAW) if whole else task.rules.whole


def _put_together(task: Task, parts: Sequence[Any], modes: int, raw: bool = False) -> list[dict[str, Tensor]]:
    """What all batches contributed, one mapping per mode; an empty list without batches."""
    if not parts:
        return []
    added, whole = task.rules.sums(task.classes), _rows(task, raw)
    columns = list(zip(*parts, strict=True)) if whole else [parts]
    sums = columns[0][0] if len(parts) == 1 else torch.stack(list(columns[0])).sum(0)
    pieces = iter(sums.split([math.prod(shape) for shape in added.values()] * modes))
    rows = iter([torch.cat(list(column)) for column in columns[1:]])
    return [
        {name: next(pieces).view(shape) for name, shape in added.items()}
        | {name: next(rows) for name in whole}
        for _ in range(modes)
    ]


# --- the server's half ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """What a client predicted in one mode, sample by sample of a split; `rows` number those of its data set."""

    client: ClientId
    mode: str
    split: str
    task: Task
    rows: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    own_rows: np.ndarray | None = None  # their numbers in the client's own file, where these differ


@dataclass(frozen=True)
class Examined:
    """What clients measured at one moment of a round.

    `lines` are those of `metrics.jsonl`: one per client and mode, the reported mode first.
    """

    round: int
    when: Moment
    lines: tuple[Line, ...]
    predictions: tuple[Predictions, ...] = ()  # where the settings keep them
    own: Mapping[str, MetricFacts] = field(default_factory=dict)  # facts of the experiment's own metrics
    missing: tuple[Line, ...] = ()  # a line for every client and mode that was to be measured and was not

    @property
    def absent(self) -> dict[ClientId, str]:
        """Who was to be measured and was not, and why."""
        return {line["client"]: line["missing"] for line in self.missing}

    def facts(self, metric: str | None = None) -> MetricFacts:
        """Direction and range of a metric, by default of what the clients are judged by."""
        parts = [line[split] for line in self.lines for split in SPLITS if split in line]
        judges = dict.fromkeys(str(part.get("metric", "accuracy")) for part in parts)
        names = judges if metric is None else [metric]
        return common_facts([self.own.get(name) or metric_facts(name) for name in names])

    def parts(self, split: str = "test", mode: str | None = None) -> dict[ClientId, Line]:
        """The measures of each client that has rows of a split, in the reported mode or another one."""
        mode = self.lines[0]["mode"] if mode is None and self.lines else mode
        return {line["client"]: line[split] for line in self.lines if line["mode"] == mode and split in line}

    def scores(self, split: str = "test", mode: str | None = None) -> dict[ClientId, float]:
        """The score of each client that has one: its accuracy, or what its task is judged by."""
        found = {client: score_of(part) for client, part in self.parts(split, mode).items()}
        return {client: score for client, score in found.items() if score is not None}


class Examiner:
    """Has the clients of a run measured, and makes log lines of what they answer."""

    def __init__(
        self,
        rounds: Rounds,
        settings: EvaluateSettings,
        last: int,
        notice: Callable[[str], None],
        attempts: int = 1,
        waits: Waits | None = None,
        quorum: float = 0.0,
    ) -> None:
        """`last` is the last round of the run, which is always evaluated; `notice` hears who was not measured.

        Clients that gave no answer are asked `attempts` times, with `waits` in between; where fewer than `quorum`,
        a share of them, have answered, as long as the waits' patience lasts.
        """
        self.attempts, self.waits = attempts, waits if waits is not None else Waits()
        self.quorum = quorum
        self.others: Mapping[
            ClientId, str
        ] = {}  # clients that belong here and cannot be asked, with the reason
        self._away: set[ClientId] = set()  # who gave no answer the last time
        self._lapses = Lapses()
        self.rounds, self.federation = rounds, rounds.federation
        self.settings, self.last, self.notice = settings, last, notice
        self.modes = chosen_modes(settings, rounds.federation.method.modes)
        self.metrics = rounds.federation.clients.metrics
        self.facts = {name: metric.facts for name, metric in self.metrics.items()}
        self._told: set[tuple[str, str]] = set()  # what was said of which metric

    def examine(
        self, when: Moment, cohort: Sequence[ClientId], round_: int, attempt: int, ledger: Ledger
    ) -> list[Examined]:
        """Measure clients at one moment of a round; an empty list where the settings do not ask for it."""
        if not self.is_due(round_) or when not in self.settings.when:
            return []
        everyone = self.settings.who == "all" and when != "after_training"
        ids = self.federation.population.ids if everyone else cohort
        asked = self._examinations(when, ids, round_, attempt, ledger)
        unasked = {one.client: one for one in asked if isinstance(one, Failure)}
        outcomes = self._answered([one for one in asked if isinstance(one, Examination)], round_) | unasked
        absent = {one.client: one.reason for one in outcomes.values() if isinstance(one, Failure)}
        for reason in absent.values():
            self.notice(f"round {round_}: {reason} (not evaluated)")
        answers = [outcome for outcome in outcomes.values() if isinstance(outcome, Answer)]
        lines = self.lines(when, round_, answers)
        missing = self._missing(when, round_, absent | (dict(self.others) if everyone else {}))
        return [Examined(round_, when, lines, tuple(self._predictions(answers)), self.facts, missing)]

    def _answered(self, asked: Sequence[Examination], round_: int) -> dict[ClientId, Outcome]:
        """The outcome of every examination; who gave no answer is asked again.

        Nobody waits round after round for a client that is known to be away, except in the last one; nor there for
        one that has let the server wait in vain before.
        """
        self._lapses.begin(round_)
        doubted = {one.client for one in asked if self._lapses.is_doubted(one.client)}
        outcomes = self._first_answers(asked, doubted, round_)
        needed = round(self.quorum * len(asked))
        tries = Tries(self.attempts, self.waits, self.waits.patience)
        while lost := _lost(outcomes.values()):
            enough = len(outcomes) - len(lost) >= needed
            wait = tries.next_wait(lost=True)
            if wait is None or (
                enough and (tries.made >= self.attempts or lost <= self._not_awaited(doubted, round_))
            ):
                break
            if not enough:
                self.notice(
                    f"round {round_}: not evaluated yet: {', '.join(sorted(lost))}; trying again in {wait:g} s"
                )
            tries.again(wait)
            again = [one for one in asked if one.client in lost]
            outcomes |= self._timed(again, self._lapses.short_time if enough else None)
        self._away = lost
        return outcomes

    def _not_awaited(self, doubted: set[ClientId], round_: int) -> set[ClientId]:
        return doubted | self._away if round_ < self.last else doubted

    def _first_answers(
        self, asked: Sequence[Examination], doubted: set[ClientId], round_: int
    ) -> dict[ClientId, Outcome]:
        """The outcomes of asking once: first those that are trusted, then the others, who have less time."""
        dropped = {one for one in doubted if round_ < self.last and self._lapses.is_dropped(one)}
        found = self._timed([one for one in asked if one.client not in doubted])
        late = [one for one in asked if one.client in doubted - dropped]
        found |= self._timed(late, self._lapses.short_time)
        for client in dropped:
            found[client] = Failure(
                client, f"client {client}: not asked, as it left out evaluations before", True
            )
        return {one.client: found[one.client] for one in asked}

    def _timed(self, asked: Sequence[Examination], within: float | None = None) -> dict[ClientId, Outcome]:
        if not asked:
            return {}
        engine, start = self.rounds.engine, self.waits.clock.now()
        trusted = not any(self._lapses.is_doubted(one.client) for one in asked)
        found = engine.examine(asked) if within is None else engine.examine_within(asked, within)
        self._lapses.note(_lost(found), self.waits.clock.now() - start, trusted)
        return {one.client: one for one in found}

    def _missing(self, when: Moment, round_: int, absent: Mapping[ClientId, str]) -> tuple[Line, ...]:
        """The log lines of clients that were not measured."""
        held_out = set(self.federation.population.held_out)
        return tuple(
            {"round": round_, "client": client, "when": when, "mode": mode, "missing": reason}
            | ({"held_out": True} if client in held_out else {})
            for client, reason in absent.items()
            for mode in self.modes
        )

    def is_due(self, round_: int) -> bool:
        """Whether a round is evaluated at all."""
        return round_ % self.settings.every == 0 or round_ == self.last

    def _examinations(
        self, when: Moment, ids: Sequence[ClientId], round_: int, attempt: int, ledger: Ledger
    ) -> list[Examination | Failure]:
        """An examination for each client; a failure for a stranger for whom no message can be made."""
        asked: list[Examination | Failure] = []
        for client in ids:
            try:
                asked.append(self._examination(when, client, round_, attempt, ledger))
            except Exception as error:
                if not self.rounds.acceptance.strangers:
                    raise
                asked.append(Failure(client, no_message(client, "evaluate", error)))
        return asked

    def _examination(
        self, when: Moment, client: ClientId, round_: int, attempt: int, ledger: Ledger
    ) -> Examination:
        """Clients are measured on the newest downlink, except after training: then as training left them."""
        down = None
        if when != "after_training":
            down = Message(self.federation.method.downlink(self.rounds.server, client))
            ledger.add(client, "evaluate", "down", "evaluate", down)
        stamp = self.rounds.stamp(client, round_, attempt)
        task = self.federation.population.task_of(client)
        own = tuple(name for name, metric in self.metrics.items() if metric.fits(task))
        kept = self.settings.predictions != "none"
        return Examination(client, down, stamp, self.modes, self.settings.on, own, kept)

    def lines(self, when: Moment, round_: int, answers: Sequence[Answer]) -> tuple[Line, ...]:
        """The log lines of all answers."""
        found = read_together([answer.report.metrics for answer in answers])
        held_out = set(self.federation.population.held_out)
        lines: list[Line] = []
        for answer, numbers in zip(answers, found, strict=True):
            client, sizes = answer.client, self._sizes(answer.client)
            closing = {"held_out": True} if client in held_out else {}
            lines += [
                {"round": round_, "client": client, "when": when, "mode": mode}
                | _splits(mode, numbers, sizes, self.settings.judge, self.metrics)
                | closing
                for mode in self.modes
            ]
        for name in self.metrics:
            failed = {one.client: one.report.errors[name] for one in answers if name in one.report.errors}
            self._look_at(name, _values(name, lines), failed, round_)
            self._note_undefined(name, lines, failed)
        return tuple(lines)

    def _look_at(
        self,
        name: str,
        values: Sequence[tuple[ClientId, float | None]],
        failed: Mapping[ClientId, str],
        round_: int,
    ) -> None:
        """Say once of an own metric that it failed, is undefined or out of its range.

        One that fails for every client in the first evaluation ends the run.
        """
        known = [(client, value) for client, value in values if value is not None]
        for client, error in [*failed.items()][:1]:
            everywhere = {client for client, _ in values} <= set(failed)
            if not known and everywhere and round_ == min(self.settings.every, self.last):
                raise RunError(f"the metric {name} fails for every client; for client {client}: {error}")
            self._say_once("failed", name, f"failed for client {client} and is null in the log: {error}")
        facts = self.facts[name]
        for client, value in known:
            if not facts.low - SLACK <= value <= facts.high + SLACK:
                span = f"from {facts.low:g} to {facts.high:g}"
                self._say_once(
                    "outside", name, f"is {value:g} for client {client}, not {span}: declare its low and high"
                )

    def _note_undefined(self, name: str, lines: Sequence[Line], failed: Mapping[ClientId, str]) -> None:
        """Say once which clients have no value, and of which part where they have one of another."""
        parts: dict[ClientId, dict[str, bool]] = {}
        for line in lines:
            for split in SPLITS:
                if name in line.get(split, ()) and line["client"] not in failed:
                    parts.setdefault(line["client"], {})[split] = line[split][name] is not None
        which = [
            client if not any(known.values()) else f"{client} ({', '.join(s for s in known if not known[s])})"
            for client, known in parts.items()
            if not all(known.values())
        ]
        if which:
            whom = "every client" if len(which) == len(parts) else "some clients"
            told = f"is undefined for {whom} and null in the log: {', '.join(which)}"
            self._say_once("undefined", name, told)

    def _say_once(self, what: str, name: str, sentence: str) -> None:
        if (what, name) not in self._told:
            self._told.add((what, name))
            self.notice(f"the metric {name} {sentence}")

    def _predictions(self, answers: Sequence[Answer]) -> Iterator[Predictions]:
        """What clients predicted, as far as it was asked for; the reported mode first."""
        for answer, mode, split in product(answers, self.modes, SPLITS):
            names = [f"{mode}/{split}/{what}" for what in ("labels", "scores")]
            if names[0] in answer.up:
                labels, scores = (answer.up[name].cpu().numpy() for name in names)
                task = self.federation.population.task_of(answer.client)
                rows = self._row_numbers(answer.client, split)
                own = self._own_rows(answer.client, rows)
                yield Predictions(answer.client, mode, split, task, rows, labels, scores, own)

    def _row_numbers(self, client: ClientId, split: str) -> np.ndarray:
        if split == "test" and self.settings.on == "global":
            return self.federation.clients.shared_test(client)
        rows: np.ndarray = getattr(self.federation.split[client], split)
        return rows

    def _own_rows(self, client: ClientId, rows: np.ndarray) -> np.ndarray | None:
        own = self.federation.clients.groups[self.federation.population[client].group].data.own_rows
        return None if own is None else own.numpy()[rows]

    def _sizes(self, client: ClientId) -> dict[str, int]:
        """How many samples a client's measures are taken over, per split."""
        samples = self.federation.population.samples(client)
        common = self.settings.on == "global"
        test = len(self.federation.clients.shared_test(client)) if common else samples["test"]
        return {"test": test, "validation": samples["validation"]}


def _lost(outcomes: Iterable[Outcome]) -> set[ClientId]:
    """The clients that gave no answer."""
    return {one.client for one in outcomes if isinstance(one, Failure) and one.lost}


def read_together(numbers: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Several mappings of single numbers as floats, read from the device at once."""
    values = [value for one in numbers for value in one.values()]
    read = iter(torch.stack(values).tolist() if values else [])
    return [{name: next(read) for name in one} for one in numbers]


def _splits(
    mode: str,
    numbers: Mapping[str, float],
    sizes: Mapping[str, int],
    judge: str | None,
    further: Collection[str],
) -> Line:
    """The splits of one log line; one without samples is left out."""
    line: Line = {}
    for split, size in sizes.items():
        if size:
            prefix = f"{mode}/{split}/"
            own = {name.removeprefix(prefix): numbers[name] for name in numbers if name.startswith(prefix)}
            line[split] = _measures(own, size, judge, further)
    return line


def _measures(
    numbers: Mapping[str, float], size: int, judge: str | None = None, further: Collection[str] = ()
) -> Line:
    """One split in the log. A client that is not judged by accuracy has a `score`; `metric` names what that is."""
    digits = _finite if metric_facts(next(iter(numbers))).is_share else _significant
    own = {
        name: (_significant if name in further else digits)(value)
        for name, value in numbers.items()
        if name not in ("correct", "loss")
    }
    if "correct" in numbers:
        own = {"accuracy": round(numbers["correct"] / size, 6), **own}
    found = {**own, "loss": digits(numbers["loss"] / size)}
    metric = judge if judge in found else next(iter(found))
    told = {} if metric == "accuracy" else {"score": found[metric], "metric": metric}
    return {**told, **found, "samples": size}


def _values(name: str, lines: Sequence[Line]) -> list[tuple[ClientId, float | None]]:
    """The values of a metric in log lines, with the client of each."""
    return [
        (line["client"], line[split][name])
        for line in lines
        for split in SPLITS
        if name in line.get(split, ())
    ]


def _finite(value: float) -> float | None:
    """Six digits after the point; None for infinity and NaN, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def _significant(value: float) -> float | None:
    """Eight digits wherever the point is: the errors of a regression have the unit of its numbers."""
    return float(f"{value:.8g}") if math.isfinite(value) else None


def score_of(part: Mapping[str, Any]) -> float | None:
    """What a client is judged by in one split of the log: its accuracy, or the score of its task."""
    value: float | None = part.get("score", part.get("accuracy"))
    return value
