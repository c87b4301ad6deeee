"""Which slot of the GPU engine a client works in; needs no GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from potluck.core.message import Message
from potluck.core.streams import Source, Stream
from potluck.engine.cuda.graphs import _play
from potluck.engine.cuda.slots import GROWS_AFTER, Exchange, Slots
from potluck.engine.protocol import Request, Stamp
from potluck.errors import ConfigError
from potluck.training.plan import Plan


class SlotOf:
    """Stands in for a slot: it has a kind and a stream."""

    def __init__(self, client: str, stream: Any) -> None:
        self.kind, self.stream = client[0], stream
        self.known: set[Any] = set()
        self.itself = self  # as graphs know their slot


class Gpu:
    """Slots for clients "a…" of one kind, "b…" of another and so on, and what they were told to do."""

    def __init__(self, limit: int = 3) -> None:
        self.waited: list[int] = []
        self.heard: list[str] = []
        stream: Any = SimpleNamespace(synchronize=lambda: self.waited.append(1))
        self.slots = Slots(torch.device("cuda"), lambda client: client[0], limit, [stream], self.heard.append)

    def place(self, *clients: str, build: Callable[..., Any] = SlotOf) -> list[Any]:
        """Where the clients of one exchange work."""
        return self.spread(requests(*clients), build)

    def spread(self, asked: Sequence[Any], build: Callable[..., Any] = SlotOf) -> list[Any]:
        """Where these requests are served."""
        return self.slots.spread(asked, Exchange(), build, lambda request, slot: slot)  # type: ignore[return-value]

    def serve(
        self,
        work: Callable[[Any], Any],
        *clients: str,
        build: Callable[..., Any] = SlotOf,
        before: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """One exchange within memory; `before` is called before every attempt at it."""

        def attempt(asked: Sequence[Any], exchange: Exchange) -> list[Any]:
            before()
            return self.slots.spread(asked, exchange, build, lambda request, slot: work(request))

        return self.slots.within_memory(requests(*clients), attempt)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """At most three slots."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**33)
    return Gpu()


def requests(*clients: str) -> list[Any]:
    return [SimpleNamespace(client=client) for client in clients]


def training(client: str) -> Request:
    return Request(client, ("train",), Message(), Stamp("", 1, 1, 1, 0))


def named(request: Any) -> Any:
    return request.client


def test_a_client_comes_back_to_its_slot(gpu: Gpu) -> None:
    first, second = gpu.place("a1", "a2")
    assert first is not second
    assert gpu.place("a2", "a1") == [second, first]


def test_clients_train_where_others_have_trained_though_all_are_evaluated(gpu: Gpu) -> None:
    """A slot captures a step when it first comes there: ten slots are enough for cohorts of ten."""
    everyone = [f"a{number}" for number in range(6)]
    gpu.slots.limit = 6
    trained = gpu.spread([training("a0"), training("a1")])
    evaluated = gpu.place(*everyone)
    assert len({*evaluated}) == 6
    for cohort in (("a2", "a3"), ("a4", "a0"), ("a5", "a1")):
        assert {*gpu.spread([training(client) for client in cohort])} == {*trained}
        assert gpu.place(*everyone) == evaluated


def test_clients_with_last_batches_of_one_size_meet_in_one_slot(gpu: Gpu) -> None:
    """A short batch is captured where it has come before; each size would be captured in every slot otherwise."""
    gpu.slots.last_batch = lambda client: int(client[1:]) % 10
    seven, three = gpu.spread([training("a7"), training("a3")])
    assert gpu.spread([training("a13"), training("a17")]) == [three, seven]
    assert gpu.spread([training("a27"), training("a37")])[0] is seven  # the second takes what is free


def test_a_slot_that_is_taken_is_left_to_who_came_first(gpu: Gpu) -> None:
    (first,) = gpu.place("a1")
    assert gpu.place("a3") == [first]
    new, old = gpu.place("a3", "a1")
    assert new is first
    assert old is not first


def test_kinds_do_not_mix_and_clients_queue_where_there_is_no_room(gpu: Gpu) -> None:
    one, other, alone = gpu.place("a1", "a2", "b1")
    assert [slot.kind for slot in (one, other, alone)] == ["a", "a", "b"]
    assert gpu.place("b2") == [alone]
    assert {id(slot) for slot in gpu.place("a1", "a2", "a3", "a4")} == {id(one), id(other)}
    assert gpu.place("b1", "b2") == [alone, alone]
    assert gpu.slots.all() == [one, other, alone]
    assert gpu.slots.of_kind("a") == [one, other]


def test_where_there_is_no_room_clients_queue_evenly(gpu: Gpu) -> None:
    gpu.slots.limit = 2
    clients = [f"a{number}" for number in range(20)]
    for _ in range(3):
        slots = gpu.place(*clients)
        assert sorted(slots.count(slot) for slot in {*slots}) == [10, 10]


def test_where_there_is_no_room_for_another_kind_an_idle_slot_goes(gpu: Gpu) -> None:
    one, other, alone = gpu.place("a1", "a2", "b1")
    gone = weakref.ref(one)
    del one
    (new,) = gpu.place("c1")
    assert new.kind == "c"
    assert gone() is None, "its memory is still taken"
    assert gpu.waited, "it was given up while it may have been at work"
    assert gpu.place("a2", "b1", "c1") == [other, alone, new]
    assert gpu.place("a1") == [other], "its client has another home now"


def test_with_one_slot_every_kind_is_served_one_after_the_other(gpu: Gpu) -> None:
    gpu.slots.limit = 1
    made: list[Any] = []
    seen = []

    def build(client: str, stream: Any) -> SlotOf:
        made.append(weakref.ref(slot := SlotOf(client, stream)))
        return slot

    def work(request: Any) -> str:
        seen.append((request.client, sum(slot() is not None for slot in made)))
        return str(request.client)

    clients = ["b1", "a1", "c1", "c2", "a2"]
    assert gpu.serve(work, *clients, build=build) == clients
    assert seen == [("a1", 1), ("a2", 1), ("b1", 1), ("c1", 1), ("c2", 1)]
    assert len(made) == 3


def test_more_kinds_than_slots_are_served_kind_by_kind(gpu: Gpu) -> None:
    mixed = ["b1", "a1", "b2", "a2"]
    for limit, turns in ((3, mixed), (1, ["a1", "a2", "b1", "b2"])):
        gpu.slots.limit, seen = limit, []

        def work(request: Any, seen: list[str] = seen) -> Any:
            seen.append(request.client)
            return request.client

        assert gpu.serve(work, *mixed) == mixed
        assert seen == turns


class Short:
    """Memory for a number of slots: it runs out when there is one too many, as it is built or as it works."""

    def __init__(self, gpu: Gpu, slots: int, while_built: bool) -> None:
        self.gpu, self.room, self.while_built = gpu, slots, while_built
        self.tried: list[int] = []  # the limit at every attempt
        self.alive: list[Any] = []
        gpu.slots.limit = 128

    def serve(self, *clients: str) -> list[Any]:
        return self.gpu.serve(self._work, *clients, build=self._build, before=self._begin)

    def _count(self) -> int:
        return sum(slot() is not None for slot in self.alive)

    def _begin(self) -> None:
        assert not self._count(), "slots of an attempt that failed take memory"
        self.tried.append(self.gpu.slots.limit)

    def _build(self, client: str, stream: Any) -> SlotOf:
        if self.while_built and self._count() >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.alive.append(weakref.ref(slot := SlotOf(client, stream)))
        return slot

    def _work(self, request: Any) -> Any:
        if self._count() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return request.client


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
    gpu: Gpu, clients: str, slots: int, limits: list[int], while_built: bool
) -> None:
    short = Short(gpu, slots, while_built)
    asked = clients.split()
    assert short.serve(*asked) == asked
    assert short.tried == limits


def test_what_is_said_of_it(gpu: Gpu) -> None:
    Short(gpu, 1, while_built=False).serve("a1", "b1")
    assert gpu.heard == [
        "GPU memory ran out with 2 clients in flight; graphs are made anew",
        "GPU memory ran out with 2 clients in flight; going on with 1 at once",
    ]


def test_idle_slots_make_room_first(gpu: Gpu) -> None:
    gpu.slots.limit, failures = 128, [1]
    gpu.serve(named, *"abcdefgh")

    def work(request: Any) -> Any:
        if failures and failures.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return request.client

    assert gpu.serve(work, "a") == ["a"]
    assert gpu.slots.limit == 128
    assert gpu.heard == ["GPU memory ran out with 1 client in flight; graphs are made anew"]


def test_slots_grow_again_once_there_is_room(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    Short(gpu, 4, while_built=False).serve(*(f"a{number}" for number in range(8)))
    gpu.slots.most = 8
    limits = []
    for room in (0, 20, 90, 90, 90):  # two slots take 30
        free[0] = room
        for _ in range(2 * GROWS_AFTER):
            gpu.serve(named, "a1", "a2")
        limits.append(gpu.slots.limit)
    assert limits == [2, 3, 6, 8, 8]
    assert sum("has room again" in sentence for sentence in gpu.heard) == 3


@pytest.mark.parametrize("while_built", [False, True])
def test_too_little_for_one_client_is_said(gpu: Gpu, while_built: bool) -> None:
    short = Short(gpu, 0, while_built)
    with pytest.raises(
        ConfigError, match=r"1\.0 of 16\.0 GiB free, beside 8\.0 GiB of .*: too little for one client"
    ):
        short.serve("a1", "b1")


def test_other_errors_are_not_about_memory(gpu: Gpu) -> None:
    def work(request: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        gpu.serve(work, "a1")


def test_steps_come_from_a_graph_where_there_is_one_and_in_order_else() -> None:
    rows = np.arange(14)
    order = [rows[:4], rows[4:8], rows[8:10], rows[10:14]]
    plan = Plan(
        {"private": Stream(Source(torch.zeros(14, 1), torch.zeros(14)), order)}, None, torch.device("cpu")
    )
    seen: list[tuple[str, list[int]]] = []

    class Graph:
        def replay(self, tables: dict[str, np.ndarray]) -> None:
            seen.extend(("graph", line.tolist()) for line in tables["private"])

    def step(taken: Any) -> None:
        seen.append(("step", taken["private"].tolist()))

    _play(step, plan, plan.blocks(), lambda sizes, tables: Graph() if sizes == (4,) else None)  # type: ignore[arg-type,return-value]
    assert [how for how, _ in seen] == ["graph", "graph", "step", "graph"]
    assert [line for _, line in seen] == [one.tolist() for one in order]
