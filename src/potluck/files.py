"""Files of a run: written whole or not at all, never through a link, and known by their SHA-256."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from potluck.errors import ConfigError, RunError

T = TypeVar("T")
R = TypeVar("R")
WANDB_LOG = "wandb/*/logs/debug-core.log"


FULL = (errno.ENOSPC, errno.EDQUOT)  # what the system says of a disk, or of a user's part of it
WRITING = "make room on the disk, or choose a folder you may write to"
UNFINISHED = ".unfinished"  # how the names of files end that are being written
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_whole(path: Path, data: bytes, inner: bool = False) -> None:
    """Write a file through a temporary one, so that it is complete even if the machine stops.

    `inner`: its folder is one inside a run's, and no link (see `held`).
    """
    try:
        with held(path.parent) if inner else contextlib.nullcontext(path.parent) as place:
            temporary, handle = _begun(place, path.name)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(place / path.name)  # while it is locked
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except IsADirectoryError as error:
        raise RunError(f"cannot write {path}: there is a folder of that name; move it away") from error
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; {WRITING}") from error


def write_anew(path: Path, data: bytes) -> None:
    """Write a file as `write_whole` does, and remove what calls that were killed have left of it."""
    clear_unfinished(path.parent.resolve(), f"{glob.escape(path.name)}.*")
    write_whole(path, data)


def _begun(place: Path, name: str) -> tuple[Path, int]:
    """A new file to write into. It is locked as long as it is open, so that nobody takes it for a left one."""
    while True:
        temporary = place / f".{name}.{secrets.token_hex(4)}{UNFINISHED}"
        handle = os.open(temporary, NEW, 0o666)  # less what the user's umask takes away
        if _is_ours(handle) is not False and os.fstat(handle).st_nlink:
            return temporary, handle
        os.close(handle)  # somebody who clears up was faster
        temporary.unlink(missing_ok=True)


def _is_ours(handle: int) -> bool | None:
    """Whether no other process has a file locked; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove(path: Path) -> None:
    """Remove a file in a folder inside a run's, if it is there."""
    try:
        with held(path.parent) as place:
            (place / path.name).unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"cannot remove {path}: {error.strerror or error}; check its rights") from error


def clear_unfinished(folder: Path, names: str = "*") -> None:
    """Remove what killed processes were writing into a folder; what a living one writes is locked, and stays."""
    with contextlib.suppress(OSError, RunError), held(folder) as place:
        for path in place.glob(f".{names}{UNFINISHED}"):
            with contextlib.suppress(OSError), opened(path, os.O_RDONLY) as handle:
                if _is_ours(handle):
                    path.unlink()


def check_writable(path: Path, remedy: str = "choose another place") -> None:
    """Refuse a place where `write_whole` could not make a file, before there is anything to write."""
    if not path.parent.exists():
        raise RunError(f"cannot write {path}: there is no folder {path.parent}; make it first, or {remedy}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def in_home(path: Path | str) -> Path:
    """A path with the home folder in place of `~`; a `~` or `~name` for which there is none is refused."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # nobody of that name, or a user without a home
        raise ConfigError(
            f"{path}: {Path(path).parts[0]} stands for no home folder here; write the whole path"
        ) from error


def make_folders(path: Path, exist_ok: bool = False) -> None:
    """Make a folder with all folders above it; more levels than Python can make are an `OSError` as well."""
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except RecursionError as error:
        raise OSError(errno.ENAMETOOLONG, "its path has too many levels") from error


def check_name(folder: Path) -> None:
    """Refuse a folder whose path is no text: reports name it, and not every library can open files in it."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"the path {str(folder.absolute())!r} is not text in UTF-8; rename the folder, or choose another one"
        ) from error


# --- reading --------------------------------------------------------------------------------------------

SETTINGS = 16 << 20  # bytes; far more than settings, a status or a list of checksums has
LARGEST_JSON = 1 << 30  # bytes; a split of a hundred million rows has that many
DEEPEST = 100  # levels of a JSON file, or of folders in a run
_PIECE = 1 << 20  # bytes
MOST_BLOCKS = 20_000_000  # lists and mappings in a JSON file: a million clients have a few of them each
MOST_VALUES = 120_000_000  # values in one: the rows of the largest split


def read_bounded(path: Path, most: int = SETTINGS, follow: bool = True) -> bytes:
    """All of a plain file; an `OSError` says so if it has more than `most` bytes, or is a pipe or a device.

    A long file of which hardly anything is on the disk is refused as well: see `refuse_holes`.
    """
    with opened(path, os.O_RDONLY, follow) as handle:
        size, content = os.fstat(handle).st_size, b""
        if size <= most:
            refuse_holes(handle, path)
        with os.fdopen(os.dup(handle), "rb") as file:
            if size <= most:
                content = file.read(size + 1)
                size = len(content)
            while size <= most and (more := file.read(_PIECE)):  # it has grown since
                content += more
                size = len(content)
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def check_values(content: bytes) -> None:
    """Raise a `ValueError` for JSON that would take far more memory than any file of a run: lists in lists do."""
    if content.count(b"[") + content.count(b"{") > MOST_BLOCKS or content.count(b",") > MOST_VALUES:
        raise ValueError("it has more values than any file of a run")


def check_plain(path: Path) -> None:
    """Raise an `OSError` for what is no plain file: to read a pipe or a device may never end."""
    with opened(path, os.O_RDONLY, follow=True):
        pass


def read_given(path: Path, what: str) -> str:
    """Read a text file that a user names, such as an "experiment file"; an error is one sentence."""
    try:
        return read_bounded(path).decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {what} {path}; check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder; name the {what} in it") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; check its rights") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not an {what}: it is not text in UTF-8; save it as such") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(
    path: Path, remedy: str = "put a whole copy of it back", most: int = LARGEST_JSON, follow: bool = True
) -> Any:
    """Read a JSON file of a run; `remedy` is what to do about one that cannot be read."""
    try:
        content = read_bounded(path, most, follow)
        check_values(content)
        text = content.decode("utf-8")
        value = json.loads(text)
        if not is_shallow(value):
            raise ValueError("it is nested too deeply")
        if "\\ud" in text or "\\uD" in text:
            json.dumps(
                value, ensure_ascii=False
            ).encode()  # half a letter is no text, and nothing can show it
        return value
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is missing: {path.parent} is not a run folder, or files of it are missing; {remedy}"
        ) from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error
    except RecursionError as error:
        raise RunError(f"{path} cannot be read: it is nested too deeply; {remedy}") from error
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}; {remedy}") from error


def is_shallow(value: Any) -> bool:
    """Whether a value has few levels, so that functions that call themselves can walk through it."""
    level = [value]
    for _ in range(DEEPEST + 1):
        blocks = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        level = [inner for one in blocks for inner in one if isinstance(inner, dict | list)]
    return not level


# --- checksums ------------------------------------------------------------------------------------------

_READERS = 4  # threads that compute checksums
CHECKSUM = "sha256"  # the key of a JSON file's own checksum
_BLOCK = 512  # bytes, in which the system counts what is on the disk
_MOST_HOLES = 1 << 26  # bytes that a file may have whatever is on the disk of it
_THINNEST = 64  # bytes of a longer file for each on the disk: some file systems keep no zeros


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with its own checksum, whole or not at all."""
    write_json(path, with_checksum(value))


def read_checked(
    path: Path, remedy: str = "put a whole copy of it back, or start a new run", follow: bool = True
) -> dict[str, Any]:
    """Read a JSON file that has its own checksum; one that was changed or cut since is refused."""
    try:
        return without_checksum(read_json(path, remedy, follow=follow))
    except ValueError as error:
        raise RunError(f"{path} {error}; {remedy}") from error


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of JSON values, with its checksum."""
    return {**value, CHECKSUM: _checksum(value)}


def without_checksum(value: Any) -> dict[str, Any]:
    """The mapping that `with_checksum` was given; a `ValueError` says so if it is another one."""
    found = dict(value) if isinstance(value, dict) else {}
    if found.pop(CHECKSUM, None) != _checksum(found):
        raise ValueError("is not as potluck wrote it: its checksum is another")
    return found


def _checksum(value: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(value))  # as it is read again: all keys are texts
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sha256(path: Path, sync: bool = False, stop: threading.Event | None = None) -> str:
    """The SHA-256 of a file; `sync` makes sure that it is on the disk first, not only in the system's cache.

    `stop` ends it with an `InterruptedError`: a file may have a terabyte. One that only claims so is refused.
    """
    with opened(path, os.O_RDONLY) as handle:
        if sync:
            os.fsync(handle)
        else:
            refuse_holes(handle, path)
        found, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
        with os.fdopen(os.dup(handle), "rb", buffering=0) as file:
            while length := file.readinto(buffer):
                if stop is not None and stop.is_set():
                    raise InterruptedError
                found.update(buffer[:length])
        return found.hexdigest()


def refuse_holes(handle: int, path: Path) -> None:
    """Raise an `OSError` for a long file of which hardly anything is on the disk.

    To read the zeros in its holes takes as long as if they were there, and it costs nothing to make one.
    """
    found = os.fstat(handle)
    on_disk = _BLOCK * found.st_blocks
    if found.st_size <= _MOST_HOLES or found.st_size <= _THINNEST * on_disk:
        return
    if os.lseek(handle, 0, os.SEEK_HOLE) < found.st_size:  # not every file system says what is on the disk
        os.lseek(handle, 0, os.SEEK_SET)
        raise OSError(
            errno.EFBIG, f"it has {found.st_size:,} bytes, of which {on_disk:,} are on the disk", str(path)
        )
    os.lseek(handle, 0, os.SEEK_SET)


def size_of(path: Path) -> int:
    """The bytes of a plain file; a long one of which hardly anything is on the disk is refused."""
    with opened(path, os.O_RDONLY) as handle:
        refuse_holes(handle, path)
        return os.fstat(handle).st_size


def by_readers(work: Callable[[T, threading.Event], R], each: Iterable[T]) -> Generator[R, None, None]:
    """What a function finds in each of some files, in order; a few threads work on them.

    They are told to stop when nobody wants more of it, as after Ctrl-C.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checksums") as pool:
        try:
            yield from pool.map(lambda one: work(one, stop), each)
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def sync_folder(path: Path) -> None:
    """Make sure that the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- links ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, flags: int, follow: bool = False, mode: int = 0o666) -> Iterator[int]:
    """Open a plain file; a link is not followed unless told, and what is no file (a pipe, a device) is refused.

    A file that is written to must have one name only: under a second one it may be somebody's file elsewhere. One
    that is made has the `mode`, less what the user's umask takes away.
    """
    links = 0 if follow else os.O_NOFOLLOW
    try:
        handle = os.open(path, flags | links | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if links and error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from error
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise OSError(0, "it is no plain file", str(path)) from error
        raise
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it is no plain file", str(path))
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise OSError(0, "it has a second name elsewhere (a hard link); put a copy here", str(path))
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """A folder inside a run's, held open: the path to it that this gives leads nowhere else, whoever renames it.

    A link in its place is refused. Where the system has no such path (it is in Linux's /proc), it is the usual one.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if folder.is_symlink():
            raise RunError(f"{folder} is a link, which is not followed; put a folder there") from error
        raise
    by_handle = Path(f"/proc/self/fd/{handle}")
    try:
        yield by_handle if by_handle.is_dir() else folder
    except OSError as error:
        for named in ("filename", "filename2"):
            if isinstance(found := getattr(error, named), str) and Path(found).is_relative_to(by_handle):
                setattr(error, named, str(folder / Path(found).relative_to(by_handle)))
        raise
    finally:
        os.close(handle)


def refuse_links(folder: Path) -> None:
    """Refuse a folder in which a link leads elsewhere, or which holds something that is neither file nor folder.

    Links to places inside the folder stay: some trackers make them. So does the one link that W&B makes to a log
    of its own in the user's cache; it is never opened again.
    """
    home = folder.resolve()
    try:
        for path in _found(home):
            _check_place(path, home, folder)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be searched for links: {error.strerror or error}; check its rights"
        ) from error


def _check_place(path: Path, home: Path, folder: Path) -> None:
    """Refuse one thing in a folder, `home`, which the user calls `folder`."""
    mode, name = path.lstat().st_mode, path.relative_to(home)
    if len(name.parts) > DEEPEST:  # functions that call themselves could not remove it
        raise RunError(
            f"{folder}: {name.parts[0]} has folders in folders, more than {DEEPEST} deep; move it away"
        )
    if stat.S_ISLNK(mode):
        if not name.match(WANDB_LOG) and not _stays_in(path, home):
            raise RunError(
                f"{folder}: {name} is a link to another place, which is neither read nor written into; put it "
                "here instead"
            )
    elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise RunError(f"{folder / name} is neither a file nor a folder; remove it")


def _stays_in(link: Path, home: Path) -> bool:
    """Whether a link leads to a place in a folder; one that leads in a circle does not."""
    try:
        return link.resolve().is_relative_to(home)
    except RuntimeError:  # what Python says of a circle
        return False


def _found(home: Path) -> Iterator[Path]:
    """Everything in a folder and below; links are not entered."""
    places = [home]
    while places:
        with os.scandir(places.pop()) as entries:
            for entry in entries:
                yield Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    places.append(Path(entry.path))
