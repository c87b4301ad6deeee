"""Rehearse a round with one client alone, to see what it would send before it joins a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.validation import validated
from potluck.deploy.agreement import ROUNDS, Agreement
from potluck.deploy.bounds import check_words
from potluck.deploy.welcome import without_weights
from potluck.engine.protocol import Answer, Outcome, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.errors import ConfigError
from potluck.experiment.overrides import read_yaml
from potluck.experiment.schema import SEVERAL, Experiment
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation
from potluck.methods.registry import method_names


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


def read_offered(path: Path) -> dict[str, Any]:
    """The settings in an experiment file that an operator sent; one whose options name code is refused."""
    values = {key: value for key, value in read_yaml(path).items() if key not in SEVERAL}
    check_words(without_weights(values.get("method")), "method")
    return {"name": path.stem} | values


def offered_experiment(values: Mapping[str, Any]) -> Experiment:
    """An operator's experiment as a site takes it: its plugins are not run, as they are not when the site joins."""
    method = values.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    if values.get("plugins") and isinstance(name, str) and name not in method_names():
        raise ConfigError(
            f"the method {name!r} comes with the experiment's plugins, and a site runs no code but its own; read "
            "the plugin, then import a copy of it in the file of --model"
        )
    return validated(Experiment, {key: value for key, value in values.items() if key != "plugins"})


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
