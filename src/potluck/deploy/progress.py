"""How a run goes at a site, in a few sentences: joined, a line for every round, and over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.core.plain_values import printable

QUIET = 20.0  # seconds without an order after the last round: the run is over
EVALUATE, JOIN = "evaluate", "join"  # orders that are no steps of a method


@dataclass
class RoundWork:
    """What a site did in a round, its evaluations apart."""

    round: int
    steps: dict[int, tuple[str, int]] = field(default_factory=dict)  # by exchange: order, gradient steps
    seconds: float = 0.0
    sent: int = 0
    received: int = 0


class Progress:
    """Tells of the run at hand. No server says that a round or a run has ended: what comes next shows it."""

    def __init__(self, tell: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self.tell, self.clock = tell, clock
        self.run = self.name = self.method = ""
        self.rounds: int | None = None
        self.sent = self.received = 0  # bytes of the run, evaluations included
        self._known: dict[str, tuple[str, int]] = {}  # by run, its name and how many rounds it has
        self._moved: dict[str, tuple[int, int]] = {}  # by run, the bytes sent and received so far
        self._joined = self._over = ""  # the runs of which this was told
        self._refused = ""  # what was refused last, and why
        self._unwelcome = ""
        self._round: int | None = None  # of the last order
        self._open: RoundWork | None = None  # not told so far
        self._told: tuple[str, int] | None = None  # the run and the round of the last line
        self._last = clock()

    def of(self, offer: Mapping[str, Any]) -> None:
        """The run that a welcome tells of."""
        experiment = offer["experiment"]
        run, rounds = str(offer["run"]), int(experiment["training"]["rounds"])
        self._known[run] = printable(str(experiment["name"]), 100), rounds
        self._enter(run)
        self.name, self.rounds = self._known[run]
        self.method = printable(str(experiment["method"]["name"]), 100)

    def joined(self) -> None:
        """It agreed to the run; said once, however often it is greeted."""
        self._refused = ""
        if self._joined != self.run:
            self._joined = self.run
            self.tell(
                f"joined the run {self.name}: {self.method}, {_rounds(self.rounds)}; waiting for its first order",
                run=self.run,
                rounds=self.rounds,
            )

    def unwelcome(self, reason: str) -> None:
        """What a greeting says of the one before: why the server has not taken this site in, or nothing."""
        if reason and reason != self._unwelcome:
            self.tell(f"the server has not taken this site in: {reason}", run=self.run or None)
        self._unwelcome = reason

    def begin(self, run: str, round_: int | None, order: str) -> None:
        """An order has come; it may show that the round before has ended."""
        self._last = self.clock()
        if order == JOIN:
            return
        self._unwelcome = ""
        self._enter(run)
        if self._open is not None and (order == EVALUATE or round_ != self._open.round):
            self._close()
        self._round = round_

    def answered(
        self, order: str, exchange: int, steps: int, seconds: float, received: int, sent: int
    ) -> None:
        """The order was done."""
        self._last, self._refused = self.clock(), ""
        self.sent, self.received = self.sent + sent, self.received + received
        if order in (EVALUATE, JOIN) or self._round is None or self._told == (self.run, self._round):
            return
        work = self._open = self._open or RoundWork(self._round)
        work.steps[exchange] = order, steps
        work.seconds += seconds
        work.sent, work.received = work.sent + sent, work.received + received

    def refused(self, order: str, reason: str) -> None:
        """The order was refused; said once, however often the same is asked."""
        self._last = self.clock()
        told = f"{order}: {reason}"
        if told == self._refused:
            return
        self._refused = told
        if order == JOIN:
            self.tell(f"a run was not joined: {reason}")
        elif order:
            where = "" if self._round is None else f"round {self._round}: "
            self.tell(f"{where}{order} was refused: {reason}", run=self.run, round=self._round, order=order)
        else:
            self.tell(f"a message of the server was refused: {reason}")

    def idle(self) -> None:
        """No order is at hand; after the last round that means that the run is over."""
        if self._round is None or self.rounds is None or self._round < self.rounds or self._over == self.run:
            return
        if self.clock() - self._last >= QUIET:
            self._close()
            self._over = self.run
            self.tell(
                f"the run {self.name} is over: {_rounds(self.rounds)}; with evaluations {self.sent:,} bytes sent, "
                f"{self.received:,} received; waiting for the next one",
                run=self.run,
                rounds=self.rounds,
                sent=self.sent,
                received=self.received,
            )

    @property
    def is_over(self) -> bool:
        """Whether the last round of the run at hand was played."""
        return bool(self.run) and self._over == self.run

    def _enter(self, run: str) -> None:
        if run != self.run:
            self._close()
            if self.run in self._known:  # others may be any number
                self._moved[self.run] = self.sent, self.received
            self.run, self._round = run, None
            self.name, self.rounds = self._known.get(run, (run, None))
            self.sent, self.received = self._moved.get(run, (0, 0))

    def _close(self) -> None:
        """Say what was done in the round that has ended."""
        work, self._open = self._open, None
        if work is None:
            return
        self._told = self.run, work.round
        done = ", ".join(dict.fromkeys(order for order, _ in work.steps.values()))
        steps = sum(number for _, number in work.steps.values())
        of = "" if self.rounds is None else f" of {self.rounds:,}"
        gradient = f", {steps:,} steps" if steps else ""
        self.tell(
            f"round {work.round}{of}: {done}{gradient}, {work.seconds:.1f} s; {work.sent:,} bytes sent, "
            f"{work.received:,} received",
            run=self.run,
            round=work.round,
            rounds=self.rounds,
            order=done,
            steps=steps,
            seconds=round(work.seconds, 3),
            sent=work.sent,
            received=work.received,
        )


def _rounds(number: int | None) -> str:
    if number is None:
        return "rounds unknown"
    return "1 round" if number == 1 else f"{number:,} rounds"
