"""The reference engine: the clients of this machine, one after the other, in plain loops."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from potluck.core.card import ClientId
from potluck.engine.protocol import Examination, Outcome, Request
from potluck.engine.runner import StoringEngine, TransactionRunner, guarded
from potluck.engine.seats import KindSeats
from potluck.engine.store.client_store import ClientStore
from potluck.engine.work_times import WorkTimes
from potluck.federation.builder import ClientBuilder


class SerialEngine(StoringEngine):
    """Moves a client's stored state into a live client of its kind, works, and stores the result."""

    def __init__(self, clients: ClientBuilder, store: ClientStore | None = None) -> None:
        self.clients = clients
        self.store = store if store is not None else ClientStore()
        self.seats = KindSeats(clients)
        self.runner = TransactionRunner(clients)
        self.times = WorkTimes()

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Serve every request, in order."""
        return [self._outcome(request) for request in requests]

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client, in order."""
        return [self._outcome(examination) for examination in examinations]

    @property
    def work_seconds(self) -> Mapping[ClientId, float]:
        """As measured here; on a GPU the work goes on when a step has returned."""
        return self.times.seconds if self.clients.device.type == "cpu" else {}

    def _outcome(self, request: Request | Examination) -> Outcome:
        def work() -> Outcome:
            return self.runner.serve(request, self.store, self.seats).answer

        started = time.perf_counter()
        outcome = guarded(self.clients, request.client, work)
        self.times.add(request, time.perf_counter() - started)
        return outcome
