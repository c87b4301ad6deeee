"""The interface of engines: requests to clients, and what comes back."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.method import Purpose
from potluck.core.server import Server
from potluck.core.state import Report


@dataclass(frozen=True)
class Stamp:
    """Where a request belongs, so that a client can tell a repeat, a new attempt and a lost round apart.

    `accepted` is the last round whose work the server accepted from this client, 0 if none. `incarnation`
    counts how often the server of a federation was started: work it had not accepted before it ended is undone,
    as in a new attempt. `settled` tells a client far away, for which no engine settles rounds, that the round
    is over: work that was not accepted must not be examined either.
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
    """Do these steps, in order, on this downlink."""

    client: ClientId
    steps: tuple[str, ...]
    down: Message
    stamp: Stamp
    purpose: Purpose = "train"


@dataclass(frozen=True)
class Examination:
    """Measure the client as it is, after receiving the downlink if there is one; nothing is kept."""

    client: ClientId
    down: Message | None
    stamp: Stamp
    modes: tuple[str, ...]
    on: str = "own"
    metrics: tuple[str, ...] = ()  # beside those of the task; see `core.own_metrics`
    predictions: bool = False  # whether scores and labels come back, sample by sample


@dataclass(frozen=True)
class Answer:
    """The steps were done: what leaves the client, and its report."""

    client: ClientId
    up: Message
    report: Report


@dataclass(frozen=True)
class Failure:
    """The steps were not done; `reason` is one sentence. `lost`: no answer came, and one may when asked again.

    A site says so of itself while its disk is full.
    """

    client: ClientId
    reason: str
    lost: bool = False


Outcome = Answer | Failure


def about(client: ClientId, reason: str) -> str:
    """A reason that begins with the client it is about, whatever other client it names.

    >>> about("1", "client 12: it is away"), about("1", "client 1, step train: it is away")
    ('client 1: client 12: it is away', 'client 1, step train: it is away')
    """
    who = f"client {client}"
    return reason if reason.startswith((f"{who}:", f"{who},")) else f"{who}: {reason}"


class Engine(ABC):
    """Runs requests; the outcomes are in the order of the requests."""

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have every client do its steps."""

    def run_sparing(self, requests: Sequence[Request], spare: int) -> list[Outcome]:
        """The same, where the round can do without `spare` of its clients, so that not all need be waited for."""
        return self.run(requests)

    @abstractmethod
    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure clients without changing them."""

    def examine_within(self, examinations: Sequence[Examination], seconds: float) -> list[Outcome]:
        """The same, waiting no longer than this for clients that may not answer; those that are here always do."""
        return self.examine(examinations)

    def waited_for(self, lost: Collection[ClientId]) -> Collection[ClientId]:
        """Of those that gave no answer in the last exchange, whom it waited for: not who was known to be away."""
        return lost

    @abstractmethod
    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """End a round: keep the work of the accepted clients, undo that of the others."""

    def at_server(self, server: Server) -> AbstractContextManager[None]:
        """Around the server's half of a round: an engine may have a faster way to run the server's training."""
        return contextlib.nullcontext()

    @property
    def work_seconds(self) -> Mapping[ClientId, float]:
        """How long each client was at work on the steps of the newest round; empty where that cannot be told."""
        return {}

    def remarks(self) -> dict[str, Any]:
        """What the summary of a run says of its engine."""
        return {}

    def close(self) -> None:  # noqa: B027  (an engine may have nothing to release)
        """Release what the engine holds: processes, memory."""
