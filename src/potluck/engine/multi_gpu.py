"""Several GPUs: every client belongs to one of them, and each has an engine and a store of its own.

Work is only queued on a GPU, so one thread keeps all of them busy. Messages cross between the server's device
and the client's; states never do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.core.server import Server
from potluck.engine.protocol import Answer, Engine, Examination, Outcome, Request
from potluck.engine.store.client_store import ClientStore

R = TypeVar("R", Request, Examination)
Home = Callable[[ClientId], int]


def homes(clients: Sequence[ClientId], devices: int) -> Home:
    """The number of each client's device: the devices in turn, in client order."""
    places = {client: number % devices for number, client in enumerate(clients)}
    return places.__getitem__


class MultiGpuStore:
    """The stores of all devices, used by a run like a single one."""

    def __init__(self, stores: Sequence[ClientStore], home: Home) -> None:
        self.stores, self.home = stores, home

    def put(self, client: ClientId, state: State | Path) -> None:
        """Store a state, or the file in which a checkpoint has it."""
        self.stores[self.home(client)].put(client, state)

    def held(self) -> Iterator[ClientId]:
        """The clients that have a stored state: they ever trained."""
        return itertools.chain.from_iterable(store.held() for store in self.stores)

    def holds(self, client: ClientId) -> bool:
        """Whether a client has a stored state: it ever trained."""
        return self.stores[self.home(client)].holds(client)

    def fetch(self, client: ClientId) -> State | None:
        """A client's stored state; None if it still has its initial state."""
        return self.stores[self.home(client)].fetch(client)

    def prefetch(self, clients: Iterable[ClientId]) -> None:
        """Start loading the states of clients that will be asked soon."""
        for store, own in self._shared_out(clients):
            store.prefetch(own)

    def mark(self, clients: Iterable[ClientId]) -> Callable[[], None]:
        """Returns a function that takes these clients back to their states of now."""
        undos = [store.mark(own) for store, own in self._shared_out(clients)]

        def undo() -> None:
            for one in undos:
                one()

        return undo

    def save(self) -> dict[ClientId, Future[Path]]:
        """The files of all stored states, for a manifest."""
        saved = {client: file for store in self.stores for client, file in store.save().items()}
        return dict(sorted(saved.items()))

    def close(self) -> None:
        """Finish what is being read and written."""
        for store in self.stores:
            store.close()

    def _shared_out(self, clients: Iterable[ClientId]) -> list[tuple[ClientStore, list[ClientId]]]:
        clients = list(clients)
        return [
            (store, [client for client in clients if self.home(client) == number])
            for number, store in enumerate(self.stores)
        ]


class MultiGpuEngine(Engine):
    """Passes every request to the engine of the client's device, and moves the answers to the server's device.

    The server is on the first of the devices.
    """

    def __init__(self, engines: Sequence[Engine], devices: Sequence[torch.device], home: Home) -> None:
        self.engines, self.devices, self.home = engines, devices, home

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Put every client to work, device by device."""
        return self._everywhere(requests, lambda engine, own: engine.run(own))

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client, device by device."""
        return self._everywhere(examinations, lambda engine, own: engine.examine(own))

    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """Settle the round on every device."""
        for number, engine in enumerate(self.engines):
            engine.settle(round_, [client for client in cohort if self.home(client) == number], accepted)

    def at_server(self, server: Server) -> AbstractContextManager[None]:
        """The server is on the first device."""
        return self.engines[0].at_server(server)

    def close(self) -> None:
        """Close every engine."""
        for engine in self.engines:
            engine.close()

    def _everywhere(
        self, requests: Sequence[R], work: Callable[[Engine, list[R]], list[Outcome]]
    ) -> list[Outcome]:
        found: dict[ClientId, Outcome] = {}
        for number, (engine, device) in enumerate(zip(self.engines, self.devices, strict=True)):
            own = [
                replace(request, down=None if request.down is None else request.down.to(device))
                for request in requests
                if self.home(request.client) == number
            ]
            found |= {outcome.client: outcome for outcome in (work(engine, own) if own else ())}
        return [_moved(found[request.client], self.devices[0]) for request in requests]


def _moved(outcome: Outcome, device: torch.device) -> Outcome:
    if not isinstance(outcome, Answer):
        return outcome
    report = outcome.report
    there = replace(report, losses=_on(device, report.losses), metrics=_on(device, report.metrics))
    return replace(outcome, up=outcome.up.to(device), report=there)


def _on(device: torch.device, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(device, non_blocking=device.type == "cuda") for name, value in values.items()}
