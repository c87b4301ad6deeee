"""Checkpoints: one manifest file names all the files that hold a run, so that it changes atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.engine.store.state_files import check, on_host, sync
from potluck.errors import RunError
from potluck.files import write_whole


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round; the clients' states stay in their files."""

    round: int
    server: State
    clients: Mapping[ClientId, Path]
    notes: Mapping[str, Any]


class Checkpoints:
    """The checkpoint folder of a run, written incrementally and in the background.

    The store writes the clients' files. The manifest is written when everything it names is on disk; after
    that, files that only earlier manifests named are removed. The last `keep` checkpoints are kept: the manifests
    of the older ones stand beside the newest, with the round in their names.
    """

    MANIFEST = "checkpoint.json"

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folder, self.keep = folder, keep
        self._named: set[str] = set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        round_: int,
        server: State,
        clients: Mapping[ClientId, Future[Path]],
        notes: Mapping[str, Any],
    ) -> None:
        """Start writing a checkpoint in the background, after an earlier one has ended."""
        self.wait()
        self._pending = self._pool.submit(self._write, round_, server, clients, notes)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait for the last checkpoint and end the background thread."""
        self.wait()
        self._pool.shutdown()

    def _write(
        self,
        round_: int,
        server: State,
        clients: Mapping[ClientId, Future[Path]],
        notes: Mapping[str, Any],
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        server_file = f"server-{round_:06d}.safetensors"
        write_whole(self.folder / server_file, safetensors.torch.save(on_host(server)))
        files = {client: saved.result() for client, saved in clients.items()}
        for path in files.values():
            if path.name not in self._named:
                sync(path)
        names = {client: path.name for client, path in files.items()}
        manifest = {"round": round_, "server": server_file, "clients": names, **notes}
        older = self._set_aside(round_)
        write_whole(self.folder / self.MANIFEST, json.dumps(manifest).encode())
        named = {server_file, *names.values()}.union(*(_files_of(path) for path in older))
        for name in self._named - named:
            (self.folder / name).unlink(missing_ok=True)
        self._named = named

    def _set_aside(self, round_: int) -> list[Path]:
        """Put the newest manifest aside, before one of `round_` takes its place, and drop the oldest ones."""
        newest = self.folder / self.MANIFEST
        before = _round_of(newest) if self.keep > 1 and newest.exists() else round_
        if before < round_:
            write_whole(self._aside(before), newest.read_bytes())
        older = [path for path in self._older() if _round_of(path) < round_]
        kept = older[max(len(older) - self.keep + 1, 0) :]
        for path in self._older():
            if path not in kept:
                path.unlink()
        return kept

    def _aside(self, round_: int) -> Path:
        return self.folder / f"checkpoint-{round_:06d}.json"

    def _older(self) -> list[Path]:
        return sorted(self.folder.glob("checkpoint-*.json"))

    def go_back(self, round_: int) -> bool:
        """Make the checkpoint of an earlier round the newest, 0 for the start; False if it is not kept."""
        self.wait()
        aside = self._aside(round_)
        if round_ > 0 and not aside.exists():
            return False
        for path in self._older():
            if _round_of(path) > round_:
                path.unlink()
        if round_ > 0:
            write_whole(self.folder / self.MANIFEST, aside.read_bytes())
            aside.unlink()
        else:
            (self.folder / self.MANIFEST).unlink(missing_ok=True)
        self.load()
        return True

    def load(self) -> Checkpoint | None:
        """Load the newest checkpoint, None if there is none yet; files it does not name are removed."""
        manifest = self.folder / self.MANIFEST
        if not manifest.exists():
            self._clean()
            return None
        try:
            notes = json.loads(manifest.read_text())
            round_, server, names = notes.pop("round"), notes.pop("server"), notes.pop("clients")
            _refuse_paths([server, *names.values()])
            clients = {client: check(self.folder / name) for client, name in names.items()}
            state = dict(safetensors.torch.load_file(self.folder / server))
        except (OSError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise RunError(f"the checkpoint in {os.fspath(self.folder)} cannot be read: {error}") from error
        self._named = {server, *names.values()}.union(*(_files_of(path) for path in self._older()))
        self._clean()
        return Checkpoint(round_, state, clients, notes)

    def _clean(self) -> None:
        """Remove what a killed run left behind: files that the manifest does not name."""
        for path in self.folder.glob("*") if self.folder.is_dir() else ():
            if path.name not in {self.MANIFEST, *self._named, *(one.name for one in self._older())}:
                path.unlink()


def _round_of(manifest: Path) -> int:
    """The round of a manifest, -1 if it cannot be read."""
    try:
        return int(json.loads(manifest.read_text())["round"])
    except (OSError, KeyError, ValueError, TypeError):
        return -1


def _files_of(manifest: Path) -> set[str]:
    """The files that a manifest names; none if it cannot be read."""
    try:
        notes = json.loads(manifest.read_text())
        names = {str(notes["server"]), *map(str, notes["clients"].values())}
        _refuse_paths(names)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return set()
    return names


def _refuse_paths(names: Iterable[str]) -> None:
    """A manifest names files beside it: those of another folder must be neither read nor removed."""
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"it names {name}, which is not a file beside it")
