"""The slots of a GPU: live clients with streams, who works in which, and what to do when memory runs out.

Nothing in here launches work on the device: the engine passes in how a slot is built and how a client works in it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.packed import State
from potluck.engine.cuda.graphs import GraphRunner, is_out_of_memory
from potluck.engine.protocol import Examination, Outcome, Request
from potluck.errors import ConfigError

R = TypeVar("R", Request, Examination)
Steps = tuple[str, ...]  # what a client does in a slot
GROWS_AFTER = 8  # exchanges without want of memory, after which more slots are tried; doubled at each failure


@dataclass(frozen=True)
class Work:
    """What a slot needs graphs for: steps, and the size of the short batch at their end (0: there is none)."""

    steps: Steps
    last_batch: int = 0


EVALUATION = Work(("evaluate",))


@dataclass(eq=False)
class Slot:
    """A live client with a stream, graphs and a generator of its own: graphs in flight share nothing."""

    client: Client
    stream: torch.cuda.Stream
    runner: GraphRunner
    generator: torch.Generator
    holds: weakref.ref[State] | None = (
        None  # the stored state that equals the client's memory, if there is one
    )
    known: set[Work] = field(default_factory=set)  # what was done in it: it has graphs for that


Build = Callable[[ClientId, torch.cuda.Stream], Slot]


@dataclass
class Exchange:
    """One attempt at the requests of an exchange.

    `busy` has the slots it uses, the one taken longest ago first. `used` is how many there are, including one
    that is being built; it is still known after the attempt has failed.
    """

    busy: dict[Slot, None] = field(default_factory=dict)
    used: int = 0

    def take(self, slot: Slot) -> None:
        """Let a client work in a slot: it is now the one taken last."""
        self.busy.pop(slot, None)
        self.busy[slot] = None
        self.used = len(self.busy)


class Slots:
    """At most `limit` slots, each for clients of one kind.

    The limit becomes lower when memory runs out, and higher again when there has been room for a while.
    """

    def __init__(
        self,
        device: torch.device,
        kind: Callable[[ClientId], str],
        limit: int,
        streams: Sequence[torch.cuda.Stream],
        notice: Callable[[str], None],
        last_batch: Callable[[ClientId], int] = lambda client: 0,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """`last_batch` gives the size of the short batch that a client's epochs end in.

        `make_room` takes stored states off the device; False if there are none to take.
        """
        self.device, self.kind, self.limit, self.streams = device, kind, limit, streams
        self.notice, self.last_batch, self.make_room = notice, last_batch, make_room
        self.most = limit
        self._calm = 0  # exchanges since memory ran out
        self._patience = GROWS_AFTER  # how many to wait for
        self._pools: dict[str, list[Slot]] = {}
        self._homes: dict[tuple[ClientId, Steps], Slot] = {}  # the slot in which each client last did what

    def all(self) -> list[Slot]:
        """Every slot there is."""
        return [slot for pool in self._pools.values() for slot in pool]

    def of_kind(self, kind: str) -> list[Slot]:
        """The slots for clients of one kind."""
        return list(self._pools.get(kind, ()))

    def clear(self) -> None:
        """Free the memory of all live clients and their graphs; nothing may be in flight."""
        self._pools, self._homes = {}, {}
        gc.collect()  # slots and their graphs refer to each other
        torch.cuda.empty_cache()

    # --- an exchange ------------------------------------------------------------------------------------

    def within_memory(
        self, requests: Sequence[R], attempt: Callable[[Sequence[R], Exchange], list[Outcome]]
    ) -> list[Outcome]:
        """Try again with fewer slots if memory runs out: a client that was done answers from its record."""
        kinds, cleared = self._kinds(requests), False
        while True:
            exchange = Exchange()
            try:
                outcomes = attempt(requests, exchange)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self._grow()
                return outcomes
            # Outside the except clause: the frames of the error at hand still refer to the slots.
            exchange.busy.clear()
            idle = len(self.all()) > exchange.used
            torch.cuda.synchronize(self.device)
            self.clear()
            if cleared or not (idle or exchange.used <= kinds):
                self._shrink(exchange.used, kinds)
            else:
                cleared = True  # slots collect graphs over time: a fresh start may be enough
                count = _clients(exchange.used)
                self.notice(f"GPU memory ran out with {count} in flight; graphs are made anew")

    def spread(
        self, requests: Sequence[R], exchange: Exchange, build: Build, work: Callable[[R, Slot], Outcome]
    ) -> list[Outcome]:
        """Let every client work in a slot; the outcomes are in the order of the requests."""
        outcomes = {}
        for request in self._in_turn(requests):
            outcomes[id(request)] = work(request, self._taken(request, exchange, build))
        return [outcomes[id(request)] for request in requests]

    def _shrink(self, used: int, kinds: int) -> None:
        """Half as many slots, and half the stored states on the device.

        At first there stays a slot of each kind, because a slot cannot change its kind.
        """
        gave_way = self.make_room()
        if used <= 1 and not gave_way:
            free, total = (number / 2**30 for number in torch.cuda.mem_get_info(self.device))
            held = torch.cuda.memory_allocated(self.device) / 2**30
            raise ConfigError(
                f"{self.device} has {free:.1f} of {total:.1f} GiB free, beside {held:.1f} GiB of data, "
                "states and messages of this run: too little for one client; have fewer clients in a round, a "
                "smaller batch or model, or engine.device: cpu"
            )
        self.limit = max(used // 2, kinds) if used > kinds else max(used // 2, 1)
        self._calm, self._patience = 0, 2 * self._patience
        states = " and half the stored states on it" if gave_way else ""
        self.notice(
            f"GPU memory ran out with {_clients(used)} in flight; going on with {self.limit} at once{states}"
        )

    def _grow(self) -> None:
        """Allow more slots, if their number was lowered a while ago and what is free has room for them."""
        self._calm += 1
        slots = len(self.all())
        if self.limit >= self.most or self._calm < self._patience or not slots:
            return
        self._calm = 0
        reserved = torch.cuda.memory_reserved(self.device)
        unused = reserved - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused
        more = min(self.limit, self.most - self.limit, free * slots // max(1, reserved))
        if more:
            self.limit += more
            self.notice(f"GPU memory has room again; going on with up to {_clients(self.limit)} at once")

    def _in_turn(self, requests: Sequence[R]) -> Sequence[R]:
        """As they come; kind by kind if there are more kinds than slots, so that fewer slots are replaced."""
        if self._kinds(requests) <= self.limit:
            return requests
        return sorted(requests, key=lambda request: self.kind(request.client))

    def _kinds(self, requests: Sequence[R]) -> int:
        return len({self.kind(request.client) for request in requests})

    # --- who works where --------------------------------------------------------------------------------

    def _taken(self, request: R, exchange: Exchange, build: Build) -> Slot:
        work = self._work(request)
        slot = self._slot(request.client, work, exchange, build)
        self._homes[request.client, work.steps] = slot
        slot.known.add(work)
        exchange.take(slot)
        return slot

    def _work(self, request: R) -> Work:
        if isinstance(request, Request):
            return Work(request.steps, self.last_batch(request.client))
        return EVALUATION

    def _slot(self, client: ClientId, work: Work, exchange: Exchange, build: Build) -> Slot:
        """The slot where the client did this last; else a free one of its kind, or a new one.

        A state is copied as one piece, so a client can work in any slot of its kind, at best in one that has graphs
        for this work: where many clients are evaluated and few train, few slots need graphs of training, and
        clients whose last batches are of one size meet in one slot. If no more slots are allowed, clients queue at
        those of their kind, one after the other, or a slot of another kind makes room.
        """
        home = self._homes.get((client, work.steps))
        if home is not None and home not in exchange.busy:
            return home
        pool = self._pools.setdefault(self.kind(client), [])
        free = [slot for slot in pool if slot not in exchange.busy]
        if free:
            return _best(free, work)
        count = sum(map(len, self._pools.values()))
        if count >= self.limit and pool:
            return next(slot for slot in exchange.busy if slot in pool)
        stream = (
            self._freed_stream(exchange) if count >= self.limit else self.streams[count % len(self.streams)]
        )
        exchange.used = len(exchange.busy) + 1
        pool.append(build(client, stream))
        return pool[-1]

    def _freed_stream(self, exchange: Exchange) -> torch.cuda.Stream:
        """Give up a slot of another kind; returns its stream."""
        stream = self._part_with(self._dispensable(exchange), exchange)
        gc.collect()  # by now only its own graphs refer to the slot
        torch.cuda.empty_cache()
        return stream

    def _dispensable(self, exchange: Exchange) -> Slot:
        """An idle slot if there is one, else the one that was taken longest ago."""
        idle = [slot for slot in self.all() if slot not in exchange.busy]
        return idle[0] if idle else next(iter(exchange.busy))

    def _part_with(self, slot: Slot, exchange: Exchange) -> torch.cuda.Stream:
        slot.stream.synchronize()
        exchange.busy.pop(slot, None)
        for pool in self._pools.values():
            if slot in pool:
                pool.remove(slot)
        self._homes = {client: home for client, home in self._homes.items() if home is not slot}
        return slot.stream


def _best(free: Sequence[Slot], work: Work) -> Slot:
    """The slot that did the most of this work before."""
    same = (slot for slot in free if work in slot.known)
    alike = (slot for slot in free if any(known.steps == work.steps for known in slot.known))
    return next(same, None) or next(alike, free[0])


def _clients(number: int) -> str:
    return f"{number} client" if number == 1 else f"{number} clients"
