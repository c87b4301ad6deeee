"""Client states at rest, and the checkpoints made of them.

A client that was never touched has no stored state: it is made from the seed when first needed. A checkpoint
writes the clients that changed since the last one, each to its own safetensors file, and last of all, in one
stroke, the manifest that says which files hold the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from potluck.client import ClientId
from potluck.engine.transactions import Record
from potluck.errors import RunError
from potluck.record import write_whole
from potluck.state import State


class ClientStore:
    """The stored states of all clients that were ever touched."""

    def __init__(self) -> None:
        self._records: dict[ClientId, Record] = {}
        self.changed: set[ClientId] = set()

    def record(self, client: ClientId) -> Record:
        """The client's record, made if it has none."""
        return self._records.setdefault(client, Record())

    def peek(self, client: ClientId) -> Record | None:
        """The client's record, None for one that was never touched."""
        return self._records.get(client)

    def put(self, client: ClientId, state: State) -> None:
        """Take over a state from a checkpoint."""
        self._records[client] = Record(base=state)

    def settle(self, client: ClientId, accepted: int) -> None:
        """Keep or undo the client's work of a round."""
        record = self._records.get(client)
        if record is None:
            return
        before = record.base
        record.settle(accepted)
        if record.base is not before:
            self.changed.add(client)
        elif record.base is None:
            del self._records[client]

    def take_changed(self) -> dict[ClientId, State]:
        """The states that changed since the last call. States are replaced, never written to: no copy."""
        changed = {client: self._records[client].base for client in sorted(self.changed)}
        self.changed = set()
        return {client: state for client, state in changed.items() if state is not None}

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._records)


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after a round."""

    round: int
    server: State
    clients: Mapping[ClientId, State]
    notes: Mapping[str, Any]


class Checkpoints:
    """The checkpoint folder of a run: written in the background, incremental, read back whole."""

    MANIFEST = "checkpoint.json"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[ClientId, str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self, round_: int, server: State, clients: Mapping[ClientId, State], notes: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint in the background; an earlier one is finished first."""
        self.wait()
        self._pending = self._pool.submit(self._write, round_, server, clients, notes)

    def wait(self) -> None:
        """Until the last checkpoint is on disk."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Finish what is under way."""
        self.wait()
        self._pool.shutdown()

    def _write(
        self, round_: int, server: State, clients: Mapping[ClientId, State], notes: Mapping[str, Any]
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        server_file = f"server-{round_:06d}.safetensors"
        write_whole(self.folder / server_file, safetensors.torch.save(_contiguous(server)))
        for number, (client, state) in enumerate(clients.items()):
            name = f"clients-{round_:06d}-{number:05d}.safetensors"
            write_whole(self.folder / name, safetensors.torch.save(_contiguous(state)))
            self._files[client] = name
        manifest = {"round": round_, "server": server_file, "clients": dict(self._files), **notes}
        write_whole(self.folder / self.MANIFEST, json.dumps(manifest).encode())
        self._clean({server_file, *self._files.values(), self.MANIFEST})

    def _clean(self, needed: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.name not in needed:
                path.unlink()

    def load(self) -> Checkpoint | None:
        """The newest checkpoint, None if the run was stopped before the first."""
        manifest = self.folder / self.MANIFEST
        if not manifest.exists():
            return None
        try:
            notes = json.loads(manifest.read_text())
            self._files = dict(notes.pop("clients"))
            clients = {client: self._read(name) for client, name in self._files.items()}
            return Checkpoint(notes.pop("round"), self._read(notes.pop("server")), clients, notes)
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise RunError(f"the checkpoint in {os.fspath(self.folder)} cannot be read: {error}") from error

    def _read(self, name: str) -> State:
        return dict(safetensors.torch.load_file(self.folder / name))


def _contiguous(state: State) -> State:
    return {name: tensor.contiguous().cpu() for name, tensor in state.items()}
