"""A home: a process that plays clients for a driver on another machine.

A home keeps the states its clients ended with, each under a version that the driver gave it, so that a state
travels only if the driver has another one. It sends a new state along with its answer, or owes it
(`potluck.engine.ray.owed`). It may forget any state: the driver has what is missing, or what led to it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.packed import Packed, State
from potluck.core.state import Report
from potluck.engine.numerics import precision, threads
from potluck.engine.protocol import Answer, Examination, Failure, Outcome, Request
from potluck.engine.ray.alike import fingerprint
from potluck.engine.ray.owed import is_due
from potluck.engine.settings import EngineSettings
from potluck.engine.store.budget import Budget
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.transfers import size
from potluck.engine.this_machine import local_engine
from potluck.engine.transactions import Done, Work
from potluck.engine.wire import TensorFrame, done_frame, read_errand, reply_note
from potluck.engine.workers import trouble_frame
from potluck.errors import PotluckError
from potluck.federation.builder import ClientBuilder, Recipe

CACHE = 0.5  # of what a budget gives the states of a machine: driver and homes may share one
DEBT = 0.5  # of the states in memory: as many may be owed to the driver
BUNDLE = 4 << 20  # bytes of replies that are sent together
SMALL = 1 << 20  # bytes of a tensor that is not copied alone
INITIAL = 0  # the version of a client that was never asked: its state is built from the seed


def opened(
    recipe: Callable[[], Recipe], values: dict[str, Any], share: float
) -> tuple[HomeProcess | None, dict[str, Any]]:
    """A home with these settings that may take this share of the machine, and its fingerprint."""
    try:
        settings = EngineSettings(**values)
        device = settings.torch_device()
        home = HomeProcess(recipe().clients(str(device)), settings, share)
        return home, {"fingerprint": fingerprint(device, settings.threads), "used": time.process_time()}
    except PotluckError as error:
        return None, {"refused": str(error)}


@dataclass(frozen=True)
class Letter:
    """An errand as a home reads it: the state it starts from by version, and the version it will end with.

    Without a request, the state itself is asked for. `behind` are the seconds of training that led to a state which
    is owed; None: the new state must be sent.
    """

    client: ClientId
    request: Request | Examination | None
    state: State | None
    counters: dict[str, int]
    first: bool
    version: int
    becomes: int
    behind: float | None

    @classmethod
    def read(cls, arrays: Sequence[np.ndarray], commons: Sequence[Message], device: torch.device) -> Letter:
        """Read a letter, the downlink onto the home's device; one that many clients get lies in `commons`."""
        frame = TensorFrame.unpack(arrays)
        note = frame.note
        if "recall" in note:
            return cls(note["recall"], None, None, {}, True, note["version"], note["version"], None)
        errand = read_errand(frame)
        request, common = errand.request, note["common"]
        down = request.down if common is None else commons[common]
        return cls(
            request.client,
            request if down is None else replace(request, down=down.to(device)),
            errand.state,
            dict(errand.counters),
            errand.first,
            note["version"],
            note["becomes"],
            note["behind"],
        )


class HomeProcess:
    """The clients of one home: an engine of this machine, with a store that is a cache of the driver's."""

    def __init__(self, clients: ClientBuilder, settings: EngineSettings, share: float = 1.0) -> None:
        self._set = ExitStack()  # for as long as the process lives
        self._set.enter_context(threads(settings.threads))
        self._set.enter_context(precision(settings.precision))
        budget = Budget.of(None, clients.device, share * CACHE)
        self.limit = budget.host
        self.store = ClientStore(replace(budget, device=int(share * budget.device)), device=clients.device)
        self.notices: list[str] = []
        self.engine = local_engine(clients, settings, self.store, self.notices.append)
        self.device = clients.device
        self.at_once = self.device.type == "cuda"  # a GPU plays all clients of a call side by side
        self.versions: OrderedDict[ClientId, int] = OrderedDict()  # least recently used first
        self.owed: dict[ClientId, int] = {}  # bytes of the states that the driver does not have

    def serve(
        self, letters: Sequence[Sequence[np.ndarray]], commons: Sequence[Sequence[np.ndarray]]
    ) -> Iterator[list[list[np.ndarray]]]:
        """The replies to letters, in their order and in bundles; on a CPU each as soon as it is there."""
        downs = [Message(TensorFrame.unpack(one).groups["down"]).to(self.device) for one in commons]
        calls = [letters] if self.at_once else [[one] for one in letters]
        for call in calls:
            replies = self._replies([Letter.read(one, downs, self.device) for one in call])
            yield from _bundles([reply.pack() for reply in replies])

    def _replies(self, letters: Sequence[Letter]) -> list[TensorFrame]:
        """Do all errands whose state is here; a fault in one is the reply to all."""
        started = time.perf_counter()
        known = [letter for letter in letters if self._seat(letter)]
        try:
            asked = [letter for letter in known if letter.request is not None]
            found = on_host(self._outcomes(asked))
            outcomes = dict(zip([one.client for one in asked], found, strict=True))
            worked = (time.perf_counter() - started) / len(letters)
            replies = [self._reply(one, outcomes.get(one.client), worked) for one in letters]
        except BaseException as error:
            return [trouble_frame(error)] * len(letters)
        self._trim()
        taken = (time.perf_counter() - started) / len(letters)
        about = {"seconds": taken, "used": time.process_time(), "notices": self._told()}
        return [replace(reply, note={**reply.note, **about}) for reply in replies]

    def _seat(self, letter: Letter) -> bool:
        """Let the client's record be as the driver's; False if its state is not here."""
        client = letter.client
        if letter.state is not None:
            self.owed.pop(client, None)
            self.store.put(client, letter.state)
        elif letter.version == INITIAL:
            self._forget(client)
        elif self.versions.get(client) != letter.version:
            return False
        self.versions[client] = letter.version
        self.versions.move_to_end(client)
        if not letter.first and isinstance(letter.request, Request):
            self._resume(letter, letter.request)
        return True

    def _resume(self, letter: Letter, request: Request) -> None:
        """Let the record stand in the middle of a round."""
        record, stamp = self.store.record(letter.client), request.stamp
        state = record.base
        assert state is not None, "a client in the middle of a round has a state"
        answer = Answer(letter.client, Message(), report=Report())
        record.work = Work(stamp.round, stamp.attempt, -1, state, answer, letter.counters, stamp.incarnation)

    def _outcomes(self, letters: Sequence[Letter]) -> list[Outcome]:
        requests = [one.request for one in letters if isinstance(one.request, Request)]
        if requests or not letters:
            return self.engine.run(requests) if requests else []
        return self.engine.examine([one.request for one in letters if isinstance(one.request, Examination)])

    def _reply(self, letter: Letter, outcome: Outcome | None, seconds: float) -> TensorFrame:
        """What goes back: an answer and perhaps the new state, a failure, a state, or that the state is missing."""
        if letter.request is None and self.versions.get(letter.client) == letter.version:
            return self._recalled(letter.client)
        if outcome is None:
            return TensorFrame({"missing": True})
        if isinstance(outcome, Failure):
            self.store.settle(letter.client, -1)
            return TensorFrame({"failure": reply_note(outcome)["reason"]})
        if isinstance(letter.request, Examination):
            return done_frame(Done(outcome))
        return self._answered(letter, outcome, seconds)

    def _recalled(self, client: ClientId) -> TensorFrame:
        """A state that the driver wants now."""
        self.owed.pop(client, None)
        state = self.store.fetch(client)
        assert state is not None, "what has a version is stored"
        return TensorFrame({}, {"state": _state_on_host(state)})

    def _answered(self, letter: Letter, answer: Answer, seconds: float) -> TensorFrame:
        """An answer, with the new state unless that may wait."""
        client, record = letter.client, self.store.record(letter.client)
        work, state = record.work, record.worked()
        assert work is not None, "who answered has worked"
        nbytes = size(state)
        self.owed.pop(client, None)
        waits = letter.behind is not None and not is_due(letter.behind + seconds, nbytes)
        if waits and sum(self.owed.values()) + nbytes <= DEBT * self.limit:
            self.owed[client] = nbytes
        sent = None if client in self.owed else _state_on_host(state)
        frame = done_frame(Done(answer, sent, work.counters))
        about = {"version": letter.becomes, "owed": self.owed.get(client)}
        self.store.settle(client, work.round)
        self.versions[client] = letter.becomes
        return replace(frame, note={**frame.note, **about})

    def _told(self) -> list[str]:
        told, self.notices[:] = [*self.notices], []
        return told

    def _trim(self) -> None:
        """Forget the states used least recently, those that are owed at the end; what was used last stays."""
        while self.store.host.used > self.limit and len(self.versions) > 1:
            others = [*self.versions][:-1]
            self._forget(next((client for client in others if client not in self.owed), others[0]))

    def _forget(self, client: ClientId) -> None:
        self.versions.pop(client, None)
        self.owed.pop(client, None)
        self.store.replace(client, None)


def _bundles(replies: Iterable[list[np.ndarray]]) -> Iterator[list[list[np.ndarray]]]:
    """Replies that are sent together: small ones take longer on their way than they would take to read."""
    bundle, room = list[list[np.ndarray]](), BUNDLE
    for reply in replies:
        bundle.append(reply)
        room -= sum(array.nbytes for array in reply)
        if room <= 0:
            yield bundle
            bundle, room = [], BUNDLE
    if bundle:
        yield bundle


def on_host(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same in the host's memory."""
    groups = [_tensors(one) for one in outcomes if isinstance(one, Answer)]
    found = iter(brought([value for group in groups for values in group for value in values.values()]))

    def there(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: next(found) for name in values}

    def moved(answer: Answer) -> Answer:
        up, losses, metrics = map(there, _tensors(answer))
        return replace(answer, up=Message(up), report=replace(answer.report, losses=losses, metrics=metrics))

    return [moved(one) if isinstance(one, Answer) else one for one in outcomes]


def _tensors(answer: Answer) -> tuple[Mapping[str, Tensor], ...]:
    return answer.up, answer.report.losses, answer.report.metrics


def brought(values: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in the host's memory. Small ones come in one copy for each type: each copy waits for the device."""
    found = {place: value.cpu() for place, value in enumerate(values) if not _is_small(value)}
    kinds: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        if place not in found:
            kinds.setdefault((value.device, value.dtype), []).append(place)
    for places in kinds.values():
        whole = torch.cat([values[place].detach().reshape(-1) for place in places]).cpu()
        parts = torch.split(whole, [values[place].numel() for place in places])
        found |= {place: part.view(values[place].shape) for place, part in zip(places, parts, strict=True)}
    return [found[place] for place in range(len(values))]


def _is_small(value: Tensor) -> bool:
    return value.device.type != "cpu" and value.nbytes <= SMALL


def _state_on_host(state: State) -> State:
    if isinstance(state, Packed):
        return Packed(state.flat.cpu(), state.layout, _on_host(state.loose))
    return _on_host(state)


def _on_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}
