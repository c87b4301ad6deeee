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
        key = self._key(client)
        state = self._known.pop(key, None)
        return self._keep(key, state if state is not None else self.clients.build_client(client).snapshot())

    def learn(self, client: ClientId, live: Client) -> None:
        """Take the initial state from a client that was just built, so that none is built for it."""
        key = self._key(client)
        if key not in self._known:
            self._keep(key, live.snapshot())

    def _key(self, client: ClientId) -> tuple[str, str]:
        return self.clients.origin(client), self.clients.kind(client)

    def _keep(self, key: tuple[str, str], state: State) -> State:
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
        live = self._live.pop(kind, None) or self._built(client, learn=state is None)
        self._live[kind] = live
        if len(self._live) > SEATS:
            self._live.popitem(last=False)
        self.clients.assign(live, client)
        live.restore(state if state is not None else self.initial.of(client))
        return live

    def _built(self, client: ClientId, learn: bool) -> Client:
        live = self.clients.build_client(client)
        if learn:
            self.initial.learn(client, live)
        return live

    def live(self) -> list[Client]:
        """The clients that are built now, each with the state it was given last."""
        return list(self._live.values())
