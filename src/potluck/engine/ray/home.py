"""A home: a process that plays clients for a driver on another machine.

The driver's store is the truth. A home keeps the states its clients ended with, each under a version that the
driver gave it, so that a state travels only if the driver has another one. It may forget any of them: the driver
sends what is missing again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from potluck.engine.settings import EngineSettings
from potluck.engine.store.budget import Budget
from potluck.engine.store.client_store import ClientStore
from potluck.engine.this_machine import local_engine
from potluck.engine.transactions import Done, Work
from potluck.engine.wire import TensorFrame, done_frame, read_errand, reply_note
from potluck.engine.workers import trouble_frame
from potluck.errors import PotluckError
from potluck.federation.builder import ClientBuilder, Recipe

CACHE = 0.5  # of what a budget gives the states of a machine: driver and homes may share one
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
    """An errand as a home reads it: the state it starts from by version, and the version it will end with."""

    request: Request | Examination
    state: State | None
    counters: dict[str, int]
    first: bool
    version: int
    becomes: int

    @classmethod
    def read(cls, arrays: Sequence[np.ndarray], commons: Sequence[Message], device: torch.device) -> Letter:
        """Read a letter, the downlink onto the home's device; one that many clients get lies in `commons`."""
        frame = TensorFrame.unpack(arrays)
        note = frame.note
        errand = read_errand(frame)
        request, common = errand.request, note["common"]
        down = request.down if common is None else commons[common]
        return cls(
            request if down is None else replace(request, down=down.to(device)),
            errand.state,
            dict(errand.counters),
            errand.first,
            note["version"],
            note["becomes"],
        )

    @property
    def client(self) -> ClientId:
        """Whom the errand is for."""
        return self.request.client


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

    def serve(
        self, letters: Sequence[Sequence[np.ndarray]], commons: Sequence[Sequence[np.ndarray]]
    ) -> Iterator[list[np.ndarray]]:
        """The replies to letters, in their order; on a CPU each as soon as it is there."""
        downs = [Message(TensorFrame.unpack(one).groups["down"]).to(self.device) for one in commons]
        calls = [letters] if self.at_once else [[one] for one in letters]
        for call in calls:
            for reply in self._replies([Letter.read(one, downs, self.device) for one in call]):
                yield reply.pack()

    def _replies(self, letters: Sequence[Letter]) -> list[TensorFrame]:
        """Do all errands whose state is here; a fault in one is the reply to all."""
        started = time.perf_counter()
        known = [letter for letter in letters if self._seat(letter)]
        try:
            outcomes = dict(zip([one.client for one in known], self._outcomes(known), strict=True))
            replies = [self._reply(one, outcomes.get(one.client)) for one in letters]
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
        if requests:
            return self.engine.run(requests)
        return self.engine.examine([one.request for one in letters if isinstance(one.request, Examination)])

    def _reply(self, letter: Letter, outcome: Outcome | None) -> TensorFrame:
        """What goes back: an answer with the new state, a failure, or that the state is missing here."""
        if outcome is None:
            return TensorFrame({"missing": True})
        if isinstance(outcome, Failure):
            self.store.settle(letter.client, -1)
            return TensorFrame({"failure": reply_note(outcome)["reason"]})
        if isinstance(letter.request, Examination):
            return done_frame(on_host(Done(outcome)))
        record = self.store.record(letter.client)
        work = record.work
        assert work is not None, "who answered has worked"
        frame = done_frame(on_host(Done(outcome, record.worked(), work.counters)))
        self.store.settle(letter.client, work.round)
        self.versions[letter.client] = letter.becomes
        return replace(frame, note={**frame.note, "version": letter.becomes})

    def _told(self) -> list[str]:
        told, self.notices[:] = [*self.notices], []
        return told

    def _trim(self) -> None:
        """Forget the states used least recently; what was used last stays."""
        while self.store.host.used > self.limit and len(self.versions) > 1:
            self._forget(next(iter(self.versions)))

    def _forget(self, client: ClientId) -> None:
        self.versions.pop(client, None)
        self.store.replace(client, None)


def on_host(done: Done) -> Done:
    """The same in the host's memory."""
    report = done.answer.report
    told = replace(report, losses=_on_host(report.losses), metrics=_on_host(report.metrics))
    answer = replace(done.answer, up=done.answer.up.to("cpu"), report=told)
    return replace(done, answer=answer, state=None if done.state is None else _state_on_host(done.state))


def _state_on_host(state: State) -> State:
    if isinstance(state, Packed):
        return Packed(state.flat.cpu(), state.layout, _on_host(state.loose))
    return _on_host(state)


def _on_host(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}
