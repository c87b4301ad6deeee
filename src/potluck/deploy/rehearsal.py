"""Rehearse a round with one client alone, to see what it would send before it joins a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.deploy.agreement import ROUNDS, Agreement
from potluck.engine.protocol import Answer, Outcome, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation


@dataclass(frozen=True)
class Exchange:
    """One request to the client and the message it would answer with."""

    steps: tuple[str, ...]
    down: Message
    up: Message


class _Recording(SerialEngine):
    """Keeps every exchange."""

    def __init__(self, clients: ClientBuilder) -> None:
        super().__init__(clients)
        self.exchanges: list[Exchange] = []

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = super().run(requests)
        self.exchanges += [
            Exchange(request.steps, request.down, outcome.up)
            for request, outcome in zip(requests, outcomes, strict=True)
            if isinstance(outcome, Answer)
        ]
        return outcomes


def rehearse(federation: Federation, client: ClientId) -> list[Exchange]:
    """Play a first round with this client and a local server; nothing is kept and nothing leaves.

    Raises `RoundFailed` with the reason if the client cannot do a step.
    """
    engine = _Recording(federation.clients)
    try:
        Rounds(federation, engine, name="rehearsal").play(1, [client])
    finally:
        engine.close()
    return engine.exchanges


def propose(
    federation: Federation, client: ClientId, rounds: int = ROUNDS
) -> tuple[Agreement, list[Exchange]]:
    """The agreement that allows just what a rehearsed round sends in so many rounds, and its exchanges."""
    exchanges = rehearse(federation, client)
    sent = [exchange.up for exchange in exchanges]
    live, metrics = federation.clients.build_client(client), tuple(federation.clients.metrics)
    return Agreement.of(federation.method, live, sent, metrics, rounds), exchanges
