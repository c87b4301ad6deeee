"""The reference engine: the clients of this machine, one after the other, in plain loops."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.packed import State
from potluck.engine.performer import Performer
from potluck.engine.protocol import Engine, Examination, Failure, Outcome, Request
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Work
from potluck.errors import PotluckError
from potluck.federation.builder import ClientBuilder

R = TypeVar("R", Request, Examination)

SLOTS = 16  # live clients kept, one per kind; the rest of the clients are stored states
INITIAL_STATES = 16  # states of untouched clients kept; the others are made from the seed again


class LocalEngine(Engine):
    """Moves a client's stored state into a live client of its kind, works, and stores the result."""

    def __init__(self, clients: ClientBuilder, store: ClientStore | None = None) -> None:
        self.clients = clients
        self.store = store if store is not None else ClientStore()
        self.performer = Performer(clients.method)
        self._slots: OrderedDict[str, Client] = OrderedDict()
        self._initial: OrderedDict[tuple[str, str], State] = OrderedDict()

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Serve every request, in order."""
        return [self._guarded(self._serve, request) for request in requests]

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client, in order."""
        return [self._guarded(self._examine, examination) for examination in examinations]

    def settle(self, round_: int, cohort: Sequence[ClientId], accepted: Sequence[ClientId]) -> None:
        """Promote the work of the accepted clients, drop that of the others."""
        taken = set(accepted)
        for client in cohort:
            self.store.settle(client, round_ if client in taken else -1)

    def live(self) -> list[Client]:
        """The clients that are built now, each with the state it was given last."""
        return list(self._slots.values())

    def _guarded(self, work: Callable[[R], Outcome], request: R) -> Outcome:
        """A sentence about the client is an answer; any other error is a fault to be seen."""
        try:
            return work(request)
        except PotluckError as error:
            reason = str(error)
            client = f"client {request.client}"
            return Failure(request.client, reason if reason.startswith(client) else f"{client}: {reason}")
        except Exception as error:
            error.add_note(
                f"while client {request.client} ({self.clients.population.label(request.client)}) was at work"
            )
            raise

    def _serve(self, request: Request) -> Outcome:
        record = self.store.record(request.client)
        repeated = record.open(request.stamp)
        if repeated is not None:
            return repeated
        state, counters = record.start()
        client = self._live(request.client, state)
        self.clients.enter(client, request.stamp.round, counters)
        answer = self.performer.perform(client, request, first=record.work is None)
        stamp = request.stamp
        record.work = Work(
            stamp.round, stamp.attempt, stamp.exchange, client.snapshot(), answer, client.counters
        )
        return answer

    def _examine(self, examination: Examination) -> Outcome:
        record = self.store.peek(examination.client)
        state = record.current(examination.stamp) if record else None
        client = self._live(examination.client, state)
        self.clients.enter(client, examination.stamp.round, {})
        return self.performer.examine(client, examination)

    def _live(self, client_id: ClientId, state: State | None) -> Client:
        """A live client of this kind that holds the given state, or the initial one."""
        key = self.clients.kind(client_id)
        client = self._slots.pop(key, None) or self.clients.build_client(client_id)
        self._slots[key] = client
        if len(self._slots) > SLOTS:
            self._slots.popitem(last=False)
        self.clients.assign(client, client_id)
        client.restore(state if state is not None else self._initial_state(client_id))
        return client

    def _initial_state(self, client_id: ClientId) -> State:
        key = self.clients.origin(client_id), self.clients.kind(client_id)
        state = self._initial.pop(key, None)
        if state is None:
            state = self.clients.build_client(client_id).snapshot()
        self._initial[key] = state
        if len(self._initial) > INITIAL_STATES:
            self._initial.popitem(last=False)
        return state
