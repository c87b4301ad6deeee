"""What every engine does: run client steps, wherever the clients are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.method import Purpose
from potluck.core.state import Report


@dataclass(frozen=True)
class Stamp:
    """Where a request belongs, so that a client can tell a repeat, a new attempt and a lost round apart.

    `accepted` is the last round whose work the server took from this client, 0 if none. `incarnation` counts the
    starts of a server whose clients outlive it: work it did not take before it ended is undone, as with a new
    attempt. `settled` tells a client that no engine settles for that the round is over: what was not accepted is
    not to be looked at either.
    """

    experiment: str
    round: int
    attempt: int
    exchange: int
    accepted: int
    incarnation: int = 0
    settled: bool = False


@dataclass(frozen=True)
class Request:
    """Do these steps, in order, on this downlink (None: a step is asked that takes nothing)."""

    client: ClientId
    steps: tuple[str, ...]
    down: Message
    stamp: Stamp
    purpose: Purpose = "train"


@dataclass(frozen=True)
class Examination:
    """Measure the client as it stands, on top of the newest downlink if there is one; nothing is kept."""

    client: ClientId
    down: Message | None
    stamp: Stamp
    modes: tuple[str, ...]
    on: str = "own"


@dataclass(frozen=True)
class Answer:
    """A step was done: what leaves the client, and its report."""

    client: ClientId
    up: Message
    report: Report


@dataclass(frozen=True)
class Failure:
    """A step was not done; `reason` is one sentence."""

    client: ClientId
    reason: str


Outcome = Answer | Failure


class Engine(ABC):
    """Runs requests and answers in the order they were given."""

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have every client do its steps."""

    @abstractmethod
    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure clients without changing them."""

    @abstractmethod
    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """A round is over: the work of the accepted clients stands, that of the others is undone."""

    def close(self) -> None:  # noqa: B027  (an engine may have nothing to give back)
        """Give back what the engine holds."""
