"""The whole cohort at once on a GPU: every client on a stream of its own, its training step a captured graph.

A slot is a live client with a stream (`slots`); its steps are replayed from graphs (`graphs`). All slots can be in
flight together, because no two share memory. The host only waits when replies are read.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.packed import Packed, State
from potluck.core.server import Server
from potluck.engine.cuda.graphs import GraphRunner, RowsOnDevice, ServerRunner, device_index
from potluck.engine.cuda.slots import Exchange, Slot, Slots
from potluck.engine.protocol import Examination, Outcome, Request
from potluck.engine.runner import StoringEngine, TransactionRunner, guarded
from potluck.engine.seats import InitialStates
from potluck.engine.store.client_store import ClientStore
from potluck.federation.builder import ClientBuilder
from potluck.training.collect import collecting_with
from potluck.training.compiled import CompiledModels
from potluck.training.fit import running_with

R = TypeVar("R", Request, Examination)
STREAMS = 32


class CudaEngine(StoringEngine):
    """Clients on one GPU, all of a cohort in flight."""

    def __init__(
        self,
        clients: ClientBuilder,
        store: ClientStore | None = None,
        slots: int = 128,
        streams: int = STREAMS,
        notice: Callable[[str], None] = lambda sentence: None,
        compiles: bool = False,
    ) -> None:
        self.clients, self.compiles = clients, compiles
        self.store = store if store is not None else ClientStore()
        self.runner = TransactionRunner(clients)
        self.index = device_index(clients.device)
        self.streams = [torch.cuda.Stream(clients.device) for _ in range(streams)]  # type: ignore[no-untyped-call]
        self._notice, self._told = notice, set[str]()
        self.slots = Slots(
            clients.device, clients.kind, slots, self.streams, self._tell, self._size_of_last_batch
        )
        self._rows = RowsOnDevice(clients.device)
        self._initial = InitialStates(clients)
        self._server: ServerRunner | None = None

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Put every client to work on its stream; nobody waits."""
        return self.slots.within_memory(requests, self._attempt)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client on its stream."""
        return self.slots.within_memory(examinations, self._attempt)

    def at_server(self, server: Server) -> contextlib.AbstractContextManager[None]:
        """The server's training steps are captured, too; its script runs on the main stream."""
        if server.device.type != "cuda":
            return contextlib.nullcontext()
        if self._server is None or self._server.server is not server:
            self._server = ServerRunner(server, self._tell)
        return running_with(self._server.train)

    def close(self) -> None:
        """Free the device's memory for the next run: a comparison plays many in one process.

        Torch keeps a workspace of cuBLAS for every stream that multiplied matrices and never frees them itself:
        130 MiB a run on an H200.
        """
        torch.cuda.synchronize(self.clients.device)
        self._server = None
        self.slots.clear()
        torch._C._cuda_clearCublasWorkspaces()

    def _attempt(self, requests: Sequence[R], exchange: Exchange) -> list[Outcome]:
        with self._at_work() as main:
            return self.slots.spread(
                requests, exchange, partial(self._new_slot, main), partial(self._serve, main)
            )

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[torch.cuda.Stream]:
        """Slots wait for what the main stream has done so far; at the end the main stream waits for them.

        Gives the main stream. Inside, every slot sets the default generator to its own.
        """
        with torch.cuda.device(self.index):
            main = torch.cuda.current_stream(self.index)
            default = torch.cuda.default_generators[self.index]
            shared = default.graphsafe_get_state()
            ready = main.record_event()
            for stream in self.streams:
                stream.wait_event(ready)
            try:
                yield main
            finally:
                torch.cuda.set_stream(main)
                default.graphsafe_set_state(shared)
                for stream in self.streams:
                    main.wait_stream(stream)

    def _new_slot(self, main: torch.cuda.Stream, client: ClientId, stream: torch.cuda.Stream) -> Slot:
        """A live client built on the main stream, which the slot's own stream waits for.

        The first one of a kind tells the state that clients of its origin start with; the others are copies.
        """
        first = next(iter(self.slots.of_kind(self.clients.kind(client))), None)
        if first is None:
            live = self.clients.build_client(client)
            self._initial.learn(client, live)
        else:
            live = self.clients.copied_client(client, first.client)
        stream.wait_stream(main)
        fails = first is not None and first.runner.compiled is None  # then it fails for all of this kind
        compiled = CompiledModels(live) if self.compiles and not fails else None
        runner = GraphRunner(live, self._rows, self._tell, compiled)
        return Slot(live, stream, runner, torch.Generator(live.device))

    def _serve(self, main: torch.cuda.Stream, request: Request | Examination, slot: Slot) -> Outcome:
        """Answer a request in a slot, on the slot's stream and from its graphs."""
        torch.cuda.set_stream(slot.stream)
        torch.cuda.default_generators[self.index].graphsafe_set_state(slot.generator)
        with running_with(slot.runner.train), collecting_with(slot.runner.collect):
            outcome = guarded(self.clients, request.client, lambda: self._answer(main, request, slot))
        torch.cuda.set_stream(main)
        return outcome

    def _answer(self, main: torch.cuda.Stream, request: Request | Examination, slot: Slot) -> Outcome:
        seat = SlotSeat(slot, self.clients, partial(self._initial_state, main))
        done = self.runner.serve(request, self.store, seat)
        if done.state is not None:
            slot.holds = weakref.ref(done.state) if isinstance(done.state, Packed) else None
        return done.answer

    def _initial_state(self, main: torch.cuda.Stream, client: ClientId) -> State:
        """Built on the main stream, because slots on other streams read it too."""
        with torch.cuda.stream(main):
            state = self._initial.of(client)
        torch.cuda.current_stream(self.index).wait_stream(main)
        return state

    def _size_of_last_batch(self, client: ClientId) -> int:
        samples = self.clients.population.samples(client)["train"]
        return samples % self.clients.client_training(client).batch_size

    def _tell(self, sentence: str) -> None:
        """Give a notice once, however many slots it applies to."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._notice(sentence)


class SlotSeat:
    """A slot as the transaction runner sees it: a seat for one request."""

    def __init__(self, slot: Slot, clients: ClientBuilder, initial: Callable[[ClientId], State]) -> None:
        self.slot, self.clients, self.initial = slot, clients, initial

    def sit(self, client: ClientId, state: State | None) -> Client:
        """The slot's live client; a state that its memory already equals is not copied again."""
        slot = self.slot
        self.clients.assign(slot.client, client)
        wanted = state if state is not None else self.initial(client)
        if slot.holds is None or slot.holds() is not wanted:
            slot.client.restore(wanted)
        slot.holds = None
        return slot.client
