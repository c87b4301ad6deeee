"""Which slot of the GPU engine a client works in; needs no GPU."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from potluck.engine.cuda import CudaEngine
from potluck.errors import ConfigError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    """The engine's slots alone: clients "a…" are of one kind, clients "b…" of another; at most three slots."""
    made: Any = object.__new__(CudaEngine)
    made.world = SimpleNamespace(kind=lambda client: client[0], device="cuda")
    made.limit, made.streams = 3, [SimpleNamespace(synchronize=lambda: None)]
    made._pools, made._homes, made._now, made._told = {}, {}, None, set()
    made.heard = []
    made._notice = made.heard.append
    made._new_slot = lambda client, stream: SlotOf(client, stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    return made  # type: ignore[no-any-return]


class SlotOf:
    def __init__(self, client: str, stream: Any) -> None:
        self.kind, self.stream = client[0], stream


def place(engine: CudaEngine, *clients: str) -> list[Any]:
    """Where the clients of one exchange go."""
    busy: dict[Any, None] = {}
    for client in clients:
        slot = engine._homes[client] = engine._slot(client, busy)
        busy[slot] = None
    return [engine._homes[client] for client in clients]


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


def test_where_there_is_no_room_for_another_kind_an_idle_slot_goes(engine: CudaEngine) -> None:
    one, other, alone = place(engine, "a1", "a2", "b1")
    gone = weakref.ref(one)
    del one
    (new,) = place(engine, "c1")
    assert new.kind == "c"
    assert gone() is None, "its memory is still taken"
    assert "a1" not in engine._homes
    assert place(engine, "a2", "b1", "c1") == [other, alone, new]


def test_with_one_slot_every_kind_is_served_one_after_the_other(engine: CudaEngine) -> None:
    engine.limit = 1
    busy: dict[Any, None] = {}
    kinds = []
    for client in ("a1", "b1", "c1", "c2"):
        slot = engine._homes[client] = engine._slot(client, busy)
        busy[slot] = None
        kinds.append(slot.kind)
        assert sum(map(len, engine._pools.values())) == 1
    assert kinds == ["a", "b", "c", "c"]


def requests(*clients: str) -> list[Any]:
    return [SimpleNamespace(client=client) for client in clients]


def test_more_kinds_than_slots_are_served_kind_by_kind(engine: CudaEngine) -> None:
    mixed = requests("b1", "a1", "b2", "a2")
    assert engine._in_turn(mixed) == mixed
    engine.limit = 1
    assert [request.client for request in engine._in_turn(mixed)] == ["a1", "a2", "b1", "b2"]


def room_for(engine: Any, slots: int, attempts: list[int]) -> None:
    """Let memory run out as soon as there are more slots than that."""

    def spread(work: Any, asked: list[Any]) -> list[str]:
        attempts.append(engine.limit)
        busy: dict[Any, None] = {}
        for request in engine._in_turn(asked):
            slot = engine._homes[request.client] = engine._slot(request.client, busy)
            busy[slot] = None
            if sum(map(len, engine._pools.values())) > slots:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return [request.client for request in asked]

    engine._spread = spread


def test_slots_become_fewer_until_they_fit(engine: Any) -> None:
    engine.limit, attempts = 128, []
    room_for(engine, 1, attempts)
    asked = requests("a1", "b1", "a2", "b2", "a3")
    assert engine._in_memory(None, asked) == [request.client for request in asked]
    assert attempts == [128, 128, 1]  # two of two kinds: once more from scratch, then one after the other
    assert engine.heard == [
        "GPU memory ran out with 2 clients in flight; their graphs are made anew",
        "GPU memory ran out with 2 clients in flight; going on with 1 at once",
    ]


def test_one_slot_of_each_kind_is_tried_before_fewer(engine: Any) -> None:
    engine.limit, attempts = 128, []
    room_for(engine, 3, attempts)
    engine._in_memory(None, requests("a1", "a2", "a3", "b1", "c1"))
    assert attempts == [128, 3]


def test_too_little_for_one_client_is_said(engine: Any) -> None:
    room_for(engine, 0, [])
    with pytest.raises(ConfigError, match=r"1\.0 of 16\.0 GiB free, too little for one client"):
        engine._in_memory(None, requests("a1", "b1"))
