"""The stored states of clients: in device memory, in pinned host memory and on disk.

The states used least recently move down first, those of the round that is open included. A client that was never
asked has no stored state: it is built from the seed when first needed. A stored state never changes, it is only
replaced. So it can be in several places at once, it can leave one of them without a copy while it is in another,
and the file it was moved to is also the one that a checkpoint names.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from potluck.core.card import ClientId
from potluck.core.packed import Packed, State
from potluck.engine.store.absent import Absent
from potluck.engine.store.budget import Budget
from potluck.engine.store.state_files import Packing, StateFiles, data_size, read
from potluck.engine.store.transfers import Copy, Transfers, size
from potluck.engine.transactions import Record, Work
from potluck.files import remove

AT_ONCE = 256 << 20  # bytes of states that are brought here together
AHEAD = 0.8  # of the host's budget: above it states are written in the background, before anyone has to wait


@dataclass(eq=False)
class Kept:
    """One stored state, and every place it is in now."""

    nbytes: int
    packing: Packing | None = None
    device: Copy | None = None
    host: Copy | None = None
    reading: Future[Copy] | None = None  # being read from its file
    saved: Future[Path] | None = None
    named: bool = False  # in a manifest: then the checkpoints remove its file
    absent: Absent | None = None  # elsewhere, and in none of these places


class Tier:
    """One kind of memory: the states in it, least recently used first, and the bytes they take."""

    def __init__(self, limit: int, pinned: bool = False) -> None:
        self.limit, self.used, self.pinned = limit, 0, pinned
        self._order: OrderedDict[Kept, int] = OrderedDict()

    def touch(self, kept: Kept) -> None:
        """Note that a state is here and was used just now."""
        if kept not in self._order:
            # The allocator of pinned memory rounds up to powers of two.
            self._order[kept] = 1 << (kept.nbytes - 1).bit_length() if self.pinned else kept.nbytes
            self.used += self._order[kept]
        self._order.move_to_end(kept)

    def drop(self, kept: Kept) -> None:
        """Note that a state is no longer here."""
        self.used -= self._order.pop(kept, 0)

    def oldest(self) -> Kept:
        """The state that was used least recently."""
        return next(iter(self._order))

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, kept: object) -> bool:
        return kept in self._order


class StoredRecord(Record):
    """A record whose states are in a store: reading one loads it, assigning one stores it."""

    def __init__(self, store: ClientStore, client: ClientId) -> None:
        self._store, self._client = store, client
        self._work: Work | None = None
        self._worked: Kept | None = None  # the state of the work

    @property
    def base(self) -> State | None:
        """The state at the end of the last accepted round."""
        return self._store.stored(self._client)

    @base.setter
    def base(self, state: State | None) -> None:
        self._store.replace(self._client, state)

    @property
    def work(self) -> Work | None:
        """The round the client is in, without its state, which `worked` gives."""
        return self._work

    @work.setter
    def work(self, work: Work | None) -> None:
        self._store.let_go(self._worked)
        self._worked = None if work is None else self._store.take_in(work.state)
        self._work = None if work is None else replace(work, state={})

    def worked(self) -> State:
        """The state after the last exchange of the round that is open."""
        assert self._worked is not None
        return self._store.reached(self._worked)

    def settle(self, accepted: int) -> None:
        """Keep the work if the server accepted its round, otherwise drop it; its state stays where it is."""
        if self._work is not None and self._work.round == accepted:
            self._store.install(self._client, self._worked)
            self._worked = None
        self.work = None


class ClientStore:
    """The stored states of all clients that were ever asked.

    Without a folder no state leaves the host's memory; stores that share a folder share its `StateFiles`. Call the
    methods from one thread only; files are written and read in the background.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        folder: Path | StateFiles | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        budget, device = budget or Budget(), torch.device(device)
        self._transfers = Transfers(device) if device.type == "cuda" else None
        self._files = StateFiles(folder) if isinstance(folder, Path) else folder
        pinned = self._transfers is not None
        self.device, self.host = Tier(budget.device), Tier(budget.host, pinned)
        self.leaving = Tier(budget.host, pinned)  # still in the host's memory, while they are written
        self._records: dict[ClientId, StoredRecord] = {}
        self._kept: dict[ClientId, Kept] = {}
        self._stale: set[Future[Path]] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states-out")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="states-in")
        self.bring: Callable[[Sequence[Absent]], None] = _bring_each  # fetches states that are elsewhere

    def record(self, client: ClientId) -> Record:
        """The client's record, created if it has none."""
        if client not in self._records:
            self._records[client] = StoredRecord(self, client)
        return self._records[client]

    def peek(self, client: ClientId) -> Record | None:
        """The client's record, None for a client that was never asked."""
        return self._records.get(client)

    def put(self, client: ClientId, state: State | Path) -> None:
        """Store a state, or the file in which a checkpoint has it."""
        self.record(client).work = None
        if isinstance(state, Path):
            saved: Future[Path] = Future()
            saved.set_result(state)
            self.install(client, Kept(data_size(state), saved=saved, named=True))
        else:
            self.replace(client, state)
            self._trim()

    def settle(self, client: ClientId, accepted: int) -> None:
        """Keep or undo the client's work of a round."""
        record = self._records.get(client)
        if record is None:
            return
        record.settle(accepted)
        if client not in self._kept:
            del self._records[client]

    def mark(self, clients: Iterable[ClientId]) -> Callable[[], None]:
        """Returns a function that takes these clients back to their states of now; valid until the next call."""
        self._sweep()
        before = {client: self._kept.get(client) for client in clients}

        def undo() -> None:
            for client, kept in before.items():
                self.record(client).work = None
                self.install(client, kept)
                if kept is None:
                    del self._records[client]
            self._trim()

        return undo

    def prefetch(self, clients: Iterable[ClientId]) -> None:
        """Start loading the states of clients that will be asked soon, up to half of the memory."""
        room = (self.host if self._transfers is None else self.device).limit // 2
        for client in clients:
            kept = self._kept.get(client)
            if kept is None:
                continue
            room -= kept.nbytes
            if room < 0:
                break
            self._start(kept)
        self._trim()

    def save(self) -> dict[ClientId, Future[Path]]:
        """The files of all stored states, for a manifest; those not on disk yet are written in the background."""
        self._bring_all()
        for kept in self._kept.values():
            kept.named = True
        return {client: self._save(kept) for client, kept in sorted(self._kept.items())}

    def close(self) -> None:
        """Finish what is being read and written, and remove the files that no manifest will name."""
        self._reader.shutdown(cancel_futures=True)
        unnamed = {kept.saved for kept in self._kept.values() if kept.saved is not None and not kept.named}
        self._stale |= unnamed
        self._sweep()
        self._writer.shutdown()

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._records)

    def held(self) -> Iterator[ClientId]:
        """The clients that have a stored state: they ever trained."""
        return iter(self._kept)

    def holds(self, client: ClientId) -> bool:
        """Whether a client has a stored state: it ever trained."""
        return client in self._kept

    def fetch(self, client: ClientId) -> State | None:
        """A client's stored state, loaded where it is needed; None if it still has its initial state."""
        found = self.stored(client)
        return found.here() if isinstance(found, Absent) else found

    def stored(self, client: ClientId) -> State | None:
        """The same, but one that is elsewhere stays there."""
        kept = self._kept.get(client)
        return None if kept is None else self.reached(kept)

    def reached(self, kept: Kept) -> State:
        """A state, loaded where it is needed; one that is elsewhere stays there."""
        self._note_arrival(kept)
        if kept.absent is not None:
            return kept.absent
        if self._transfers is None:
            state = self._on_host(kept).state
        else:
            state = self._transfers.use(self._on_device(kept, self._transfers))
        self._trim()
        return state

    def replace(self, client: ClientId, state: State | None) -> None:
        """Store another state for a client."""
        self.install(client, None if state is None else self._held(state))

    def take_in(self, state: State) -> Kept:
        """Store a state that is no client's yet: the work of a round that is open."""
        kept = self._held(state)
        self._note(kept)
        self._trim()
        return kept

    def let_go(self, kept: Kept | None) -> None:
        """Forget a state, wherever it is; that of a client is replaced instead."""
        if kept is None:
            return
        for tier in (self.device, self.host, self.leaving):
            tier.drop(kept)
        if kept.saved is not None and not kept.named:
            self._stale.add(kept.saved)

    def install(self, client: ClientId, kept: Kept | None) -> None:
        """Let a client have a state that is stored already, or none."""
        self.let_go(self._kept.pop(client, None))
        if kept is not None:
            self._kept[client] = kept
            if kept.saved is not None:
                self._stale.discard(kept.saved)
            self._note(kept)

    def give_way(self) -> bool:
        """Put half of what is on the device aside, as its memory ran out; False if there is too little to give.

        From now on no more than the other half stays there.
        """
        if self._transfers is None or len(self.device) < 2:
            return False
        self.device.limit = self.device.used // 2
        self._trim()
        return True

    def _held(self, state: State) -> Kept:
        """A state where it is now."""
        if isinstance(state, Absent):
            return Kept(0, absent=state)
        packing = (state.flat.numel(), state.layout) if isinstance(state, Packed) else None
        kept = Kept(size(state), packing)
        if self._transfers is not None and self._transfers.holds(state):
            kept.device = self._transfers.made_here(state)
        else:
            kept.host = Copy(state)
        return kept

    def _bring_all(self) -> None:
        """Fetch all states that are elsewhere, a part at a time, as memory may not hold them all."""
        absent = [kept for _, kept in sorted(self._kept.items()) if kept.absent is not None]
        while absent:
            part, room = list[Kept](), AT_ONCE
            while absent and (room > 0 or not part):
                part.append(absent.pop())
                room -= part[-1].absent.nbytes if part[-1].absent is not None else 0
            self.bring([kept.absent for kept in part if kept.absent is not None])
            for kept in part:
                self._note_arrival(kept)
            self._trim()

    def _note_arrival(self, kept: Kept) -> None:
        """Hold a state that was elsewhere and is here now."""
        state = None if kept.absent is None else kept.absent.arrived
        if state is None:
            return
        found = self._held(state)
        kept.nbytes, kept.packing, kept.absent = found.nbytes, found.packing, None
        kept.device, kept.host = found.device, found.host
        self._note(kept)

    def _note(self, kept: Kept) -> None:
        """Count a state in every kind of memory that it is in."""
        if kept.device is not None:
            self.device.touch(kept)
        if (kept.host is not None or kept.reading is not None) and kept not in self.leaving:
            self.host.touch(kept)

    def _on_device(self, kept: Kept, transfers: Transfers) -> Copy:
        if kept.device is None:
            kept.device = transfers.lift(self._on_host(kept))
        self.device.touch(kept)
        return kept.device

    def _on_host(self, kept: Kept) -> Copy:
        if kept.host is None:
            kept.host = kept.reading.result() if kept.reading is not None else self._read(kept)
            kept.reading = None
        self._touch_host(kept)
        return kept.host

    def _touch_host(self, kept: Kept) -> None:
        self.leaving.drop(kept)
        self.host.touch(kept)

    def _start(self, kept: Kept) -> None:
        self._note_arrival(kept)
        if kept.absent is not None:
            return
        if kept.device is not None:
            self.device.touch(kept)
        elif kept.host is None:
            kept.reading = kept.reading or self._reader.submit(self._read, kept)
            self._touch_host(kept)
        elif self._transfers is not None:
            self._on_device(kept, self._transfers)
        else:
            self._touch_host(kept)

    def _read(self, kept: Kept) -> Copy:
        assert kept.saved is not None, "a state that is not in memory has a file"
        return Copy(read(kept.saved.result(), kept.packing, pinned=self.host.pinned))

    def _save(self, kept: Kept) -> Future[Path]:
        failed = kept.saved is not None and kept.saved.done() and kept.saved.exception() is not None
        if kept.saved is None or failed:
            copy = kept.host or kept.device
            assert copy is not None, "a state without a file is in memory"
            kept.saved = self._writer.submit(self._write, copy)
        return kept.saved

    def _write(self, copy: Copy) -> Path:
        assert self._files is not None, "only a store with a folder writes"
        with self._transfers.aside() if self._transfers is not None else contextlib.nullcontext():
            return self._files.write(copy.wait())

    def _trim(self) -> None:
        """Move states down until every kind of memory is within its budget; the one used last may stay."""
        if self._transfers is not None:
            while self.device.used > self.device.limit and len(self.device) > 1:
                self._lower(self.device.oldest(), self._transfers)
        if self._files is not None:
            self._trim_host(0 if self._transfers is not None else 1)

    def _lower(self, kept: Kept, transfers: Transfers) -> None:
        if kept.host is None and kept.device is not None:
            kept.host = transfers.lower(kept.device)
            self._touch_host(kept)
        self.device.drop(kept)
        kept.device = None

    def _trim_host(self, stay: int) -> None:
        while self.host.used > AHEAD * self.host.limit and len(self.host) > stay:
            kept = self.host.oldest()
            if kept.device is None:
                self._save(kept)
            self.host.drop(kept)
            self.leaving.touch(kept)
        while self.host.used + self.leaving.used > self.host.limit and len(self.leaving):
            kept = self.leaving.oldest()
            if kept.device is None:
                self._save(kept).result()
            self.leaving.drop(kept)
            kept.host = kept.reading = None

    def _sweep(self) -> None:
        """Remove the files of states that were replaced before any manifest named them."""
        for saved in self._stale:
            if not saved.cancel() and saved.exception() is None:
                remove(saved.result())
        self._stale.clear()


def _bring_each(states: Sequence[Absent]) -> None:
    for state in states:
        state.here()
