"""Engines that misbehave: they lose, repeat and reorder requests, and a method must not notice."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.core.server import Server
from potluck.engine.protocol import Answer, Engine, Examination, Failure, Outcome, Request
from potluck.engine.runner import StoringEngine
from potluck.engine.serial import SerialEngine
from potluck.testing.cpu_capture import Tape
from potluck.training.collect import collecting_with
from potluck.training.fit import running_with

Heard = dict[tuple[ClientId, int], list[list[int]]]  # the rows of a client's batches in a round


class Wrapped(Engine):
    """An engine around another one, which it passes everything on to."""

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

    def at_server(self, server: Server) -> AbstractContextManager[None]:
        """Pass on."""
        return self.inner.at_server(server)


class Reversed(Wrapped):
    """Serves the clients last to first."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Serve in reverse; the outcomes are in the order that was asked for."""
        return self.inner.run(requests[::-1])[::-1]


class Repeating(Wrapped):
    """Sends every request twice, as a network may."""

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run twice; the second answer counts."""
        self.inner.run(requests)
        return self.inner.run(requests)


class Taped(Wrapped):
    """Records the clients' steps and replays them. What the server trains is never captured."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.tape = Tape()

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run from the tape."""
        with running_with(self.tape.train), collecting_with(self.tape.collect):
            return self.inner.run(requests)


class Losing(Wrapped):
    """Loses the answer of one client at one exchange of a round."""

    def __init__(self, inner: Engine, client: ClientId, exchange: int) -> None:
        super().__init__(inner)
        self.client, self.exchange = client, exchange

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Let the client do its work, but report a failure."""
        return [
            Failure(self.client, "lost")
            if (request.client, request.stamp.exchange) == (self.client, self.exchange)
            else outcome
            for request, outcome in zip(requests, self.inner.run(requests), strict=True)
        ]


class Spy(Wrapped):
    """Keeps every answer, with the request and the state of the client that gave it."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.seen: list[tuple[Answer, State]] = []
        self.requests: list[Request] = []
        self.heard: Heard = {}

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Keep what leaves the clients."""
        outcomes = self.inner.run(requests)
        assert isinstance(self.inner, StoringEngine)
        for request, outcome in zip(requests, outcomes, strict=True):
            record = self.inner.store.peek(outcome.client)
            if isinstance(outcome, Answer) and record is not None and record.work is not None:
                self.seen.append((outcome, record.worked()))
                self.requests.append(request)
        return outcomes


class OtherRows(Spy):
    """Serves each client while all rows but its training rows hold other samples and labels."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        assert isinstance(inner, SerialEngine), "the data are changed in this process"
        self.clients = inner.clients
        self.own = self.clients.sources
        self.clients.sources = [
            replace(source, x=source.x.clone(), y=source.y.clone()) for source in self.own
        ]

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """One client after the other, each with other data around its own."""
        outcomes: list[Outcome] = []
        for request in requests:
            self._hide(request.client)
            outcomes += super().run([request])
        return outcomes

    def _hide(self, client: ClientId) -> None:
        rows = torch.from_numpy(self.clients.split[client].train)
        labels = self.clients.population.task_of(client).classes
        for now, own in zip(self.clients.sources, self.own, strict=True):
            now.x.copy_(-own.x - 1)
            now.y.copy_(own.y + 1 if own.y.is_floating_point() else (own.y + 1) % labels)
            now.x[rows], now.y[rows] = own.x[rows], own.y[rows]
