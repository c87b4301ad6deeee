"""Clients on the machines of a Ray cluster, each played by one of many homes.

Homes are caches, the store here is the truth. A reply brings the client's new state with it, so a home that is lost
takes nothing along: its requests go to others, with the same stamp and the same state. Randomness depends on
neither place nor attempt, so the numbers stay the same.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.engine.protocol import Answer, Examination, Failure, Outcome, Request
from potluck.engine.ray.balance import Seconds, shared_out
from potluck.engine.ray.cluster import Cluster
from potluck.engine.ray.commons import Commons
from potluck.engine.ray.handles import AnyRequest, Home, Lost
from potluck.engine.ray.home import INITIAL
from potluck.engine.ray.homes import Homes
from potluck.engine.runner import StoringEngine, guarded
from potluck.engine.settings import EngineSettings
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Errand, opened, stored
from potluck.engine.wire import TensorFrame, errand_frame, read_done
from potluck.engine.workers import raise_trouble
from potluck.errors import ConfigError
from potluck.federation.builder import ClientBuilder
from potluck.signals import held_back

LARGEST = 256 << 20  # bytes of states that one call may carry
STRIKES = 3  # homes that may be lost in a row while a client is at work


@dataclass(frozen=True)
class Version:
    """A number for a state of a client, as long as the store has that very state."""

    number: int
    state: Callable[[], State | None]


class RayEngine(StoringEngine):
    """Gives every request to a home, preferably to the one that has the client's state."""

    def __init__(
        self,
        clients: ClientBuilder,
        settings: EngineSettings,
        store: ClientStore | None = None,
        notice: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        if clients.recipe is None:
            raise ConfigError(
                "engine.name: ray plays clients that an experiment describes, and these are others"
            )
        self.clients, self.notice = clients, notice
        self.store = store if store is not None else ClientStore()
        self._numbers = itertools.count(INITIAL + 1)
        self._versions: dict[ClientId, Version] = {}
        self._places: dict[ClientId, tuple[Home, int]] = {}  # who has which version
        self._expected, self._strikes = Seconds(), dict[ClientId, int]()
        self._seconds = 0.0  # of all exchanges
        self._end = contextlib.ExitStack()
        cluster = Cluster(settings.address)
        self._end.callback(cluster.close)
        try:
            self.homes = Homes(cluster, clients.recipe(), settings, len(clients.population.ids), notice)
        except BaseException:
            self.close()
            raise
        self._end.callback(self.homes.close)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Have the homes serve every request."""
        return self._spread(requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Have the homes measure every client."""
        return self._spread(examinations)

    def remarks(self) -> dict[str, Any]:
        """For the summary: every home with the share of the time that it was at work."""
        whole = max(self._seconds, 1e-9)
        homes = [
            {
                "node": one.node,
                "busy": min(one.seconds / whole, 1.0),
                "lost": one.lost,
                "answers": one.answers,
                "bytes_sent": one.sent,
                "bytes_received": one.received,
            }
            for one in self.homes.known
        ]
        return {"homes": homes}

    def close(self) -> None:
        """End all homes, and the cluster if it was started for this run."""
        with held_back():
            self._end.close()

    # --- one exchange ---

    def _spread(self, requests: Sequence[AnyRequest]) -> list[Outcome]:
        outcomes: dict[ClientId, Outcome] = {}
        commons, started = Commons(), time.perf_counter()
        try:
            self.homes.refill()
            self._share_out(requests)
            while len(outcomes) < len(requests):
                for home in self.homes.alive:
                    if home.call is None and home.share:
                        outcomes |= self._hand_out(home, commons)
                outcomes |= self._collect()
        except BaseException:
            self.homes.abandon()
            raise
        self._seconds += time.perf_counter() - started
        return [outcomes[request.client] for request in requests]

    def _share_out(self, requests: Sequence[AnyRequest]) -> None:
        """Give requests to homes."""
        if not self.homes.alive:
            self.homes.wait_for_one()

        def home(request: AnyRequest) -> Home | None:
            return self._places[request.client][0] if request.client in self._places else None

        for one, share in shared_out(requests, self.homes.alive, self._cost, home).items():
            one.share.extend(share)

    def _hand_out(self, home: Home, commons: Commons) -> dict[ClientId, Outcome]:
        """Send a home as much of its share as fits into a call; gives the outcomes that need no work."""
        early: dict[ClientId, Outcome] = {}
        requests, letters, bytes_ = list[AnyRequest](), list[list[np.ndarray]](), 0
        while home.share and bytes_ < LARGEST:
            request = home.share.popleft()
            errand = self._opened(request)
            if not isinstance(errand, Errand):
                early[request.client] = errand
                continue
            requests.append(request)
            letters.append(self._letter(home, errand, commons))
            bytes_ += sum(array.nbytes for array in letters[-1])
        if letters:
            home.begin(requests, letters, commons.refs)
        return early

    def _opened(self, request: AnyRequest) -> Errand | Outcome:
        return guarded(self.clients, request.client, lambda: opened(self.store, request))

    def _letter(self, home: Home, errand: Errand, commons: Commons) -> list[np.ndarray]:
        """An errand as a home reads it, without what the home has already."""
        client = errand.request.client
        version = self._version(client, errand.state)
        common = commons.place(self.clients.kind(client), errand.request.down)
        known = {"state"} if self._places.get(client) == (home, version) else set()
        known |= set() if common is None else {"down"}
        self._places[client] = home, version
        frame = errand_frame(errand)
        note = {**frame.note, "version": version, "becomes": next(self._numbers), "common": common}
        return TensorFrame(
            note, {name: group for name, group in frame.groups.items() if name not in known}
        ).pack()

    def _version(self, client: ClientId, state: State | None) -> int:
        """The number of the state that a client starts from."""
        if state is None:
            return INITIAL
        known = self._versions.get(client)
        if known is None or known.state() is not state:
            known = self._versions[client] = Version(next(self._numbers), _reference(state))
        return known.number

    def _collect(self) -> dict[ClientId, Outcome]:
        """Take the replies that are there; requests of lost homes go to others."""
        outcomes: dict[ClientId, Outcome] = {}
        for home, found in self.homes.replies():
            if isinstance(found, Lost):
                outcomes |= self._lost(home, str(found))
                continue
            request, frame = found
            if "missing" in frame.note:
                del self._places[request.client]
                home.share.appendleft(request)
            else:
                outcomes[request.client] = self._taken(home, request, frame)
        return outcomes

    def _taken(self, home: Home, request: AnyRequest, frame: TensorFrame) -> Outcome:
        """Store what a home has done."""
        client, note = request.client, frame.note
        self._strikes.pop(client, None)
        for sentence in note.get("notices", ()):
            self.notice(sentence)
        if "seconds" in note:
            home.seconds += note["seconds"]
            self._expected.note(*self._kind_of_work(request), note["seconds"])

        def store() -> Answer:
            raise_trouble(frame)
            done = stored(self.store, request, read_done(frame))
            if done.state is not None:
                self._versions[client] = Version(note["version"], _reference(done.state))
                self._places[client] = home, note["version"]
            return done.answer

        return guarded(self.clients, client, store)

    def _lost(self, home: Home, why: str) -> dict[ClientId, Outcome]:
        """Give the requests of a lost home to others, but for a client that has lost several in a row."""
        self._places = {client: place for client, place in self._places.items() if place[0] is not home}
        left = self.homes.lose(home, why)
        first = left[0].client
        self._strikes[first] = self._strikes.get(first, 0) + 1
        given_up = self._strikes[first] >= STRIKES
        self._share_out(left[1:] if given_up else left)
        if not given_up:
            return {}
        del self._strikes[first]
        reason = (
            f"client {first}: {STRIKES} homes in a row were lost while it was at work, the last one: {why}"
        )
        return {first: Failure(first, reason)}

    # --- what is known of clients ---

    def _cost(self, request: AnyRequest) -> float:
        return self._expected.expected(*self._kind_of_work(request))

    def _kind_of_work(self, request: AnyRequest) -> tuple[Any, int]:
        """What takes the same time per sample, and the number of samples."""
        split = self.clients.split.clients
        train, *others = split.sizes[split.places[request.client]].tolist()
        kind = self.clients.kind(request.client)
        if isinstance(request, Request):
            return (kind, request.steps), train
        return (kind, request.modes, request.on), sum(others)


def _reference(state: State) -> Callable[[], State | None]:
    """Leads to a state while it exists; a plain mapping counts as another one each time."""
    try:
        return weakref.ref(state)
    except TypeError:
        return lambda: None
