"""Which slot of the GPU engine a client works in; needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from potluck.engine.cuda import CudaEngine


@pytest.fixture
def engine() -> CudaEngine:
    """The engine's slots alone: clients "a…" are of one kind, clients "b…" of another; at most three slots."""
    made: Any = object.__new__(CudaEngine)
    made.world = SimpleNamespace(kind=lambda client: client[0])
    made.limit, made.streams = 3, ["stream"]
    made._pools, made._homes = {}, {}
    made._new_slot = lambda client, stream: SlotOf(client)
    return made  # type: ignore[no-any-return]


class SlotOf:
    def __init__(self, client: str) -> None:
        self.kind = client[0]


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
