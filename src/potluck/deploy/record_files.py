"""The files of a record: written whole, read back only if their checksum is right; links are not followed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch

from potluck.core.packed import State
from potluck.core.tensor_files import tensors_in
from potluck.engine.store.state_files import on_host
from potluck.errors import RunError
from potluck.files import LARGEST_JSON, SETTINGS, UNFINISHED, read_bounded, sync_folder, write_whole

LARGEST_STATE = 1 << 40  # bytes; a state is as large as the site's own model
FORMAT = 2  # version of the manifest
NAME = re.compile(r"\d{8}-[0-9a-f]{64}\.(safetensors|answer)")  # number and checksum of a file
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems say that synchronise no folders


def own_folder(path: Path) -> Path:
    """Make a folder for its owner alone, or take the one that is there; a link is refused."""
    refuse_link(path)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {path}: {error.strerror or error}; choose another --home"
        ) from error
    return path


def refuse_link(path: Path) -> None:
    """Refuse a link in the place of a folder."""
    if path.is_symlink():
        raise RunError(f"{path} is a link, which is not followed; put the folder itself there")


@contextlib.contextmanager
def stays(folder: Path) -> Iterator[Callable[[], None]]:
    """While the block runs: a check that raises where a folder was moved or removed, or another is in its place.

    A handle on it is held, so that no file system gives its number to another one.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check() -> None:
        try:
            if os.path.samestat(folder.stat(), os.fstat(handle)):
                return
            raise OSError(errno.ESTALE, "it is another folder")
        except OSError as error:
            raise RunError(
                f"the folder {folder} was moved or removed while it was in use; put it back in its place, or end "
                "what works in it and start that again with --home where it is now"
            ) from OSError(errno.ESTALE, error.strerror)

    try:
        yield check
    finally:
        os.close(handle)


def keep_names(folder: Path) -> None:
    """Have the names of the files in a folder on the disk: a power cut would undo a rename that is not.

    A file system that synchronises no folders keeps them in its own way.
    """
    try:
        sync_folder(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise RunError(
                f"cannot write into {folder}: {error.strerror or error}; make room, or check the disk"
            ) from error


def read_own(path: Path, most: int = SETTINGS) -> bytes:
    """The bytes of a plain file of at most `most`; a link, or anything else that is no file, is refused."""
    try:
        return read_bounded(path, most, follow=False)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; check its rights") from error


def write_own(path: Path, data: bytes) -> None:
    """Write a file that nobody else can read, whole or not at all; it never is readable in between.

    It is on the disk when this returns, its name too.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        unfinished.unlink(missing_ok=True)
        with os.fdopen(os.open(unfinished, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; make room, or check its rights"
        ) from error
    keep_names(path.parent)


class RecordFiles:
    """The folder of a record: numbered files, and a manifest that names those that count.

    A file's name is its number and its checksum, so that the manifest holds the checksums of all files. The folder
    is made with the first file: a run that a site does not join leaves none.
    """

    def __init__(self, folder: Path, manifest: str) -> None:
        refuse_link(folder)
        self.folder, self.manifest = folder, manifest
        self._number = 0

    def write_state(self, state: State) -> str:
        """Write a state; the file's name."""
        return self._write(safetensors.torch.save(on_host(state)), "safetensors")

    def write_answer(self, data: bytes) -> str:
        """Write an answer; the file's name."""
        return self._write(data, "answer")

    def _write(self, data: bytes, suffix: str) -> str:
        self._number += 1
        name = f"{self._number:08d}-{hashlib.sha256(data).hexdigest()}.{suffix}"
        self._make_folder()
        write_whole(self.folder / name, data)
        return name

    def _make_folder(self) -> None:
        if not self.folder.is_dir() or self.folder.is_symlink():
            keep_names(own_folder(self.folder).parent)

    def read(self, name: str) -> bytes:
        """The bytes of a file, if they are those that were written."""
        path = self.folder / name
        data = read_own(path, LARGEST_STATE)
        if hashlib.sha256(data).hexdigest() != Path(name).stem.partition("-")[2]:
            raise RunError(
                f"{path} is damaged: its bytes are not those that were written; bring back the folder "
                f"{self.folder} from a copy, or start a new run"
            )
        return data

    def read_state(self, name: str) -> State:
        """The state in a file."""
        data = self.read(name)
        try:
            return tensors_in(data)[0]
        except ValueError as error:
            raise RunError(
                f"the client state in {self.folder / name} cannot be read ({error}); "
                "bring the folder back from a copy"
            ) from error

    def write_manifest(self, values: dict[str, Any]) -> None:
        """Write the manifest, with its own checksum; it is on the disk when this returns, all names too."""
        text = json.dumps(values)
        whole = {"format": FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest(), "record": text}
        self._make_folder()
        write_whole(self.folder / self.manifest, json.dumps(whole).encode())
        keep_names(self.folder)

    def read_manifest(self) -> dict[str, Any] | None:
        """What the manifest says, None if there is none yet.

        It comes before all other files: were a lost one taken for a new record, private noise would be drawn again.
        """
        path = self.folder / self.manifest
        if not path.exists() and not path.is_symlink():
            if any(NAME.fullmatch(one.name) for one in self._there()):
                raise RunError(
                    f"{path} is missing, and other files of the record are there; bring it back from a copy, or "
                    "ask the server for a new run"
                )
            return None
        try:
            whole = json.loads(read_own(path, LARGEST_JSON))
            text = str(whole["record"])
            if whole["format"] != FORMAT or hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
                raise ValueError("it is not as it was written")
            return dict(json.loads(text))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RunError(
                f"the record in {self.folder} cannot be read ({path}: {error}); bring the folder back from a copy"
            ) from error

    def clean(self, named: Collection[str]) -> None:
        """Remove files of earlier exchanges and half-written ones; of a link the link alone.

        One that cannot be removed now is removed another time: it counts for nothing.
        """
        for path in self._there():
            if path.name != self.manifest and path.name not in named and not _is_folder(path):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _there(self) -> list[Path]:
        return [*self.folder.iterdir()] if self.folder.is_dir() else []

    def count_from(self, named: Collection[str]) -> None:
        """Give new files higher numbers than those that are named; a name that is none of ours is refused."""
        other = next((name for name in named if not NAME.fullmatch(name)), None)
        if other is not None:
            raise RunError(
                f"the record in {self.folder} names {other!r}, which is no file beside it; "
                "bring the folder back from a copy"
            )
        self._number = max((int(name.partition("-")[0]) for name in named), default=0)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
