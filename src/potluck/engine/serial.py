"""The reference engine: the clients of this machine, one after the other, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.engine.protocol import Examination, Outcome, Request
from potluck.engine.runner import StoringEngine, TransactionRunner, guarded
from potluck.engine.seats import KindSeats
from potluck.engine.store.client_store import ClientStore
from potluck.federation.builder import ClientBuilder


class SerialEngine(StoringEngine):
    """Moves a client's stored state into a live client of its kind, works, and stores the result."""

    def __init__(self, clients: ClientBuilder, store: ClientStore | None = None) -> None:
        self.clients = clients
        self.store = store if store is not None else ClientStore()
        self.seats = KindSeats(clients)
        self.runner = TransactionRunner(clients)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Serve every request, in order."""
        return [self._outcome(request) for request in requests]

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client, in order."""
        return [self._outcome(examination) for examination in examinations]

    def _outcome(self, request: Request | Examination) -> Outcome:
        def work() -> Outcome:
            return self.runner.serve(request, self.store, self.seats).answer

        return guarded(self.clients, request.client, work)
