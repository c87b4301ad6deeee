"""Engines that misbehave: they lose, repeat and reorder, and methods must not notice."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.engine.protocol import Answer, Engine, Examination, Failure, Outcome, Request
from potluck.engine.serial import LocalEngine
from potluck.testing.cpu_capture import collect_from_tape, run_from_tape
from potluck.training.collect import collecting_with
from potluck.training.fit import running_with


class Wrapped(Engine):
    """An engine around another one."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Pass on."""
        return self.inner.run(requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Pass on."""
        return self.inner.examine(examinations)

    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """Pass on."""
        self.inner.settle(round_, cohort, accepted)


class Reversed(Wrapped):
    """Serves the clients last to first."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers come back in the order asked for."""
        return self.inner.run(requests[::-1])[::-1]


class Repeating(Wrapped):
    """Sends every request twice, as a network may."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """The second answer counts."""
        self.inner.run(requests)
        return self.inner.run(requests)


class Taped(Wrapped):
    """Records the steps of the clients and replays them; what the server trains is never captured."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """From the tape."""
        with running_with(run_from_tape), collecting_with(collect_from_tape):
            return self.inner.run(requests)


class Losing(Wrapped):
    """Loses the answer of one client at one exchange of a round."""

    def __init__(self, inner: Engine, client: ClientId, exchange: int) -> None:
        super().__init__(inner)
        self.client, self.exchange = client, exchange

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """The client has done its work; nobody hears of it."""
        return [
            Failure(self.client, "lost")
            if (request.client, request.stamp.exchange) == (self.client, self.exchange)
            else outcome
            for request, outcome in zip(requests, self.inner.run(requests), strict=True)
        ]


class Spy(Wrapped):
    """Keeps every answer with the state of the client that gave it."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.seen: list[tuple[Answer, State]] = []

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Look at what leaves."""
        outcomes = self.inner.run(requests)
        assert isinstance(self.inner, LocalEngine)
        for outcome in outcomes:
            record = self.inner.store.peek(outcome.client)
            if isinstance(outcome, Answer) and record is not None and record.work is not None:
                self.seen.append((outcome, record.work.state))
        return outcomes
