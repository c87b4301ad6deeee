"""Live clients, and who sits where: most clients are only stored states, a few are built at a time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.packed import State
from potluck.federation.builder import ClientBuilder

SEATS = 16  # live clients kept, one per kind
INITIAL_STATES = 16  # initial states kept; the others are built from the seed again


class Seats(Protocol):
    """Gives a client a place to work in."""

    def sit(self, client: ClientId, state: State | None) -> Client:
        """A live client that is this one and has this state (None: the initial state)."""


class InitialStates:
    """The states clients start with, built from the seed when first needed; the last few are kept."""

    def __init__(self, clients: ClientBuilder) -> None:
        self.clients = clients
        self._known: OrderedDict[tuple[str, str], State] = OrderedDict()

    def of(self, client: ClientId) -> State:
        """The initial state of a client; clients with the same origin and kind share it."""
        key = self.clients.origin(client), self.clients.kind(client)
        state = self._known.pop(key, None)
        if state is None:
            state = self.clients.build_client(client).snapshot()
        self._known[key] = state
        if len(self._known) > INITIAL_STATES:
            self._known.popitem(last=False)
        return state


class KindSeats:
    """One live client per kind: clients whose states have the same shapes take turns in it."""

    def __init__(self, clients: ClientBuilder) -> None:
        self.clients, self.initial = clients, InitialStates(clients)
        self._live: OrderedDict[str, Client] = OrderedDict()

    def sit(self, client: ClientId, state: State | None) -> Client:
        """The live client of this kind, with the data and the state of this client."""
        kind = self.clients.kind(client)
        live = self._live.pop(kind, None) or self.clients.build_client(client)
        self._live[kind] = live
        if len(self._live) > SEATS:
            self._live.popitem(last=False)
        self.clients.assign(live, client)
        live.restore(state if state is not None else self.initial.of(client))
        return live

    def live(self) -> list[Client]:
        """The clients that are built now, each with the state it was given last."""
        return list(self._live.values())
