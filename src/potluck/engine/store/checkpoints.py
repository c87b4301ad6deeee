"""Checkpoints: one manifest file names all the files that hold a run, so that it changes atomically.

The last three are kept, each as `checkpoint-<round>.json`; states that did not change between them are the same
files. `checkpoint.json` is a copy of the newest, written after it: a process that is killed in between leaves an
older copy or none, and the newest whose files are whole counts.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import safetensors.torch

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.core.tensor_files import shapes, tensors
from potluck.engine.store.manifest import Manifest
from potluck.engine.store.state_files import on_host
from potluck.errors import RunError, first_line
from potluck.files import by_readers, held, remove, sha256, sync_folder, write_whole

KEPT = 3  # checkpoints that stay
_READERS = 4  # threads that compute checksums
_OURS = re.compile(
    r"\.?(checkpoint(-[0-9]+)?\.json|(server|clients)-[0-9]+\.safetensors)(\..*)?"
)  # with a point in front while it is written
_MANIFEST = re.compile(r"checkpoint-([0-9]{6,12})\.json")


class DamagedCheckpoint(RunError):
    """A checkpoint whose files are not what was written; `rounds` are those of the others that are there."""

    def __init__(self, sentence: str, rounds: tuple[int, ...]) -> None:
        super().__init__(sentence)
        self.rounds = rounds


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round; all states stay in their files until they are asked for."""

    round: int
    server_file: Path
    clients: Mapping[ClientId, Path]
    notes: Mapping[str, Any]

    @property
    def server(self) -> State:
        """The server's state, read anew each time."""
        return dict(tensors(self.server_file))


class Checkpoints:
    """The checkpoint folder of a run, written incrementally and in the background.

    The store writes the clients' files. The manifest is written when everything it names is on disk; after
    that, files that none of the last three manifests names are removed.
    """

    MANIFEST = "checkpoint.json"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[int, Manifest] = {}  # by round, the newest last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    # --- writing ---

    def save(
        self,
        round_: int,
        server: State,
        clients: Mapping[ClientId, Future[Path]],
        notes: Mapping[str, Any],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Start writing a checkpoint in the background, after an earlier one has ended.

        `before` is called there too: what it does has happened before the checkpoint counts.
        """
        self.wait()
        self._pending = self._pool.submit(self._write, round_, server, clients, notes, before)

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
        before: Callable[[], None],
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        server_file, content = f"server-{round_:06d}.safetensors", safetensors.torch.save(on_host(server))
        write_whole(self.folder / server_file, content, inner=True)
        known = {name: found for one in self._kept.values() for name, found in one.files.items()}
        with ThreadPoolExecutor(_READERS, thread_name_prefix="checksums") as pool:
            summed = list(pool.map(lambda saved: _summed(saved.result(), known), clients.values()))
        names = {client: path.name for client, (path, _) in zip(clients, summed, strict=True)}
        files = {server_file: (hashlib.sha256(content).hexdigest(), len(content))}
        files |= {path.name: found for path, found in summed}
        before()
        sums = {name: found for name, (found, _) in files.items()}
        sizes = {name: size for name, (_, size) in files.items()}
        self._put_first(Manifest(round_, server_file, names, sums, sizes, notes))

    def _put_first(self, manifest: Manifest) -> None:
        """Make a manifest the newest; later ones and those before the last three go, with their files."""
        content, before = manifest.to_bytes(), self._files()
        sync_folder(self.folder)  # the names of all its files, before a manifest says that they are there
        write_whole(self._path(manifest.round), content, inner=True)
        write_whole(self.folder / self.MANIFEST, content, inner=True)
        sync_folder(self.folder)
        others = [one for round_, one in self._kept.items() if round_ < manifest.round]
        self._kept = {one.round: one for one in [*others, manifest][-KEPT:]}
        for name in sorted(before - self._files()):  # manifests first, then what they name
            remove(self.folder / name)

    # --- reading ---

    def rounds(self) -> tuple[int, ...]:
        """The rounds whose checkpoints are there, ascending; their files are checked when one is loaded."""
        self.wait()
        return tuple(self._readable())

    def notes(self, round_: int) -> Mapping[str, Any]:
        """The notes of a checkpoint."""
        return self._readable()[round_].notes

    def load(self, round_: int | None = None) -> Checkpoint | None:
        """Load the newest checkpoint, None if there is none yet, or that of an earlier round.

        Every file is compared with its checksum, and what no checkpoint names is removed. After an earlier round
        was loaded, `go_back` makes it the newest.
        """
        self.wait()
        readable = self._readable()
        if round_ is not None and round_ not in readable:
            there = ", ".join(map(str, readable)) or "none"
            raise RunError(
                f"{os.fspath(self.folder)} has no checkpoint of round {round_}; choose from: {there}"
            )
        manifest = readable[round_] if round_ is not None else self._newest(readable)
        if manifest is None:
            if damaged := self._manifests():  # nothing writes now, so they are damaged and not new
                raise DamagedCheckpoint(
                    f"no checkpoint in {os.fspath(self.folder)} can be read, {damaged[-1].name} among them",
                    (),
                )
            self._clean()
            return None
        others = tuple(one for one in readable if one != manifest.round)
        try:
            self._check(manifest)
            shapes(self.folder / manifest.server)
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(_sentence(self.folder, manifest.round, error), others) from error
        self._kept = readable | {manifest.round: manifest}
        if round_ is None:
            last = sorted(one for one in self._kept if one <= manifest.round)[-KEPT:]
            self._kept = {one: self._kept[one] for one in last}
        self._refuse_others()
        self._clean()
        clients = {client: self.folder / name for client, name in manifest.clients.items()}
        return Checkpoint(manifest.round, self.folder / manifest.server, clients, manifest.notes)

    def go_back(self, round_: int) -> None:
        """Make the checkpoint of an earlier round the newest; later ones are removed.

        Their manifests go first: until `checkpoint.json` is replaced, the run stands where it stood.
        """
        for later in (one for one in self._kept if one > round_):
            remove(self._path(later))
        self._put_first(self._kept[round_])

    def clear(self) -> None:
        """Remove all checkpoints: the manifests first, the newest last, so that a run stands at one of them."""
        self.wait()
        for path in (*self._manifests(), self.folder / self.MANIFEST):
            remove(path)
        self._kept = {}
        self._clean()

    def newest_round(self) -> int:
        """The round that `load` goes back to, 0 if there is no checkpoint yet."""
        newest = self._newest(self._readable())
        return 0 if newest is None else newest.round

    def _newest(self, readable: Mapping[int, Manifest]) -> Manifest | None:
        """The newest manifest: that of `checkpoint.json`, or a later one whose files are whole."""
        path = self.folder / self.MANIFEST
        copied = self._copied(path, readable) if path.exists() else None
        for manifest in reversed([*readable.values()]):
            if (copied is None or manifest.round > copied.round) and self._is_whole(manifest):
                return manifest
        if copied is None and readable:
            raise DamagedCheckpoint(f"{path} is missing", ())
        return copied

    def _manifests(self) -> list[Path]:
        """All files that are named like a manifest, whole or not, the newest last."""
        if self.folder.is_symlink():  # refused by whoever writes or removes something there
            return []
        named = (path for path in self.folder.glob("checkpoint-*.json") if _MANIFEST.fullmatch(path.name))
        return sorted(named, key=lambda path: int(path.stem.rpartition("-")[2]))

    def _is_whole(self, manifest: Manifest) -> bool:
        try:
            self._check(manifest)
        except (OSError, ValueError):
            return False
        return True

    def _copied(self, path: Path, readable: Mapping[int, Manifest]) -> Manifest:
        try:
            return Manifest.read(path)
        except (OSError, ValueError) as error:
            sentence = (
                f"the checkpoint in {os.fspath(self.folder)} cannot be read: {path.name}: {first_line(error)}"
            )
            raise DamagedCheckpoint(sentence, tuple(readable)) from error

    def _readable(self) -> dict[int, Manifest]:
        """The manifests that are whole, by round."""
        found: dict[int, Manifest] = {}
        for path in self.folder.glob("checkpoint-*.json"):
            match = _MANIFEST.fullmatch(path.name)
            try:
                manifest = Manifest.read(path)
            except (OSError, ValueError):
                continue
            if match and int(match[1]) == manifest.round:
                found[manifest.round] = manifest
        return dict(sorted(found.items()))

    def _check(self, manifest: Manifest) -> None:
        """Compare every file with its size and its checksum; one of another size is not read."""

        def damage(name: str, stop: Event) -> str | None:
            path, noted = self.folder / name, manifest.sizes.get(name)
            if noted is not None and (size := path.lstat().st_size) != noted:
                return f"{name} is damaged: it has {size:,} bytes, and {noted:,} were written"
            if sha256(path, stop=stop) != manifest.sha256[name]:
                return f"{name} is damaged: its SHA-256 is not the one that was noted"
            return None

        with closing(by_readers(damage, sorted(manifest.names))) as found:
            for sentence in found:
                if sentence is not None:
                    raise ValueError(sentence)

    def _refuse_others(self) -> None:
        """Refuse a folder, or a pipe, in place of a file of an earlier checkpoint, which a save will remove."""
        for path in sorted(self.folder / name for name in self._files()):
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise RunError(
                    f"{path} is no file, and an earlier checkpoint has one of that name; move it out of the way"
                )

    def _path(self, round_: int) -> Path:
        return self.folder / f"checkpoint-{round_:06d}.json"

    def _files(self) -> set[str]:
        """The names of all files of the checkpoints that are kept."""
        manifests = {self._path(round_).name for round_ in self._kept}
        return manifests.union(*(one.names for one in self._kept.values()))

    def _clean(self) -> None:
        """Remove what no checkpoint names: what a killed run left behind. Files of other names are not ours."""
        needed = {self.MANIFEST} | self._files()
        try:
            with held(self.folder) as place:
                for path in place.iterdir():
                    if _OURS.fullmatch(path.name) and path.name not in needed and not path.is_dir():
                        path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            named = Path(error.filename or "").name
            raise RunError(
                f"{self.folder / named} cannot be removed: {error.strerror or error}; check its rights"
            ) from error


def _summed(path: Path, known: Mapping[str, tuple[str, int | None]]) -> tuple[Path, tuple[str, int]]:
    """A file that is on the disk, with its checksum and its size."""
    found, size = known.get(path.name, (None, None))
    return path, (found or sha256(path, sync=True), path.stat().st_size if size is None else size)


def _sentence(folder: Path, round_: int, error: Exception) -> str:
    """What is wrong with a checkpoint, by the name of the file."""
    what = first_line(error)
    if isinstance(error, OSError) and error.filename:
        lost = isinstance(error, FileNotFoundError)
        what = f"{Path(error.filename).name}{' is missing' if lost else f': {error.strerror}'}"
    return f"the checkpoint of round {round_} in {os.fspath(folder)} cannot be read: {what}"
