"""A round played at home, with nobody else: what a client would send, before it joins anyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.deploy.agreement import Agreement
from potluck.engine.protocol import Answer, Outcome, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation


@dataclass(frozen=True)
class Exchange:
    """One request to the client and what it would answer."""

    steps: tuple[str, ...]
    down: Message
    up: Message


class _Listening(SerialEngine):
    """Keeps everything that crosses."""

    def __init__(self, clients: ClientBuilder) -> None:
        super().__init__(clients)
        self.heard: list[Exchange] = []

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        outcomes = super().run(requests)
        self.heard += [
            Exchange(request.steps, request.down, outcome.up)
            for request, outcome in zip(requests, outcomes, strict=True)
            if isinstance(outcome, Answer)
        ]
        return outcomes


def rehearse(federation: Federation, client: ClientId) -> list[Exchange]:
    """Play a first round with this client alone, with a server made here; nothing is kept and nothing leaves.

    A client that cannot do its steps is a `RoundFailed` with the reason.
    """
    engine = _Listening(federation.clients)
    try:
        Rounds(federation, engine, name="rehearsal").play(1, [client])
    finally:
        engine.close()
    return engine.heard


def propose(federation: Federation, client: ClientId, attempts: int = 1) -> tuple[Agreement, list[Exchange]]:
    """What a round would send, and the agreement that allows just that: what `join --check` shows and writes."""
    exchanges = rehearse(federation, client)
    sent = [exchange.up for exchange in exchanges]
    return Agreement.of(federation.method, federation.clients.build_client(client), sent, attempts), exchanges
