"""Captures of CUDA graphs that fail, and the memory they share, with stand-ins for the device; needs no GPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from potluck.engine.cuda import graphs
from potluck.engine.cuda.graphs import GraphRunner, StepGraphs


class Cyclic:
    """Stands for a workspace: nothing but itself refers to it, so the garbage collector frees it some time."""

    def __init__(self) -> None:
        self.itself = self


class Graph:
    """Stands for a captured step; a pool of memory lasts as long as one of its graphs."""

    def __init__(self, pool: int, pools: dict[int, int]) -> None:
        self.pool, self.pools = pool, pools
        pools[pool] = pools.get(pool, 0) + 1

    def __del__(self) -> None:
        self.pools[self.pool] -= 1


def test_the_pool_of_a_graph_that_nobody_needs_outlives_a_capture_into_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, pools = itertools.count(), dict[int, int]()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    holder: Any = SimpleNamespace(step="train", device="cpu")
    runner = GraphRunner(holder, lambda *given: None, print)  # type: ignore[arg-type]
    workspace: Any = Cyclic()
    runner.steps[workspace] = StepGraphs({(2,): runner._in_pool(lambda pool: Graph(pool, pools))})  # type: ignore[dict-item]
    del workspace

    def capture(pool: int) -> int:
        gc.collect()  # as a step before the capture may
        return pools.get(pool, 0)

    assert runner._in_pool(capture) == 1
    gc.collect()
    assert runner._in_pool(lambda pool: pool) not in pools  # a pool that was released is not used again


def test_a_capture_that_cannot_begin_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = []

    class Refusing:
        def capture_begin(self, **given: Any) -> None:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

        capture_end = pool = capture_begin

    monkeypatch.setattr(graphs, "_abandon", lambda *given: abandoned.append(given))
    refusing: Any = Refusing()
    with contextlib.suppress(RuntimeError), graphs._capturing(refusing, 7):
        pytest.fail("there is nothing to capture")
    assert gc.isenabled()
    assert abandoned == [(7, None, False)]


@pytest.mark.parametrize("began", [True, False])
def test_a_pool_is_given_up_as_often_as_it_was_taken(monkeypatch: pytest.MonkeyPatch, began: bool) -> None:
    """Torch refuses a pool that was given up too often, at some later time."""
    released, empty = [], SimpleNamespace(capture_begin=lambda **given: None, capture_end=lambda: None)

    def not_allocating(index: int, pool: int) -> None:
        raise RuntimeError("not currently recording to the pool")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: empty)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 8)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", not_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: released.append(given), raising=False)
    graphs._abandon(7, None, began)
    assert released == ([(0, 7)] if began else [])


def test_short_batches_are_captured_when_they_first_come_up_to_a_limit() -> None:
    known = StepGraphs()
    assert known.is_worth_it(steps=1)
    known.by_sizes.update({(size,): None for size in range(graphs.MOST_SIZES)})
    assert not known.is_worth_it(steps=1)
    assert known.is_worth_it(steps=2)
