"""Client steps as transactions.

A client keeps `base`, its state at the end of its last accepted round, and `work`, the round it is in. The same
exchange again gives the stored answer and trains nothing; a new attempt, or a round the server did not accept,
goes back to `base`. So a refused, failed, lost or late step leaves no trace, on every engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from potluck.core.packed import State
from potluck.engine.protocol import Answer, Stamp
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
    """One client's stored state; `base` is None as long as it is what the seed made it."""

    base: State | None = None
    work: Work | None = None

    def settle(self, accepted: int) -> None:
        """Keep the work if the server accepted its round, else forget it."""
        if self.work is not None and self.work.round == accepted:
            self.base = self.work.state
        self.work = None

    def open(self, stamp: Stamp) -> Answer | None:
        """Make ready for an exchange; the stored answer if it was done before."""
        work = self.work
        if work is None:
            return None
        if not work.holds(stamp):
            self.settle(stamp.accepted)
            return None
        if stamp.exchange == work.exchange:
            return work.answer
        if stamp.exchange < work.exchange:
            raise StepFailed(
                f"exchange {stamp.exchange} of round {stamp.round} came after exchange {work.exchange}"
            )
        return None

    def current(self, stamp: Stamp) -> State | None:
        """The state to examine: the work of this round while it is open or accepted, else the base."""
        work = self.work
        if work is not None and (stamp.accepted == work.round or (work.holds(stamp) and not stamp.settled)):
            return work.state
        return self.base

    def start(self) -> tuple[State | None, dict[str, int]]:
        """The state an exchange begins with, and what the round counted so far."""
        if self.work is not None:
            return self.work.state, dict(self.work.counters)
        return self.base, {}
