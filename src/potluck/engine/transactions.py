"""Client steps as transactions: open the record, work, store the result.

A client keeps `base`, its state at the end of its last accepted round, and `work`, the round it is in. The same
exchange again gives the stored answer and trains nothing; a new attempt, or a round the server did not accept,
goes back to `base`. So a refused, failed, lost or late step leaves no trace, on every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.engine.protocol import Answer, Examination, Request, Stamp
from potluck.errors import StepFailed


@dataclass
class Work:
    """A round that is under way: the state after its last exchange, and the answer that was given."""

    round: int
    attempt: int
    exchange: int
    state: State
    answer: Answer
    counters: dict[str, int] = field(default_factory=dict)
    incarnation: int = 0

    def holds(self, stamp: Stamp) -> bool:
        """Whether a request belongs to this attempt at this round."""
        here = self.round, self.attempt, self.incarnation
        return here == (stamp.round, stamp.attempt, stamp.incarnation)


@dataclass
class Record:
    """The stored state of one client; `base` is None until its first round is accepted."""

    base: State | None = None
    work: Work | None = None

    def settle(self, accepted: int) -> None:
        """Keep the work if the server accepted its round, otherwise drop it."""
        if self.work is not None and self.work.round == accepted:
            self.base = self.work.state
        self.work = None

    def worked(self) -> State:
        """The state after the last exchange of the round that is open."""
        assert self.work is not None
        return self.work.state

    @property
    def begun(self) -> bool:
        """Whether the client has done an exchange of the round that is open."""
        return self.work is not None

    def open(self, request: Request) -> Answer | None:
        """Prepare for an exchange; returns the stored answer if the exchange was done before."""
        work, stamp = self.work, request.stamp
        if work is None:
            return None
        if not work.holds(stamp):
            self.settle(stamp.accepted)
            return None
        if stamp.exchange == work.exchange:
            return work.answer
        if stamp.exchange < work.exchange:
            raise StepFailed(
                f"exchange {stamp.exchange} of round {stamp.round} came after exchange {work.exchange}; "
                "ask for the exchanges of a round in their order"
            )
        return None

    def current(self, stamp: Stamp) -> State | None:
        """The state to examine: the work of this round while it is open or accepted, otherwise the base."""
        work = self.work
        if work is not None and (stamp.accepted == work.round or (work.holds(stamp) and not stamp.settled)):
            return self.worked()
        return self.base

    def start(self) -> tuple[State | None, dict[str, int]]:
        """The state an exchange begins with, and what the round counted so far."""
        if self.work is not None:
            return self.worked(), dict(self.work.counters)
        return self.base, {}

    def store(self, request: Request, done: Done) -> None:
        """Store an exchange that was done."""
        assert done.state is not None
        at = request.stamp
        self.work = Work(
            at.round, at.attempt, at.exchange, done.state, done.answer, dict(done.counters), at.incarnation
        )


class Records(Protocol):
    """Where the records of clients are kept: `ClientStore` on an engine, one record on disk at a site."""

    def record(self, client: ClientId) -> Record:
        """The record of a client, created if there is none."""

    def peek(self, client: ClientId) -> Record | None:
        """The record of a client, None if there is none."""


@dataclass(frozen=True)
class Errand:
    """A request with everything a live client needs to do it.

    `state` is what to start from (None: the initial state), `counters` what the round counted so far, and `first`
    says whether this is the client's first exchange of the round.
    """

    request: Request | Examination
    state: State | None
    counters: Mapping[str, int] = field(default_factory=dict)
    first: bool = True


@dataclass(frozen=True)
class Done:
    """A request that was answered; `state` and `counters` are what to store (None: nothing to store)."""

    answer: Answer
    state: State | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


def opened(records: Records, request: Request | Examination) -> Errand | Answer:
    """Open the client's record for a request: the work to do, or the stored answer if it was done before."""
    if isinstance(request, Examination):
        found = records.peek(request.client)
        return Errand(request, found.current(request.stamp) if found else None)
    record = records.record(request.client)
    repeated = record.open(request)
    if repeated is not None:
        return repeated
    state, counters = record.start()
    return Errand(request, state, counters, first=not record.begun)


def stored(records: Records, request: Request | Examination, done: Done) -> Done:
    """Store what was done in the client's record; an examination has nothing to store."""
    if done.state is not None:
        assert isinstance(request, Request)
        records.record(request.client).store(request, done)
    return done
