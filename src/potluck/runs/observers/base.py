"""What an observer of a run is, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.engine.evaluation.examined import Examined


@dataclass(frozen=True)
class RoundEnd:
    """A round that is over and in the logs: first the round as a whole, then what each client did."""

    round: int
    rounds: int
    accuracy: float | None  # mean over clients when they were last measured, in this round or before
    loss: float | None  # None in a round without evaluation
    seconds: float
    measure: str = "accuracy"  # what `accuracy` is a mean of: another measure, or scores of several tasks
    is_share: bool = True  # whether that is a fraction, to be shown in per cent
    examined: Sequence[Examined] = ()  # every evaluation of this round, with the values of each client
    ledger: Sequence[Mapping[str, Any]] = ()  # every message of this round, as in ledger.jsonl
    observations: Sequence[
        Mapping[str, Any]
    ] = ()  # what the method noted of clients, as in observations.jsonl
    timing: Mapping[str, float] = field(default_factory=dict)  # seconds per kind of work
    failures: Mapping[ClientId, str] = field(default_factory=dict)  # who dropped out, and why
    # how long each client trained; empty where all are at work at once, as on a GPU
    client_seconds: Mapping[ClientId, float] = field(default_factory=dict)

    @property
    def missing(self) -> dict[ClientId, str]:
        """Who was to be measured at the last evaluation of this round and was not, and why."""
        return self.examined[-1].absent if self.examined else {}

    @property
    def scores(self) -> dict[ClientId, float]:
        """The test score of each client at the last evaluation of this round."""
        return self.examined[-1].scores() if self.examined else {}


class StopRun(Exception):
    """Raise it in `Observer.round` to end a run early, with checkpoint, summary and report, which say the reason.

    The round that was just played stays, and all observers are told of it. `potluck resume` plays the rest, unless
    an observer raises it in `recall` too.

    >>> class StopWhenGood(Observer):
    ...     def round(self, end: RoundEnd) -> None:
    ...         if min(end.scores.values(), default=0) > 0.9:
    ...             raise StopRun("all clients are good enough")
    """


class Observer:
    """Looks on while a run is played: a progress bar, a tracker, early stopping. Override what you need.

    An observer is only told of rounds that are in the logs, never of one that is taken back. An exception in an
    observer ends the run, because a fault in it should not go unseen; `potluck resume` goes on after the last
    checkpoint. Two exceptions are requests: `StopRun` ends the run after this round, and `KeyboardInterrupt` stops
    it like Ctrl-C, after a checkpoint.

    >>> import tempfile, potluck
    >>> class Curves(potluck.Observer):
    ...     def __init__(self):
    ...         self.accuracy = {}
    ...     def examined(self, found):
    ...         if found.when == "after_aggregation":
    ...             for client, accuracy in found.scores().items():
    ...                 self.accuracy.setdefault(client, []).append(accuracy)
    >>> curves = Curves()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = potluck.run(
    ...         data="digits", partition={"kind": "iid", "clients": 2}, models=["mlp-small"], method="fedavg",
    ...         training={"rounds": 3}, engine={"device": "cpu"}, out=f"{folder}/run", observers=[curves],
    ...     )
    >>> {client: len(values) for client, values in curves.accuracy.items()}
    {'0': 3, '1': 3}
    >>> result.summary["accuracy"]["per_client"]["1"] == curves.accuracy["1"][-1]
    True
    """

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """A run starts, or goes on after `done` rounds."""

    def recall(self, found: Examined) -> None:
        """An earlier evaluation of a run that is resumed; told after `begin`, one call for each."""

    def examined(self, found: Examined) -> None:
        """Clients were measured at one moment of a round; told once the round is over, before `round`."""

    def round(self, end: RoundEnd) -> None:
        """A round is over."""

    def advise(self, sentence: str) -> None:
        """Advice before the first round; other runs of a comparison may give the same."""
        self.notice(sentence)

    def notice(self, sentence: str) -> None:
        """Something the user should know, such as a client that dropped out."""

    def end(self, folder: Path) -> None:
        """The run is complete: summary and report are written."""


class Observers(Observer):
    """Several observers as one, told in order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Tell all."""
        for one in self.observers:
            one.begin(name, method, rounds, done)

    def recall(self, found: Examined) -> None:
        """Tell all, also those that come after one that wants to stop the run."""
        self._tell_all(lambda one: one.recall(found))

    def examined(self, found: Examined) -> None:
        """Tell all."""
        for one in self.observers:
            one.examined(found)

    def round(self, end: RoundEnd) -> None:
        """Tell all, also those that come after one that wants to stop the run."""
        self._tell_all(lambda one: one.round(end))

    def _tell_all(self, tell: Callable[[Observer], None]) -> None:
        stop: StopRun | None = None
        for one in self.observers:
            try:
                tell(one)
            except StopRun as error:
                stop = stop or error
        if stop is not None:
            raise stop

    def advise(self, sentence: str) -> None:
        """Tell all."""
        for one in self.observers:
            one.advise(sentence)

    def notice(self, sentence: str) -> None:
        """Tell all."""
        for one in self.observers:
            one.notice(sentence)

    def end(self, folder: Path) -> None:
        """Tell all."""
        for one in self.observers:
            one.end(folder)
