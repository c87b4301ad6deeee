"""The transaction runner: what every engine and every site does with a request.

An engine is composed of this runner, seats (live clients) and a store (records). The runner holds no state of its
own: seats and records are handed to it with every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from potluck.core.card import ClientId
from potluck.engine.performer import Performer
from potluck.engine.protocol import Answer, Engine, Examination, Failure, Request, about
from potluck.engine.seats import Seats
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Done, Errand, Records, opened, stored
from potluck.errors import PotluckError
from potluck.federation.builder import ClientBuilder

T = TypeVar("T")


class TransactionRunner:
    """Does requests as transactions: open the record, work on a live client, store the result."""

    def __init__(self, clients: ClientBuilder, performer: Performer | None = None) -> None:
        self.clients = clients
        self.performer = performer if performer is not None else Performer(clients.method, clients.metrics)

    def serve(self, request: Request | Examination, records: Records, seats: Seats) -> Done:
        """Answer a request; one that was done before gives the stored answer and no new state."""
        errand = opened(records, request)
        if isinstance(errand, Answer):
            return Done(errand)
        return stored(records, request, self.work(errand, seats))

    def work(self, errand: Errand, seats: Seats) -> Done:
        """Do the work of a request on a live client; nothing is stored."""
        request = errand.request
        client = seats.sit(request.client, errand.state)
        self.clients.enter(client, request.stamp.round, dict(errand.counters))
        if isinstance(request, Examination):
            return Done(self.performer.examine(client, request))
        answer = self.performer.perform(client, request, first=errand.first)
        return Done(answer, client.snapshot(), client.counters)


def guarded(clients: ClientBuilder, client: ClientId, work: Callable[[], T]) -> T | Failure:
    """Turn an error about the client into a failure; any other error is a bug and is raised with a note."""
    try:
        return work()
    except PotluckError as error:
        return Failure(client, about(client, str(error)))
    except Exception as error:
        error.add_note(f"while client {client} ({clients.label(client)}) was at work")
        raise


class StoringEngine(Engine):
    """An engine that keeps the states of its clients in a store of its own."""

    store: ClientStore

    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """Keep the work of the accepted clients, drop that of the others."""
        taken = set(accepted)
        for client in cohort:
            self.store.settle(client, round_ if client in taken else -1)
