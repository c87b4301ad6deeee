"""The whole cohort at once on a GPU: every client on a stream of its own, its training step a captured graph.

A slot is a live client with a stream. A step is captured once per slot and batch size and replayed n times; the
rows of each step stand in a table on the device, and a counter inside the graph walks down it. A slot's graphs
are captured and replayed on the slot's own stream only, and no two share memory, so that all slots can be in
flight together. The host only waits when replies are read.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from potluck.client import Client, ClientId
from potluck.engine.base import Examination, Outcome, Request
from potluck.engine.local import LocalEngine
from potluck.engine.store import ClientStore
from potluck.errors import ConfigError, PotluckError
from potluck.state import Holder, Packed, State
from potluck.training import Plan, Step, Workspace, collecting_with, rows_on, running_with
from potluck.world import World

R = TypeVar("R", Request, Examination)
G = TypeVar("G")
CAPACITY = 64  # steps a table of rows holds at least; a longer plan fills it again
STREAMS = 32
WARM_UP = 2  # steps before a capture: they make handles, workspaces and the optimiser's buffers


class Graph:
    """One training step of one slot, captured for one batch size."""

    def __init__(
        self, holder: Holder, workspace: Workspace, step: Step, tables: dict[str, np.ndarray]
    ) -> None:
        self.counter = torch.zeros(1, dtype=torch.long, device=holder.device)
        self.tables = {
            name: torch.zeros(max(CAPACITY, len(rows)), rows.shape[1], dtype=torch.long, device=holder.device)
            for name, rows in tables.items()
        }
        self._fill({name: rows[:1] for name, rows in tables.items()})
        with _no_trace(holder, workspace):
            for _ in range(WARM_UP):
                self.counter.zero_()
                self._step(step)
        self.graph = torch.cuda.CUDAGraph()
        if workspace.augments and workspace.augment is not None:
            self.graph.register_generator_state(workspace.augment)
        self.graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._step(step)
        finally:
            self.graph.capture_end()

    def _step(self, step: Step) -> None:
        step({name: table.index_select(0, self.counter).squeeze(0) for name, table in self.tables.items()})
        self.counter.add_(1)

    def _fill(self, tables: dict[str, np.ndarray]) -> int:
        count = 0
        for name, rows in tables.items():
            count = len(rows)
            host = torch.from_numpy(np.ascontiguousarray(rows))
            self.tables[name][:count].copy_(host, non_blocking=True)
        self.counter.zero_()
        return count

    def replay(self, tables: dict[str, np.ndarray]) -> None:
        """Take a step for every line of the tables."""
        capacity = len(next(iter(self.tables.values())))
        total = len(next(iter(tables.values())))
        for start in range(0, total, capacity):
            count = self._fill({name: rows[start : start + capacity] for name, rows in tables.items()})
            for _ in range(count):
                self.graph.replay()


class Reading:
    """One batch of a `collect` of one slot, captured for one batch size; its outputs stand still."""

    def __init__(self, function: Callable[[Tensor], Any], rows: np.ndarray, device: torch.device) -> None:
        self.rows = rows_on(rows, device)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.outputs = function(self.rows)
        finally:
            self.graph.capture_end()

    def replay(self, rows: np.ndarray) -> Any:
        """The outputs for other rows, in memory of their own."""
        self.rows.copy_(torch.from_numpy(np.ascontiguousarray(rows)), non_blocking=True)
        self.graph.replay()
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self.outputs)


class GraphRunner:
    """Runs the steps and collections of a slot from graphs; what comes once, or cannot be captured, eagerly."""

    def __init__(self, holder: Holder, notice: Callable[[str], None]) -> None:
        self.holder, self.notice = holder, notice
        self.readings: dict[Any, Reading | int | None] = {}

    def train(self, workspace: Workspace, step: Step, plan: Plan) -> None:
        """Replay what is captured, capture what will come again."""
        done = 0
        for sizes, tables in plan.blocks():
            count = len(next(iter(tables.values())))
            if sizes not in workspace.recordings and count > 1 and min(sizes) > 1:
                workspace.recordings[sizes] = self._captured(
                    partial(Graph, self.holder, workspace, step, tables)
                )
            graph = workspace.recordings.get(sizes)
            if graph is not None:
                graph.replay(tables)
            else:
                for number in range(done, done + count):
                    step(plan[number])
            done += count

    def collect(
        self, holder: Holder, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
    ) -> list[Any]:
        """The first time eagerly, which warms up; captured when the same collection comes again."""
        found = []
        for part in parts:
            key = (holder.step, holder.collections, len(part))
            reading = self.readings.get(key, 0)
            if reading == 1:
                reading = self._captured(partial(Reading, function, part, holder.device))
                self.readings[key] = reading
            if isinstance(reading, Reading):
                found.append(reading.replay(part))
                continue
            if reading == 0:
                self.readings[key] = 1
            found.append(function(rows_on(part, holder.device)))
        return found

    def _captured(self, capture: Callable[[], G]) -> G | None:
        try:
            return capture()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, PotluckError) as error:
            torch.cuda.synchronize(self.holder.device)
            reason = str(error).splitlines()[0]
            self.notice(
                f"step {self.holder.step or 'evaluate'!r} cannot be captured and runs eagerly: {reason}"
            )
            return None


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


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


class Slot:
    """A live client with a stream and generators of its own."""

    def __init__(self, client: Client, stream: torch.cuda.Stream, notice: Callable[[str], None]) -> None:
        self.client = client
        self.stream = stream
        self.runner = GraphRunner(client, notice)
        self.generator = torch.Generator(client.device)
        self.holds: weakref.ref[State] | None = None  # the stored state its memory equals

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """On the slot's stream, with the slot's own default generator: graphs in flight share none."""
        default = torch.cuda.default_generators[_index(self.client.device)]
        shared = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        try:
            with (
                torch.cuda.stream(self.stream),
                running_with(self.runner.train),
                collecting_with(self.runner.collect),
            ):
                yield
        finally:
            default.graphsafe_set_state(shared)


class CudaEngine(LocalEngine):
    """Clients of this machine's GPU, all of a cohort in flight."""

    def __init__(
        self,
        world: World,
        store: ClientStore | None = None,
        slots: int = 128,
        streams: int = STREAMS,
        notice: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(world, store)
        self.limit = slots
        self.streams = [torch.cuda.Stream(world.device) for _ in range(streams)]  # type: ignore[no-untyped-call]
        self._told: set[str] = set()
        self._notice = notice
        self._pools: dict[str, list[Slot]] = {}
        self._now: Slot | None = None
        self._loaded = False
        self._main = torch.cuda.current_stream(world.device)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Put every client to work on its stream; nobody waits."""
        return self._in_memory(self._serve, requests)

    def examine(self, examinations: Sequence[Examination]) -> list[Outcome]:
        """Measure every client on its stream."""
        return self._in_memory(self._examine, examinations)

    def _in_memory(self, work: Callable[[R], Outcome], requests: Sequence[R]) -> list[Outcome]:
        """Try again with fewer slots when memory runs out: a client that was done answers from its record."""
        while True:
            try:
                return self._spread(work, requests)
            except torch.OutOfMemoryError as error:
                self._shrink(error)

    def _shrink(self, error: torch.OutOfMemoryError) -> None:
        slots = sum(map(len, self._pools.values()))
        torch.cuda.synchronize(self.world.device)
        if slots <= 1:
            free, total = torch.cuda.mem_get_info(self.world.device)
            raise ConfigError(
                f"{self.world.device} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, too little for one "
                "client; use a smaller batch or model, or engine.device: cpu"
            ) from error
        self.limit = max(1, slots // 2)
        self._pools, self._now = {}, None
        torch.cuda.empty_cache()
        self._tell(f"GPU memory ran out with {slots} clients in flight; going on with {self.limit} at once")

    def _spread(self, work: Callable[[R], Outcome], requests: Sequence[R]) -> list[Outcome]:
        main = self._main = torch.cuda.current_stream(self.world.device)
        busy: dict[Slot, None] = {}
        outcomes = []
        with _fastest_convolutions():
            for request in requests:
                slot = self._slot(request.client, busy)
                if slot not in busy:
                    slot.stream.wait_stream(main)  # for messages, states, and the building of the slot itself
                    busy[slot] = None
                self._now = slot
                with slot.at_work():
                    outcomes.append(self._guarded(work, request))
        for slot in busy:
            main.wait_stream(slot.stream)
        return outcomes

    def _tell(self, sentence: str) -> None:
        """Say a thing once, however many slots it is true of."""
        if sentence not in self._told:
            self._told.add(sentence)
            self._notice(sentence)

    def _slot(self, client: ClientId, busy: dict[Slot, None]) -> Slot:
        """A free slot of the client's architecture, the oldest first, for it has its graphs; else a new one.

        States move in one stroke and graphs do not move, so it does not matter who held a slot last. Where no
        more slots are allowed the clients queue at those there are.
        """
        pool = self._pools.setdefault(self.world.architecture(client), [])
        free = next((slot for slot in pool if slot not in busy), None)
        if free is not None:
            return free
        count = sum(map(len, self._pools.values()))
        if count < self.limit or not pool:
            stream = self.streams[count % len(self.streams)]
            pool.append(Slot(self.world.build_client(client), stream, self._tell))
            return pool[-1]
        return pool[len(busy) % len(pool)]

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
        torch.cuda.current_stream(self.world.device).wait_stream(self._main)
        return state

    def _live(self, client_id: ClientId, state: State | None) -> Client:
        slot = self._now
        assert slot is not None
        self.world.assign(slot.client, client_id)
        wanted = state if state is not None else self._initial_state(client_id)
        if slot.holds is None or slot.holds() is not wanted:
            slot.client.restore(wanted)
        slot.holds, self._loaded = None, True
        return slot.client


@contextlib.contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its algorithms once per shape: captured steps run them many times."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
