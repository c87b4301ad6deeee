"""Evaluation, both halves: what a client measures, and whom the server asks at which moment of a round.

Every value is logged per client, round, moment and mode; means, spreads and "best" are views of that log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client, SplitName
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.settings import Settings
from potluck.core.task import Batch, Task
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Answer, Examination, Failure
from potluck.engine.rounds import Rounds
from potluck.errors import ConfigError, nearest
from potluck.training.collect import collect

Moment = Literal["before", "after_training", "after_aggregation"]
Line = dict[str, Any]  # one line of a log


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


# --- the client's half ----------------------------------------------------------------------------------


def measure(method: Method, client: Client, modes: tuple[str, ...], on: str) -> dict[str, Tensor]:
    """The numbers of the client's task per mode and split, on the device: `mode/split/correct`."""
    numbers: dict[str, Tensor] = {}
    splits: tuple[SplitName, ...] = ("validation", "test")
    for split in splits:
        rows = "global" if on == "global" and split == "test" else split
        parts = collect(client, partial(_measure_batch, method, client, modes), rows)  # type: ignore[arg-type]
        for mode, found in zip(modes, _put_together(client.task, parts, len(modes)), strict=False):
            concluded = client.task.rules.conclude(found)
            numbers |= {f"{mode}/{split}/{name}": value.double() for name, value in concluded.items()}
    return numbers


def _measure_batch(method: Method, client: Client, modes: tuple[str, ...], batch: Batch) -> Any:
    """What a batch contributes in all modes: its sums as one tensor, then tensors that have a row per sample."""
    found = [client.task.measure(method.predict(client, batch, mode).float(), batch.y) for mode in modes]
    added, whole = client.task.rules.sums(client.task.classes), client.task.rules.whole
    sums = torch.cat([one[name].double().reshape(-1) for one in found for name in added])
    return (sums, *(one[name] for one in found for name in whole)) if whole else sums


def _put_together(task: Task, parts: Sequence[Any], modes: int) -> list[dict[str, Tensor]]:
    """What all batches contributed, one mapping per mode; an empty list without batches."""
    if not parts:
        return []
    added, whole = task.rules.sums(task.classes), task.rules.whole
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
class Examined:
    """What clients measured at one moment of a round.

    `lines` are those of `metrics.jsonl`: one per client and mode, the reported mode first.
    """

    round: int
    when: Moment
    lines: tuple[Line, ...]

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
        self, rounds: Rounds, settings: EvaluateSettings, last: int, notice: Callable[[str], None]
    ) -> None:
        """`last` is the last round of the run, which is always evaluated; `notice` hears who was not measured."""
        self.rounds, self.federation = rounds, rounds.federation
        self.settings, self.last, self.notice = settings, last, notice
        self.modes = chosen_modes(settings, rounds.federation.method.modes)

    def examine(
        self, when: Moment, cohort: Sequence[ClientId], round_: int, attempt: int, ledger: Ledger
    ) -> list[Examined]:
        """Measure clients at one moment of a round; an empty list where the settings do not ask for it."""
        if not self.is_due(round_) or when not in self.settings.when:
            return []
        everyone = self.settings.who == "all" and when != "after_training"
        ids = self.federation.population.ids if everyone else cohort
        asked = [self._examination(when, client, round_, attempt, ledger) for client in ids]
        outcomes = self.rounds.engine.examine(asked)
        for failure in (outcome for outcome in outcomes if isinstance(outcome, Failure)):
            self.notice(f"round {round_}: {failure.reason} (not evaluated)")
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        return [Examined(round_, when, self.lines(when, round_, answers))]

    def is_due(self, round_: int) -> bool:
        """Whether a round is evaluated at all."""
        return round_ % self.settings.every == 0 or round_ == self.last

    def _examination(
        self, when: Moment, client: ClientId, round_: int, attempt: int, ledger: Ledger
    ) -> Examination:
        """Clients are measured on the newest downlink, except after training: then as training left them."""
        down = None
        if when != "after_training":
            down = Message(self.federation.method.downlink(self.rounds.server, client))
            ledger.add(client, "evaluate", "down", "evaluate", down)
        stamp = self.rounds.stamp(client, round_, attempt)
        return Examination(client, down, stamp, self.modes, self.settings.on)

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
                | _splits(mode, numbers, sizes)
                | closing
                for mode in self.modes
            ]
        return tuple(lines)

    def _sizes(self, client: ClientId) -> dict[str, int]:
        """How many samples a client's measures are taken over, per split."""
        samples = self.federation.population.samples(client)
        common = self.settings.on == "global"
        test = len(self.federation.clients.shared_test(client)) if common else samples["test"]
        return {"test": test, "validation": samples["validation"]}


def read_together(numbers: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Several mappings of single numbers as floats, read from the device at once."""
    values = [value for one in numbers for value in one.values()]
    read = iter(torch.stack(values).tolist() if values else [])
    return [{name: next(read) for name in one} for one in numbers]


def _splits(mode: str, numbers: Mapping[str, float], sizes: Mapping[str, int]) -> Line:
    """The splits of one log line; one without samples is left out."""
    line: Line = {}
    for split, size in sizes.items():
        if size:
            prefix = f"{mode}/{split}/"
            own = {name.removeprefix(prefix): numbers[name] for name in numbers if name.startswith(prefix)}
            line[split] = _measures(own, size)
    return line


def _measures(numbers: Mapping[str, float], size: int) -> Line:
    """One split in the log. A task without an accuracy has a `score`, and `metric` names what that is."""
    closing = {"loss": _finite(numbers["loss"] / size), "samples": size}
    if "correct" in numbers:
        return {"accuracy": round(numbers["correct"] / size, 6), **closing}
    own = {name: _finite(value) for name, value in numbers.items() if name != "loss"}
    metric = next(iter(own))
    return {"score": own[metric], "metric": metric, **own, **closing}


def _finite(value: float) -> float | None:
    """Six digits; None for infinity and NaN, which JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def score_of(part: Mapping[str, Any]) -> float | None:
    """What a client is judged by in one split of the log: its accuracy, or the score of its task."""
    value: float | None = part.get("score", part.get("accuracy"))
    return value
