"""The whole cohort at once on a GPU: every client on a stream of its own, its training step a captured graph.

A slot is a live client with a stream. A step is captured once per slot and batch size and replayed n times; the
rows of each step stand in a table on the device, and a counter inside the graph walks down it. A slot's graphs
are captured and replayed on the slot's own stream only, one after the other: they share the slot's memory, and no
two slots share any, so that all slots can be in flight together. The host only waits when replies are read.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.packed import Packed, State
from potluck.core.state import Holder
from potluck.engine.protocol import Examination, Outcome, Request
from potluck.engine.serial import LocalEngine
from potluck.engine.store.client_store import ClientStore
from potluck.errors import ConfigError, PotluckError
from potluck.federation.builder import ClientBuilder
from potluck.training.collect import collecting_with
from potluck.training.fit import Step, Workspace, running_with
from potluck.training.plan import Plan, rows_on

R = TypeVar("R", Request, Examination)
G = TypeVar("G")
CAPACITY = 64  # steps a table of rows holds at least; a longer plan fills it again
STREAMS = 32
WARM_UP = 2  # steps before a capture: they make handles, workspaces and the optimiser's buffers


class Graph:
    """One training step of one slot, captured for one batch size.

    The counter and the rows of all streams, a line per step, stand in one piece of memory: one copy sets them all.
    """

    def __init__(
        self, holder: Holder, workspace: Workspace, step: Step, tables: dict[str, np.ndarray], pool: Any
    ) -> None:
        self.widths = {name: rows.shape[1] for name, rows in tables.items()}
        self.capacity = max(CAPACITY, len(next(iter(tables.values()))))
        width = sum(self.widths.values())
        self.memory = torch.zeros(1 + self.capacity * width, dtype=torch.long, device=holder.device)
        self.counter, self.lines = self.memory[:1], self.memory[1:].view(self.capacity, width)
        self._fill({name: rows[:1] for name, rows in tables.items()})
        with _no_trace(holder, workspace):
            for _ in range(WARM_UP):
                self.counter.zero_()
                self._step(step)
        self.graph = torch.cuda.CUDAGraph()
        with _capturing(self.graph, pool, workspace.augment if workspace.augments else None):
            self._step(step)

    def _step(self, step: Step) -> None:
        line = self.lines.index_select(0, self.counter).squeeze(0)
        step(dict(zip(self.widths, torch.split(line, [*self.widths.values()]), strict=True)))
        self.counter.add_(1)

    def _fill(self, tables: dict[str, np.ndarray]) -> int:
        lines = np.concatenate([*tables.values()], axis=1)
        host = torch.empty(1 + lines.size, dtype=torch.long, pin_memory=True)
        host[0] = 0
        host[1:].numpy()[:] = lines.reshape(-1)
        self.memory[: len(host)].copy_(host, non_blocking=True)
        return len(lines)

    def replay(self, tables: dict[str, np.ndarray]) -> None:
        """Take a step for every line of the tables."""
        total = len(next(iter(tables.values())))
        for start in range(0, total, self.capacity):
            count = self._fill({name: rows[start : start + self.capacity] for name, rows in tables.items()})
            for _ in range(count):
                self.graph.replay()


class Reading:
    """One batch of a `collect` of one slot, captured for one batch size."""

    def __init__(self, function: Callable[[Tensor], Any], rows: Tensor, pool: Any) -> None:
        self.rows = rows.clone()
        self.graph = torch.cuda.CUDAGraph()
        with _capturing(self.graph, pool):
            self.outputs = function(self.rows)

    def replay(self, rows: Tensor) -> Any:
        """The outputs for other rows, in memory of their own: the slot's next graph may write where they stood."""
        self.rows.copy_(rows)
        self.graph.replay()
        if isinstance(self.outputs, Tensor):
            return self.outputs.clone()
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self.outputs)


class RowsOnDevice:
    """The rows of a client's splits are read again and again: they are kept on the device, for every stream.

    An array is known by its memory; the entry holds on to it, so that no other array can take its place.
    """

    def __init__(self, device: torch.device, most: int = 20_000) -> None:
        self.device, self.most = device, most
        self._known: dict[tuple[int, int], tuple[np.ndarray, Tensor, torch.cuda.Event]] = {}

    def __call__(self, client: Client, rows: np.ndarray) -> Tensor:
        """The row numbers, to be read on the current stream."""
        if not any(np.may_share_memory(rows, own) for own in client.rows.values()):
            return rows_on(rows, self.device)
        key = (rows.__array_interface__["data"][0], len(rows))
        stream = torch.cuda.current_stream(_index(self.device))
        if key not in self._known:
            if len(self._known) >= self.most:
                torch.cuda.synchronize(self.device)  # nobody reads them any more
                self._known.clear()
            self._known[key] = rows, rows_on(rows, self.device), stream.record_event()
        _, known, ready = self._known[key]
        stream.wait_event(ready)
        return known


class GraphRunner:
    """Runs the steps and collections of a slot from graphs; what comes once, or cannot be captured, eagerly."""

    def __init__(self, holder: Holder, rows: RowsOnDevice, notice: Callable[[str], None]) -> None:
        self.holder, self.rows, self.notice = holder, rows, notice
        self.readings: dict[Any, Reading | int | None] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def train(self, workspace: Workspace, step: Step, plan: Plan) -> None:
        """Replay what is captured, capture what will come again."""
        done = 0
        for sizes, tables in plan.blocks():
            count = len(next(iter(tables.values())))
            graph = self._graph(workspace, step, sizes, tables)
            if graph is not None:
                graph.replay(tables)
            else:
                for number in range(done, done + count):
                    step(plan[number])
            done += count

    def _graph(
        self, workspace: Workspace, step: Step, sizes: tuple[int, ...], tables: dict[str, np.ndarray]
    ) -> Graph | None:
        """The graph for batches of these sizes: made at once if several come in a row, else when one comes again.

        Clients of one size all end in the same short batch; where they are ragged hardly two in a row do, and a
        capture would cost more than it saves. A single sample takes another path through batch norm, eagerly.
        """
        graphs: dict[tuple[int, ...], Graph | None] = workspace.recordings
        if sizes in graphs or min(sizes) == 1:
            return graphs.get(sizes)
        several = len(next(iter(tables.values()))) > 1
        if several or sizes == workspace.alone:
            graphs[sizes] = self._captured(partial(Graph, self.holder, workspace, step, tables))
        else:
            workspace.alone = sizes
        return graphs.get(sizes)

    def collect(
        self, holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
    ) -> list[Any]:
        """The first time eagerly, which warms up; captured when the same collection comes again."""
        found = []
        for part in parts:
            rows = self.rows(holder, part)
            key = (holder.step, holder.collections, len(rows))
            reading = self.readings.get(key, 0)
            if reading == 1:
                reading = self._captured(partial(Reading, function, rows))
                self.readings[key] = reading
            if isinstance(reading, Reading):
                found.append(reading.replay(rows))
                continue
            if reading == 0:
                self.readings[key] = 1
            found.append(function(rows))
        return found

    def _captured(self, capture: Callable[..., G]) -> G | None:
        try:
            return capture(pool=self.pool)
        except (RuntimeError, PotluckError) as error:
            self.pool = torch.cuda.graph_pool_handle()  # the old one may have been given back
            if _is_memory(error):
                raise
            torch.cuda.synchronize(self.holder.device)
            reason = str(error).splitlines()[0]
            self.notice(
                f"step {self.holder.step or 'evaluate'!r} cannot be captured and runs eagerly: {reason}"
            )
            return None


@contextlib.contextmanager
def _capturing(
    graph: torch.cuda.CUDAGraph, pool: Any, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Capture what is done inside, into the memory of a pool; a capture that fails leaves no trace.

    Nothing is collected as garbage meanwhile: an event or a graph that dies in the middle would spoil it.
    """
    collects = gc.isenabled()
    gc.disable()
    _begin(graph, pool, generator)
    try:
        yield
        graph.capture_end()
    except BaseException:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty, say
            graph.capture_end()
        if _ended(graph):  # it failed later, for want of memory: the graph gives its pool back itself
            graph.reset()
        else:
            _abandon(pool, generator)
        raise
    finally:
        if collects:
            gc.enable()


def _begin(graph: torch.cuda.CUDAGraph, pool: Any, generator: torch.Generator | None) -> None:
    if generator is not None:
        graph.register_generator_state(generator)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether the capture itself came to its end, whatever became of the graph."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _abandon(pool: Any, generator: torch.Generator | None) -> None:
    """After a failed capture torch's allocator and generators still think that one is under way.

    The allocator is told; a generator learns it at the end of a capture that succeeds, so an empty one follows.
    """
    index = torch.cuda.current_device()
    for tell in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # it knows: only the work inside failed
            tell(index, pool)
    empty = torch.cuda.CUDAGraph()
    _begin(empty, torch.cuda.graph_pool_handle(), generator)
    torch.zeros((), device="cuda")
    empty.capture_end()


@contextlib.contextmanager
def _no_trace(holder: Holder, workspace: Workspace) -> Iterator[None]:
    """Undo what warm-up steps do to parameters, buffers, optimiser, sums and generators."""
    state = holder.snapshot()
    moving = [value for each in workspace.optimizer.state.values() for value in each.values()]
    kept = [value.clone() for value in moving]
    generators = [torch.cuda.default_generators[_index(holder.device)], workspace.augment]
    numbers = [generator.get_state() for generator in generators if generator is not None]
    yield
    holder.restore(state)
    for value, before in zip(moving, kept, strict=True):
        value.copy_(before)
    for total in workspace.totals.values():
        total.zero_()
    for generator, before in zip((one for one in generators if one is not None), numbers, strict=True):
        generator.set_state(before)


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out, be it torch's allocator or a library beneath it that says so."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _clients(number: int) -> str:
    return f"{number} client" if number == 1 else f"{number} clients"


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@dataclass(eq=False)
class Slot:
    """A live client with a stream, graphs and a generator of its own: graphs in flight share nothing."""

    client: Client
    stream: torch.cuda.Stream
    runner: GraphRunner
    generator: torch.Generator
    holds: weakref.ref[State] | None = None  # the stored state its memory equals


class CudaEngine(LocalEngine):
    """Clients of this machine's GPU, all of a cohort in flight."""

    def __init__(
        self,
        clients: ClientBuilder,
        store: ClientStore | None = None,
        slots: int = 128,
        streams: int = STREAMS,
        notice: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(clients, store)
        self.limit = slots
        self.index = _index(clients.device)
        self.streams = [torch.cuda.Stream(clients.device) for _ in range(streams)]  # type: ignore[no-untyped-call]
        self._told: set[str] = set()
        self._notice = notice
        self._rows = RowsOnDevice(clients.device)
        self._pools: dict[str, list[Slot]] = {}
        self._homes: dict[ClientId, Slot] = {}  # the slot a client was in last
        self._now: Slot | None = None
        self._used = 0  # slots the exchange at hand has taken, with the one it is making
        self._loaded = False
        self._main = torch.cuda.current_stream(self.index)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Put every client to work on its stream; nobody waits."""
        return self._in_memory(self._serve, requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client on its stream."""
        return self._in_memory(self._examine, examinations)

    def _in_memory(self, work: Callable[[R], Outcome], requests: Sequence[R]) -> list[Outcome]:
        """Try again with fewer slots when memory runs out: a client that was done answers from its record."""
        kinds, cleared = self._kinds(requests), False
        while True:
            self._used = 0
            try:
                return self._spread(work, requests)
            except RuntimeError as error:
                if not _is_memory(error):
                    raise
            # Only here, as the frames of an error at hand still hold the slots.
            idle = sum(map(len, self._pools.values())) > self._used
            torch.cuda.synchronize(self.clients.device)
            self._forget_slots()
            if cleared or not (idle or self._used <= kinds):
                self._shrink(self._used, kinds)
            else:
                cleared = True  # slots gather graphs over time: it may be enough to begin anew
                self._tell(f"GPU memory ran out with {_clients(self._used)} in flight; graphs are made anew")

    def _shrink(self, used: int, kinds: int) -> None:
        """Half as many slots, though at first one of each kind, as a slot cannot change its kind."""
        if used <= 1:
            free, total = (number / 2**30 for number in torch.cuda.mem_get_info(self.clients.device))
            held = torch.cuda.memory_allocated(self.clients.device) / 2**30
            raise ConfigError(
                f"{self.clients.device} has {free:.1f} of {total:.1f} GiB free, beside {held:.1f} GiB of data, "
                "states and messages of this run: too little for one client; have fewer clients in a round, a "
                "smaller batch or model, or engine.device: cpu"
            )
        self.limit = max(used // 2, kinds) if used > kinds else used // 2
        self._tell(f"GPU memory ran out with {_clients(used)} in flight; going on with {self.limit} at once")

    def _forget_slots(self) -> None:
        """Give the memory of live clients and their graphs back; nothing may be in flight."""
        self._pools, self._homes, self._now = {}, {}, None
        gc.collect()  # slots and their graphs know each other
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the device to the next run: a comparison plays many in one process."""
        torch.cuda.synchronize(self.clients.device)
        self._forget_slots()

    def _spread(self, work: Callable[[R], Outcome], requests: Sequence[R]) -> list[Outcome]:
        busy: dict[Slot, None] = {}
        outcomes = {}
        with self._at_work():
            for request in self._in_turn(requests):
                self._take(self._slot(request.client, busy), request.client, busy)
                outcomes[id(request)] = self._guarded(work, request)
                torch.cuda.set_stream(self._main)
        return [outcomes[id(request)] for request in requests]

    def _take(self, slot: Slot, client: ClientId, busy: dict[Slot, None]) -> None:
        """Let a client work in a slot; the one taken longest ago is the first of the busy ones."""
        self._now = self._homes[client] = slot
        busy.pop(slot, None)
        busy[slot] = None
        self._used = len(busy)
        self._enter(slot)

    def _enter(self, slot: Slot) -> None:
        torch.cuda.set_stream(slot.stream)
        torch.cuda.default_generators[self.index].graphsafe_set_state(slot.generator)

    def _in_turn(self, requests: Sequence[R]) -> Sequence[R]:
        """As they come; kind by kind where there are more kinds than slots, so that few slots are replaced."""
        if self._kinds(requests) <= self.limit:
            return requests
        return sorted(requests, key=lambda request: self.clients.kind(request.client))

    def _kinds(self, requests: Sequence[R]) -> int:
        return len({self.clients.kind(request.client) for request in requests})

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Slots follow what the main stream has done so far, and the main stream goes on when they have finished.

        Inside, steps run from the slot's graphs, and the default generator is the slot's own.
        """
        with torch.cuda.device(self.index):
            main = self._main = torch.cuda.current_stream(self.index)
            default = torch.cuda.default_generators[self.index]
            shared = default.graphsafe_get_state()
            ready = main.record_event()
            for stream in self.streams:
                stream.wait_event(ready)
            try:
                with running_with(self._train), collecting_with(self._collect):
                    yield
            finally:
                torch.cuda.set_stream(main)
                default.graphsafe_set_state(shared)
                for stream in self.streams:
                    main.wait_stream(stream)

    def _train(self, workspace: Workspace, step: Step, plan: Plan) -> None:
        assert self._now is not None
        self._now.runner.train(workspace, step, plan)

    def _collect(
        self, holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
    ) -> list[Any]:
        assert self._now is not None
        return self._now.runner.collect(holder, function, parts)

    def _tell(self, sentence: str) -> None:
        """Say a thing once, however many slots it is true of."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._notice(sentence)

    def _slot(self, client: ClientId, busy: dict[Slot, None]) -> Slot:
        """The slot the client was in last, with graphs for its batches; else a free one of its kind, or a new one.

        States move in one stroke, so a client may be in any. Where no more slots are allowed the clients queue at
        those there are of their kind, one after the other, or a slot of another kind makes room.
        """
        home = self._homes.get(client)
        if home is not None and home not in busy:
            return home
        pool = self._pools.setdefault(self.clients.kind(client), [])
        free = next((slot for slot in pool if slot not in busy), None)
        if free is not None:
            return free
        count = sum(map(len, self._pools.values()))
        if count >= self.limit and pool:
            return next(slot for slot in busy if slot in pool)
        stream = self._give_up(busy) if count >= self.limit else self.streams[count % len(self.streams)]
        self._used = len(busy) + 1
        pool.append(self._new_slot(client, stream))
        return pool[-1]

    def _give_up(self, busy: dict[Slot, None]) -> torch.cuda.Stream:
        """Make room for another kind; the stream is free again."""
        stream = self._part_with(self._dispensable(busy), busy)
        gc.collect()  # by now nobody knows the slot but its own graphs
        torch.cuda.empty_cache()
        return stream

    def _dispensable(self, busy: dict[Slot, None]) -> Slot:
        """An idle slot if there is one, else the one longest at work."""
        idle = [slot for pool in self._pools.values() for slot in pool if slot not in busy]
        return idle[0] if idle else next(iter(busy))

    def _part_with(self, slot: Slot, busy: dict[Slot, None]) -> torch.cuda.Stream:
        slot.stream.synchronize()
        busy.pop(slot, None)
        for pool in self._pools.values():
            if slot in pool:
                pool.remove(slot)
        self._homes = {client: home for client, home in self._homes.items() if home is not slot}
        self._now = None
        return slot.stream

    def _new_slot(self, client: ClientId, stream: torch.cuda.Stream) -> Slot:
        """A live client built on the main stream, which the slot's own waits for."""
        live = self.clients.build_client(client)
        stream.wait_stream(self._main)
        runner = GraphRunner(live, self._rows, self._tell)
        return Slot(live, stream, runner, torch.Generator(live.device))

    def _serve(self, request: Request) -> Outcome:
        self._loaded = False
        outcome = super()._serve(request)
        record, slot = self.store.peek(request.client), self._now
        if self._loaded and record is not None and record.work is not None and slot is not None:
            state = record.work.state
            slot.holds = weakref.ref(state) if isinstance(state, Packed) else None
        return outcome

    def _initial_state(self, client_id: ClientId) -> State:
        """Made on the main stream, because slots on other streams read it too."""
        with torch.cuda.stream(self._main):
            state = super()._initial_state(client_id)
        torch.cuda.current_stream(self.index).wait_stream(self._main)
        return state

    def _live(self, client_id: ClientId, state: State | None) -> Client:
        slot = self._now
        assert slot is not None
        self.clients.assign(slot.client, client_id)
        wanted = state if state is not None else self._initial_state(client_id)
        if slot.holds is None or slot.holds() is not wanted:
            slot.client.restore(wanted)
        slot.holds, self._loaded = None, True
        return slot.client
