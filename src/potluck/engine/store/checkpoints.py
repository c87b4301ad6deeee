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
    that, files that none of the manifests that are kept names are removed. Each of the last `keep` is there also
    as `checkpoint-<round>.json`.
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
        content = json.dumps(manifest).encode()
        if self.keep > 1:
            write_whole(self._path(round_), content)
        write_whole(self.folder / self.MANIFEST, content)
        self._drop([one for one in self.rounds() if one > round_ or one in self.rounds()[: -self.keep]])

    def _drop(self, rounds: Iterable[int]) -> None:
        """Remove the manifests of some rounds, and all files that no other one names."""
        for round_ in rounds:
            self._path(round_).unlink(missing_ok=True)
        kept = [self.folder / self.MANIFEST, *map(self._path, self.rounds())]
        named = set[str]().union(*map(_files_of, kept))
        for name in self._named - named:
            (self.folder / name).unlink(missing_ok=True)
        self._named = named

    def rounds(self) -> tuple[int, ...]:
        """The rounds whose checkpoints are there, ascending."""
        names = (path.stem.partition("-")[2] for path in self.folder.glob("checkpoint-*.json"))
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    def _path(self, round_: int) -> Path:
        return self.folder / f"checkpoint-{round_:06d}.json"

    def go_back(self, round_: int) -> None:
        """Make the checkpoint of an earlier round, which was loaded, the newest; later ones are removed."""
        write_whole(self.folder / self.MANIFEST, self._path(round_).read_bytes())
        self._drop([one for one in self.rounds() if one > round_])

    def load(self, round_: int | None = None) -> Checkpoint | None:
        """Load the newest checkpoint, None if there is none yet, or that of an earlier round.

        Files that no checkpoint names are removed.
        """
        manifest = self.folder / self.MANIFEST if round_ is None else self._path(round_)
        if not manifest.exists():
            if round_ is not None:
                raise RunError(f"{os.fspath(self.folder)} has no checkpoint of round {round_}")
            self._clean()
            return None
        try:
            notes = json.loads(manifest.read_text())
            found, server, names = notes.pop("round"), notes.pop("server"), notes.pop("clients")
            _refuse_paths([server, *names.values()])
            clients = {client: check(self.folder / name) for client, name in names.items()}
            state = dict(safetensors.torch.load_file(self.folder / server))
        except (OSError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise RunError(f"the checkpoint in {os.fspath(self.folder)} cannot be read: {error}") from error
        kept = [self.folder / self.MANIFEST, *map(self._path, self.rounds())]
        self._named = {server, *names.values()}.union(*map(_files_of, kept))
        self._clean()
        return Checkpoint(found, state, clients, notes)

    def _clean(self) -> None:
        """Remove what a killed run left behind: files that the manifest does not name."""
        for path in self.folder.glob("*") if self.folder.is_dir() else ():
            manifests = {self.MANIFEST, *(self._path(round_).name for round_ in self.rounds())}
            if path.name not in manifests | self._named:
                path.unlink()


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
