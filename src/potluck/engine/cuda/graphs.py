"""CUDA graphs of training steps and of `collect`: capture once, replay often.

A step is captured once per batch size and replayed n times. The rows of each step are in a table on the device,
and a counter inside the graph moves down the table. A slot's graphs are captured and replayed only on the
slot's own stream, one after the other, so they can share one pool of memory; no two slots share any.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from potluck.core.client import Client
from potluck.core.state import Holder
from potluck.engine.cuda.graph_nodes import finish, new_graph
from potluck.errors import PotluckError, first_line
from potluck.training.compiled import CompiledModels
from potluck.training.fit import Step, Workspace, run_eagerly
from potluck.training.plan import Plan, rows_on

G = TypeVar("G")
Sizes = tuple[int, ...]  # of the batches of a step, stream by stream
_Place = tuple[int, int, int]  # of an array: address, length, bytes from one number to the next
Tables = dict[str, np.ndarray]  # rows by stream, a line per step
CAPACITY = 64  # steps a table of rows holds at least; a longer plan fills it again
WORTH_CAPTURING = 8  # steps of one size in a server's `fit` that repay a capture
MOST_SIZES = 32  # graphs of a slot's step
WARM_UP = 2  # steps before a capture: they create handles, workspaces and the optimiser's buffers


class StepGraph:
    """One training step of one slot, captured for one batch size.

    The counter and the rows of all streams, one line per step, are in one piece of memory, so one copy sets
    them all.
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
        self.graph = new_graph()
        with _capturing(self.graph, pool, workspace.augment if workspace.augments else None):
            self._step(step)

    def _step(self, step: Step) -> None:
        line = self.lines.index_select(0, self.counter).squeeze(0)
        step(dict(zip(self.widths, torch.split(line, [*self.widths.values()]), strict=True)))
        self.counter.add_(1)

    def _fill(self, tables: dict[str, np.ndarray]) -> int:
        lines = np.concatenate([*tables.values()], axis=1)
        host = torch.empty(1 + lines.size, dtype=torch.long, pin_memory=True)
        numbers = host.numpy()  # the same memory, quicker to write to
        numbers[0], numbers[1:] = 0, lines.reshape(-1)
        self.memory[: numbers.size].copy_(host, non_blocking=True)
        return len(lines)

    def replay(self, tables: dict[str, np.ndarray]) -> None:
        """Take a step for every line of the tables."""
        total = len(next(iter(tables.values())))
        for start in range(0, total, self.capacity):
            count = self._fill({name: rows[start : start + self.capacity] for name, rows in tables.items()})
            for _ in range(count):
                self.graph.replay()


class CollectGraph:
    """One batch of a `collect` of one slot, captured for one batch size."""

    def __init__(self, function: Callable[[Tensor], Any], rows: Tensor, pool: Any) -> None:
        self.rows, self.given = rows.clone(), rows
        self.graph = new_graph()
        with _capturing(self.graph, pool):
            self.outputs = function(self.rows)

    def replay(self, rows: Tensor) -> Any:
        """The outputs for other rows, copied: the slot's next graph may overwrite the captured ones."""
        if rows is not self.given:  # a client that comes back to its slot brings the same tensor
            self.rows.copy_(rows)
            self.given = rows
        self.graph.replay()
        if isinstance(self.outputs, Tensor):
            return self.outputs.clone()
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self.outputs)


class RowsOnDevice:
    """Keeps the row numbers of the clients' splits on the device, because they are read again and again.

    An array is recognised by its address; the entry keeps a reference to it, so that no other array can get the
    same.
    """

    def __init__(self, device: torch.device, most: int = 20_000) -> None:
        self.device, self.most = device, most
        self._known: dict[_Place, tuple[np.ndarray, Tensor, torch.cuda.Event | None]] = {}

    def __call__(self, client: Client, rows: np.ndarray) -> Tensor:
        """The row numbers, to be read on the current stream."""
        key = (rows.__array_interface__["data"][0], len(rows), rows.strides[0])
        if key not in self._known:
            if not any(_is_part(rows, own) for own in client.rows.values()):
                return rows_on(rows, self.device)
            self._keep(key, rows)
        _, known, arrived = self._known[key]
        if arrived is not None:
            if arrived.query():  # type: ignore[no-untyped-call]
                self._known[key] = rows, known, None
            else:
                torch.cuda.current_stream(self.device).wait_event(arrived)
        return known

    def _keep(self, key: _Place, rows: np.ndarray) -> None:
        if len(self._known) >= self.most:
            torch.cuda.synchronize(self.device)  # then nobody reads them any more
            self._known.clear()
        stream = torch.cuda.current_stream(self.device)
        self._known[key] = rows, rows_on(rows, self.device), stream.record_event()


def _is_part(rows: np.ndarray, own: np.ndarray) -> bool:
    """Whether an array is a slice of one that a client holds."""
    return rows is own or (rows.base is not None and rows.base is (own if own.base is None else own.base))


@dataclass
class StepGraphs:
    """The graphs of one workspace by batch sizes (None: it cannot be captured)."""

    by_sizes: dict[Sizes, StepGraph | None] = field(default_factory=dict)

    def is_worth_it(self, steps: int) -> bool:
        """Whether to capture a step that is not captured yet.

        Short batches, too, when they first come: a capture takes as long as a few steps, and a size comes again,
        with the same client or with another one.
        """
        return steps > 1 or len(self.by_sizes) < MOST_SIZES


class GraphRunner:
    """Runs the steps and collections of a slot from graphs, and eagerly what comes once or cannot be captured.

    The graphs of a workspace live as long as the workspace: `fit` replaces it when it is called with other
    settings.
    """

    def __init__(
        self,
        holder: Holder,
        rows: RowsOnDevice,
        notice: Callable[[str], None],
        compiled: CompiledModels | None = None,
    ) -> None:
        self.holder, self.rows, self.notice, self.compiled = holder, rows, notice, compiled
        self.steps: weakref.WeakKeyDictionary[Workspace, StepGraphs] = weakref.WeakKeyDictionary()
        self.collections: dict[Any, CollectGraph | int | None] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def train(self, workspace: Workspace, step: Step, plan: Plan) -> None:
        """A runner for `fit`: replays what is captured and captures what will come again."""
        _play(step, plan, plan.blocks(), partial(self._graph, workspace, step))

    def _graph(self, workspace: Workspace, step: Step, sizes: Sizes, tables: Tables) -> StepGraph | None:
        """The graph for batches of these sizes, None if they are taken one after the other.

        A single sample takes another path through batch norm, so it runs eagerly.
        """
        known = self.steps.setdefault(workspace, StepGraphs())
        graphs, steps = known.by_sizes, len(next(iter(tables.values())))
        if sizes not in graphs and min(sizes) > 1 and known.is_worth_it(steps):
            capture = partial(StepGraph, self.holder, workspace, step, tables)
            graph = self._compiled(capture) if steps > 1 and not graphs else None
            graphs[sizes] = graph if graph is not None else self._captured(capture)
        return graphs.get(sizes)

    def _compiled(self, capture: Callable[..., G]) -> G | None:
        """A capture of compiled models, None where they are not compiled.

        Only whole batches: each batch size is compiled anew, for many seconds.
        """
        if self.compiled is None:
            return None
        try:
            with self.compiled.in_use():
                return self._in_pool(capture)
        except Exception as error:  # whatever a compiler, or code it does not understand, may raise
            if is_out_of_memory(error):
                raise
            self._clean_up()
            self.compiled = None
            self.notice(
                f"step {self.holder.step!r} is not compiled, which changes its speed alone: {first_line(error)}"
            )
            return None

    def collect(
        self, holder: Client, function: Callable[[Tensor], Any], parts: Sequence[np.ndarray]
    ) -> list[Any]:
        """A collector for `collect`: eager the first time, which warms up; captured when it comes again."""
        found = []
        for part in parts:
            rows = self.rows(holder, part)
            key = (holder.step, holder.collections, len(part))
            graph = self.collections.get(key, 0)
            if graph == 1:
                graph = self._captured(partial(CollectGraph, function, rows))
                self.collections[key] = graph
            if isinstance(graph, CollectGraph):
                found.append(graph.replay(rows))
                continue
            if graph == 0:
                self.collections[key] = 1
            found.append(function(rows))
        return found

    def _captured(self, capture: Callable[..., G]) -> G | None:
        """A capture, None where it fails."""
        try:
            return self._in_pool(capture)
        except (RuntimeError, PotluckError) as error:
            if is_out_of_memory(error):
                raise
            self._clean_up()
            step = self.holder.step or "evaluate"
            self.notice(f"step {step!r} cannot be captured and runs eagerly: {first_line(error)}")
            return None

    def _in_pool(self, capture: Callable[..., G]) -> G:
        """A capture into the memory of this slot's graphs.

        Torch gives up a pool with the last of its graphs. Those of a workspace that was replaced go when the
        garbage collector finds it, so they are held here until the capture has ended.
        """
        held = self._graphs()
        if not held:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            return capture(pool=self.pool)
        except BaseException:
            self.pool = torch.cuda.graph_pool_handle()  # the old one may have been released
            raise
        finally:
            held.clear()

    def _clean_up(self) -> None:
        """Let the device finish what a failed capture has begun."""
        torch.cuda.synchronize(self.holder.device)

    def _graphs(self) -> list[StepGraph | CollectGraph]:
        steps = (graph for graphs in self.steps.values() for graph in graphs.by_sizes.values())
        collections = (graph for graph in self.collections.values() if isinstance(graph, CollectGraph))
        return [*(graph for graph in steps if graph is not None), *collections]


def _play(
    step: Step,
    plan: Plan,
    blocks: Iterable[tuple[Sizes, Tables]],
    graph_for: Callable[[Sizes, Tables], StepGraph | None],
) -> None:
    """Take all steps of a plan: from a graph where there is one for their sizes, else one after the other."""
    done = 0
    for sizes, tables in blocks:
        count = len(next(iter(tables.values())))
        graph = graph_for(sizes, tables)
        if graph is not None:
            graph.replay(tables)
        else:
            for number in range(done, done + count):
                step(plan[number])
        done += count


class ServerRunner:
    """Runs the server's training from graphs, on a stream of its own.

    What the server learns from is new in every round, and a graph reads fixed addresses. So a step is captured anew
    in every `fit`, if enough steps of its size follow. The last graphs are kept until the next are there, because
    they hold the pool.
    """

    def __init__(self, server: Holder, notice: Callable[[str], None]) -> None:
        self.server, self.notice = server, notice
        self.stream = torch.cuda.Stream(server.device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[StepGraph] = []

    def train(self, workspace: Workspace, step: Step, plan: Plan) -> None:
        """A runner for `fit`."""
        blocks = [*plan.blocks()]
        steps = Counter[tuple[int, ...]]()
        for sizes, tables in blocks:
            steps[sizes] += len(next(iter(tables.values())))
        worth = {sizes for sizes, count in steps.items() if count >= WORTH_CAPTURING and min(sizes) > 1}
        if not worth:
            return run_eagerly(workspace, step, plan)
        main = torch.cuda.current_stream(self.server.device)
        self.stream.wait_stream(main)
        graphs: dict[Sizes, StepGraph | None] = {}

        def graph_for(sizes: Sizes, tables: Tables) -> StepGraph | None:
            if sizes in worth and sizes not in graphs:
                graphs[sizes] = self._captured(workspace, step, tables)
            return graphs.get(sizes)

        with torch.cuda.stream(self.stream):
            _play(step, plan, blocks, graph_for)
        main.wait_stream(self.stream)
        self.graphs = [graph for graph in graphs.values() if graph is not None] or self.graphs

    def _captured(self, workspace: Workspace, step: Step, tables: dict[str, np.ndarray]) -> StepGraph | None:
        try:
            return StepGraph(self.server, workspace, step, tables, self.pool)
        except (RuntimeError, PotluckError) as error:
            self.pool = torch.cuda.graph_pool_handle()  # the old one may have been released
            torch.cuda.synchronize(self.server.device)
            self.notice(f"the server's training cannot be captured and runs eagerly: {first_line(error)}")
            return None


@contextlib.contextmanager
def _capturing(
    graph: torch.cuda.CUDAGraph, pool: Any, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Capture what is done inside, into the memory of a pool; a capture that fails leaves no trace.

    The garbage collector is off meanwhile: an event or a graph that is freed in the middle would break the capture.
    """
    collects, began = gc.isenabled(), False
    gc.disable()
    try:
        _begin(graph, pool, generator)
        began = True
        yield
        graph.capture_end()
        finish(graph)
    except BaseException:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for example that the graph is empty
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            if _ended(graph):  # it ran out of memory after the capture: the graph releases its pool itself
                graph.reset()
            else:
                _abandon(pool, generator, began)
        raise
    finally:
        if collects:
            gc.enable()


def _begin(graph: torch.cuda.CUDAGraph, pool: Any, generator: torch.Generator | None) -> None:
    if generator is not None:
        graph.register_generator_state(generator)
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether the capture itself ended, even if building the graph failed."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _abandon(pool: Any, generator: torch.Generator | None, began: bool) -> None:
    """Clean up after a failed capture: torch's allocator and generators still think that one is under way.

    The allocator is told directly. It counts who uses a pool, so a capture that never began to allocate there must
    not give it up. A generator only learns it at the end of a successful capture, so we make an empty one: it
    needs no memory, of which there may be none left.
    """
    index = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # it already knows if only the work inside failed
        torch._C._cuda_endAllocateToPool(index, pool)
        began = True
    if began:
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)
    empty = torch.cuda.CUDAGraph()
    _begin(empty, torch.cuda.graph_pool_handle(), generator)
    empty.capture_end()


@contextlib.contextmanager
def _no_trace(holder: Holder, workspace: Workspace) -> Iterator[None]:
    """Undo what warm-up steps do to parameters, buffers, optimiser, sums and generators."""
    state = holder.snapshot()
    moving = [value for each in workspace.optimizer.state.values() for value in each.values()]
    kept = [value.clone() for value in moving]
    generators = [torch.cuda.default_generators[device_index(holder.device)], workspace.augment]
    numbers = [generator.get_state() for generator in generators if generator is not None]
    try:
        yield
    finally:
        holder.restore(state)
        for value, before in zip(moving, kept, strict=True):
            value.copy_(before)
        for total in workspace.totals.values():
            total.zero_()
        for generator, before in zip((one for one in generators if one is not None), numbers, strict=True):
            generator.set_state(before)


def is_out_of_memory(error: Exception) -> bool:
    """Whether GPU memory ran out, in torch's allocator or in a library beneath it."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; `cuda` without one is the current device."""
    return device.index if device.index is not None else torch.cuda.current_device()
