"""Which slot of the GPU engine a client works in; needs no GPU."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from potluck.engine.cuda.engine import CudaEngine
from potluck.errors import ConfigError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    """The engine's slots alone: clients "a…" are of one kind, clients "b…" of another; at most three slots."""
    made: Any = object.__new__(CudaEngine)
    made.federation = SimpleNamespace(
        kind=lambda client: client[0], label=lambda client: client, device="cuda"
    )
    made.waited = []
    made.limit, made.streams = 3, [SimpleNamespace(synchronize=lambda: made.waited.append(1))]
    made._pools, made._homes, made._now, made._told, made._used = {}, {}, None, set(), 0
    made.heard = []
    made._notice = made.heard.append
    made._new_slot = lambda client, stream: SlotOf(client, stream)
    made._at_work, made._enter, made._main = contextlib.nullcontext, lambda slot: None, None
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**33)
    return made  # type: ignore[no-any-return]


class SlotOf:
    def __init__(self, client: str, stream: Any) -> None:
        self.kind, self.stream = client[0], stream
        self.itself = self  # as graphs know their slot


def place(engine: CudaEngine, *clients: str) -> list[Any]:
    """Where the clients of one exchange go."""
    busy: dict[Any, None] = {}
    slots = []
    for client in clients:
        engine._take(engine._slot(client, busy), client, busy)
        slots.append(engine._homes[client])
    return slots


def test_a_client_comes_back_to_its_slot(engine: CudaEngine) -> None:
    first, second = place(engine, "a1", "a2")
    assert first is not second
    assert place(engine, "a2", "a1") == [second, first]


def test_a_slot_that_is_taken_is_left_to_who_came_first(engine: CudaEngine) -> None:
    (first,) = place(engine, "a1")
    assert place(engine, "a3") == [first]
    new, old = place(engine, "a3", "a1")
    assert new is first
    assert old is not first


def test_kinds_do_not_mix_and_clients_queue_where_there_is_no_room(engine: CudaEngine) -> None:
    one, other, alone = place(engine, "a1", "a2", "b1")
    assert [slot.kind for slot in (one, other, alone)] == ["a", "a", "b"]
    assert place(engine, "b2") == [alone]
    assert {id(slot) for slot in place(engine, "a1", "a2", "a3", "a4")} == {id(one), id(other)}
    assert place(engine, "b1", "b2") == [alone, alone]


def test_where_there_is_no_room_clients_queue_evenly(engine: CudaEngine) -> None:
    engine.limit = 2
    clients = [f"a{number}" for number in range(20)]
    for _ in range(3):
        slots = place(engine, *clients)
        assert sorted(slots.count(slot) for slot in {*slots}) == [10, 10]


def test_where_there_is_no_room_for_another_kind_an_idle_slot_goes(engine: Any) -> None:
    one, other, alone = place(engine, "a1", "a2", "b1")
    gone = weakref.ref(one)
    del one
    (new,) = place(engine, "c1")
    assert new.kind == "c"
    assert gone() is None, "its memory is still taken"
    assert engine.waited, "it was given up while it may have been at work"
    assert "a1" not in engine._homes
    assert place(engine, "a2", "b1", "c1") == [other, alone, new]


def test_with_one_slot_every_kind_is_served_one_after_the_other(engine: Any) -> None:
    engine.limit, made = 1, []
    engine._new_slot = lambda client, stream: made.append(weakref.ref(slot := SlotOf(client, stream))) or slot
    seen = []

    def work(request: Any) -> str:
        seen.append((request.client, sum(slot() is not None for slot in made)))
        return str(request.client)

    clients = ["b1", "a1", "c1", "c2", "a2"]
    assert engine._spread(work, requests(*clients)) == clients
    assert seen == [("a1", 1), ("a2", 1), ("b1", 1), ("c1", 1), ("c2", 1)]
    assert len(made) == 3


def requests(*clients: str) -> list[Any]:
    return [SimpleNamespace(client=client) for client in clients]


def named(request: Any) -> Any:
    return request.client


def test_more_kinds_than_slots_are_served_kind_by_kind(engine: CudaEngine) -> None:
    mixed = requests("b1", "a1", "b2", "a2")
    assert engine._in_turn(mixed) == mixed
    engine.limit = 1
    assert [request.client for request in engine._in_turn(mixed)] == ["a1", "a2", "b1", "b2"]


def room_for(engine: Any, slots: int, while_built: bool) -> list[int]:
    """Let memory run out when there is a slot too many: as it is made, or as it works. Gives the limits tried."""
    inner, tried, alive = engine._spread, [], []

    def new_slot(client: str, stream: Any) -> SlotOf:
        if while_built and sum(slot() is not None for slot in alive) >= slots:
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(weakref.ref(slot := SlotOf(client, stream)))
        return slot

    def serve(request: Any) -> Any:
        if sum(slot() is not None for slot in alive) > slots:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return request.client

    def spread(work: Any, asked: list[Any]) -> Any:
        assert all(slot() is None for slot in alive), "slots of an attempt that failed take memory"
        tried.append(engine.limit)
        return inner(serve, asked)

    engine._new_slot, engine._spread, engine.limit = new_slot, spread, 128
    return tried


@pytest.mark.parametrize("while_built", [False, True])
@pytest.mark.parametrize(
    ("clients", "slots", "limits"),
    [
        ("a1 b1 a2 b2 a3", 1, [128, 128, 1]),  # two of two kinds: from scratch, then one after the other
        ("a1 a2 a3 b1 c1", 3, [128, 3]),  # one of each kind is tried before fewer
        ("a1 a2", 1, [128, 1]),
        ("a1 b1 c1 d1 e1", 2, [128, 128, 1]),
        ("a1 a2 a3 a4 a5 a6 a7 a8 a9", 2, [128, 1]),
    ],
)
def test_slots_become_fewer_until_they_fit(
    engine: Any, clients: str, slots: int, limits: list[int], while_built: bool
) -> None:
    tried = room_for(engine, slots, while_built)
    asked = clients.split()
    assert engine._in_memory(None, requests(*asked)) == asked
    assert tried == limits


def test_what_is_said_of_it(engine: Any) -> None:
    room_for(engine, 1, while_built=False)
    engine._in_memory(None, requests("a1", "b1"))
    assert engine.heard == [
        "GPU memory ran out with 2 clients in flight; graphs are made anew",
        "GPU memory ran out with 2 clients in flight; going on with 1 at once",
    ]


def test_idle_slots_make_room_first(engine: Any) -> None:
    engine.limit, failures = 128, [1]
    engine._in_memory(named, requests(*"abcdefgh"))

    def work(request: Any) -> Any:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return request.client

    assert engine._in_memory(work, requests("a")) == ["a"]
    assert engine.limit == 128
    assert engine.heard == ["GPU memory ran out with 1 client in flight; graphs are made anew"]


@pytest.mark.parametrize("while_built", [False, True])
def test_too_little_for_one_client_is_said(engine: Any, while_built: bool) -> None:
    room_for(engine, 0, while_built)
    with pytest.raises(
        ConfigError, match=r"1\.0 of 16\.0 GiB free, beside 8\.0 GiB of .*: too little for one client"
    ):
        engine._in_memory(None, requests("a1", "b1"))


def test_other_errors_are_not_about_memory(engine: Any) -> None:
    def work(request: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        engine._in_memory(work, requests("a1"))
