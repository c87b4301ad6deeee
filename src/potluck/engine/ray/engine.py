"""Clients on the machines of a Ray cluster, each played by one of many homes.

Homes are caches, the store here is the truth. A reply brings the client's new state with it, or the store notes how
it was made (`potluck.engine.ray.owed`). So a home that is lost takes nothing along: its requests go to others, with
the same stamp and the same state, made again if need be. Randomness depends on neither place nor attempt, so the
numbers stay the same.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.packed import State
from potluck.core.state import Report
from potluck.engine.protocol import Answer, Examination, Failure, Outcome, Request
from potluck.engine.ray.balance import Seconds, shared_out
from potluck.engine.ray.cluster import Cluster
from potluck.engine.ray.commons import Commons
from potluck.engine.ray.handles import Home, Lost
from potluck.engine.ray.home import INITIAL
from potluck.engine.ray.homes import Homes
from potluck.engine.ray.owed import PER_GB, AnyRequest, Owed, Recall, Replay, seconds_behind
from potluck.engine.runner import StoringEngine, guarded
from potluck.engine.settings import EngineSettings
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Errand, opened, stored
from potluck.engine.wire import TensorFrame, errand_frame, read_done
from potluck.engine.workers import raise_trouble
from potluck.errors import ConfigError, RunError
from potluck.federation.builder import ClientBuilder
from potluck.signals import held_back

LARGEST = 256 << 20  # bytes of states that one call may carry
STRIKES = 3  # homes that may be lost in a row while a client is at work
LINEAGE = 0.25  # of the memory for states: for what led to states that are elsewhere


@dataclass(frozen=True)
class Version:
    """A number for a state of a client, as long as the store has that very state."""

    number: int
    state: Callable[[], State | None]


@dataclass(frozen=True)
class AtWork:
    """What a client is doing, and where its downlink lies among those that many get."""

    errand: Errand
    commons: Commons
    common: int | None

    def lasting(self) -> Errand:
        """The errand, to be done again some day."""
        request = self.errand.request
        if request.down is None:
            return self.errand
        return replace(
            self.errand, request=replace(request, down=self.commons.lasting(request.down, self.common))
        )


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
        self._owed: dict[ClientId, Owed] = {}  # the newest state of a client, while it is at a home alone
        self._kept = 0  # bytes of what led to them
        self._at_work: dict[ClientId, AtWork] = {}
        self._lineage = 0 if settings.mixed else int(LINEAGE * self.store.host.limit)  # bytes
        self._expected, self._strikes = Seconds(), dict[ClientId, int]()
        self.store.bring = self._bring
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
        started = time.perf_counter()
        outcomes = self._exchange(requests)
        self._seconds += time.perf_counter() - started
        return [outcomes[request.client] for request in requests]

    def _exchange(self, requests: Sequence[AnyRequest]) -> dict[ClientId, Outcome]:
        outcomes: dict[ClientId, Outcome] = {}
        commons = Commons()
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
        return outcomes

    def _share_out(self, requests: Sequence[AnyRequest]) -> None:
        """Give requests to homes; states that only another home has are brought here before."""
        if not self.homes.alive:
            self.homes.wait_for_one()
        shares = shared_out(requests, self.homes.alive, self._cost, self._home, self._moving)
        moved = [
            Recall(one.client, self._owed[one.client])
            for home, share in shares.items()
            for one in share
            if one.client in self._owed and self._home(one) not in (None, home)
        ]
        if moved and not any(home.call or home.share for home in self.homes.alive):
            self._exchange(moved)
        left = [one for home, share in shares.items() if home not in self.homes.alive for one in share]
        for home, share in shares.items():
            home.share.extend(share if home in self.homes.alive else ())
        if left:
            self._share_out(left)

    def _hand_out(self, home: Home, commons: Commons) -> dict[ClientId, Outcome]:
        """Send a home as much of its share as fits into a call; gives the outcomes that need no work.

        What leads to a state that is lost goes before, in calls of its own; the request for that state waits.
        """
        early: dict[ClientId, Outcome] = {}
        asked, letters, waiting, bytes_ = list[AnyRequest](), list[list[np.ndarray]](), list[AnyRequest](), 0
        while home.share and bytes_ < LARGEST:
            request = home.share.popleft()
            errand = self._opened(request)
            if not isinstance(errand, Errand):
                early[request.client] = errand
                continue
            again = self._to_repeat(home, errand)
            if asked and isinstance(asked[0], Replay) is (again is None):
                home.share.appendleft(request)
                break
            letter, size = self._written(home, request, errand, again, commons)
            asked.append(request if again is None else Replay(request.client, again))
            waiting += [] if again is None else [request]
            letters.append(letter)
            bytes_ += size
        home.share.extendleft(reversed(waiting))
        if letters:
            home.begin(asked, letters, commons.refs)
        return early

    def _opened(self, request: AnyRequest) -> Errand | Outcome:
        """What a request starts from; one for a state starts from that state."""
        if isinstance(request, Recall):
            there = request.state.arrived is not None
            return _nothing(request.client) if there else Errand(request, request.state)  # type: ignore[arg-type]
        assert not isinstance(request, Replay), "a home is asked for it at once"
        return guarded(self.clients, request.client, lambda: opened(self.store, request))

    def _to_repeat(self, home: Home, errand: Errand) -> Owed | None:
        """The first state that a home must make again before it can do an errand, None if it has all it needs."""
        found, state = None, errand.state
        while isinstance(state, Owed) and state.arrived is None:
            if self._places.get(state.client) == (home, state.version):
                return found
            assert state.errand is not None, "a state that is elsewhere has an errand that led to it"
            found, state = state, state.errand.state
        return found

    def _written(
        self, home: Home, request: AnyRequest, errand: Errand, again: Owed | None, commons: Commons
    ) -> tuple[list[np.ndarray], int]:
        """A letter about a request, or about a state that comes before it; and the bytes that it moves."""
        if again is not None:
            assert again.errand is not None
            letter = self._letter(home, again.errand, None, again.version, 0.0)
        elif isinstance(request, Recall):
            note = {"recall": request.client, "version": request.state.version}
            return TensorFrame(note).pack(), request.state.nbytes
        else:
            common = commons.place(self.clients.kind(request.client), errand.request.down)
            self._at_work[request.client] = AtWork(errand, commons, common)
            letter = self._letter(home, errand, common, next(self._numbers), self._behind(errand))
        return letter, sum(array.nbytes for array in letter)

    def _letter(
        self, home: Home, errand: Errand, common: int | None, becomes: int, behind: float | None
    ) -> list[np.ndarray]:
        """An errand as a home reads it, without what the home has already."""
        client, state = errand.request.client, errand.state
        state = state.arrived or state if isinstance(state, Owed) else state
        version = self._version(client, state)
        known = {"state"} if self._places.get(client) == (home, version) else set()
        known |= set() if common is None else {"down"}
        self._places[client] = home, version
        frame = errand_frame(replace(errand, state=state))
        about = {"version": version, "becomes": becomes, "common": common, "behind": behind}
        return TensorFrame(
            {**frame.note, **about},
            {name: group for name, group in frame.groups.items() if name not in known},
        ).pack()

    def _behind(self, errand: Errand) -> float | None:
        """The seconds of training that led to a state which is owed; None if the next one must not be owed."""
        return seconds_behind(errand.state) if self._kept < self._lineage else None

    def _owe(self, client: ClientId, owed: Owed | None) -> None:
        """Note that the newest state of a client is owed, or no longer."""
        before = self._owed.pop(client, None)
        self._kept -= 0 if before is None else before.kept
        if owed is not None:
            self._owed[client] = owed
            self._kept += owed.kept

    def _version(self, client: ClientId, state: State | None) -> int:
        """The number of the state that a client starts from."""
        if state is None:
            return INITIAL
        if isinstance(state, Owed):
            return state.version
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
                self._places.pop(request.client, None)
                home.share.extendleft([request] if not isinstance(request, Replay) else ())
            elif isinstance(request, Replay):
                outcomes |= self._repeated(home, request, frame)
            else:
                outcomes[request.client] = self._taken(home, request, frame)
        return outcomes

    def _repeated(self, home: Home, request: Replay, frame: TensorFrame) -> dict[ClientId, Outcome]:
        """Note that a home has made a state again; the outcome of its client if it could not."""
        self._note_about(home, frame)

        def note() -> Answer:
            raise_trouble(frame)
            self._places[request.client] = home, request.state.version
            if "state" in frame.groups:
                self._arrived(request.state, frame.groups["state"])
            return read_done(frame).answer

        found = guarded(self.clients, request.client, note)
        if not isinstance(found, Failure):
            return {}
        others = [one for one in home.share if one.client != request.client]
        home.share.clear()
        home.share.extend(others)
        return {request.client: found}

    def _taken(self, home: Home, request: AnyRequest, frame: TensorFrame) -> Outcome:
        """Store what a home has done."""
        self._strikes.pop(request.client, None)
        at_work = self._at_work.pop(request.client, None)
        self._note_about(home, frame)
        if "seconds" in frame.note and isinstance(request, Request | Examination):
            self._expected.note(*self._kind_of_work(request), frame.note["seconds"])

        def store() -> Answer:
            raise_trouble(frame)
            if isinstance(request, Recall):
                self._arrived(request.state, frame.groups["state"])
                return _nothing(request.client)
            assert at_work is not None
            return self._stored(home, at_work, frame)

        return guarded(self.clients, request.client, store)

    def _stored(self, home: Home, at_work: AtWork, frame: TensorFrame) -> Answer:
        """Store an answer, and a state that came with it or is owed."""
        request, note, done = at_work.errand.request, frame.note, read_done(frame)
        client = request.client
        if note.get("owed") is not None:
            owed = Owed(at_work.lasting(), note["version"], note["owed"], note["seconds"], self._bring)
            self._owe(client, owed)
            done = replace(done, state=owed)
        elif done.state is not None:
            self._owe(client, None)
            self._versions[client] = Version(note["version"], _reference(done.state))
        if done.state is not None:
            self._places[client] = home, note["version"]
        return stored(self.store, request, done).answer

    def _arrived(self, owed: Owed, state: State) -> None:
        """Take a state that was owed."""
        owed.arrive(state)
        if self._owed.get(owed.client) is owed:
            self._owe(owed.client, None)
            self._versions[owed.client] = Version(owed.version, _reference(state))

    def _bring(self, states: Sequence[Any]) -> None:
        """Fetch states from their homes; those of lost homes are made again."""
        asked = [Recall(state.client, state) for state in states if state.arrived is None]
        failed = [one for one in self._exchange(asked).values() if isinstance(one, Failure)]
        if failed:
            raise RunError(f"a state could not be made again: {failed[0].reason}")

    def _note_about(self, home: Home, frame: TensorFrame) -> None:
        """Hear what a home says besides."""
        for sentence in frame.note.get("notices", ()):
            self.notice(sentence)
        home.seconds += frame.note.get("seconds", 0.0)

    def _lost(self, home: Home, why: str) -> dict[ClientId, Outcome]:
        """Give the requests of a lost home to others, but for a client that has lost several in a row."""
        self._places = {client: place for client, place in self._places.items() if place[0] is not home}
        left = self.homes.lose(home, why)
        first = left[0].client
        self._strikes[first] = self._strikes.get(first, 0) + 1
        given_up = self._strikes[first] >= STRIKES
        requests = [one for one in left if not isinstance(one, Replay)]
        self._share_out([one for one in requests if one.client != first or not given_up])
        if not given_up:
            return {}
        del self._strikes[first]
        reason = (
            f"client {first}: {STRIKES} homes in a row were lost while it was at work, the last one: {why}"
        )
        return {first: Failure(first, reason)}

    # --- what is known of clients ---

    def _home(self, request: AnyRequest) -> Home | None:
        """The home that has a client's state, if there is one that is not lost."""
        found = self._places.get(request.client, (None, 0))[0]
        return found if found in self.homes.alive else None

    def _cost(self, request: AnyRequest) -> float:
        if not isinstance(request, Request | Examination):
            return request.state.nbytes * PER_GB / 1e9
        return self._expected.expected(*self._kind_of_work(request))

    def _moving(self, request: AnyRequest) -> float:
        """The seconds that it takes to bring a client to another home than its own."""
        if isinstance(request, Recall):
            return math.inf
        owed = self._owed.get(request.client)
        return 0.0 if owed is None else owed.nbytes * 2 * PER_GB / 1e9

    def _kind_of_work(self, request: Request | Examination) -> tuple[Any, int]:
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


def _nothing(client: ClientId) -> Answer:
    return Answer(client, Message(), Report())
