"""The status of a process in a small file: a run and a server keep it in their run folder, a site in its home.

The file is written whole every few seconds. It is no record: it may be deleted, and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from potluck.core.plain_values import printable
from potluck.errors import RunError
from potluck.files import SETTINGS, read_json
from potluck.live.board import ClientStatus
from potluck.version import __version__

FILES = {"run": "status.json", "server": "status.json", "site": "site-status.json"}  # a folder may have both
EVERY = 5.0  # seconds between two writings
LARGEST = 1e18  # any number in a status


def about_here(folder: Path) -> dict[str, Any]:
    """What is true of this process and machine: versions, memory, room on the disk."""
    return {
        "potluck": __version__,
        "flower": _version("flwr"),
        "pid": os.getpid(),
        "memory": memory_here(),
        "disk_free": shutil.disk_usage(folder).free,
        "updated": time.time(),
    }


def memory_here() -> dict[str, int]:
    """Bytes that this process has: in the machine's memory and, where torch uses GPUs, on those."""
    found = {}
    with contextlib.suppress(OSError):  # only Linux has this file
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["process"] = pages * resource.getpagesize()
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        found["gpu"] = sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))
    return found


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_status(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the status of a server or a site into its folder."""
    write_small(folder / FILES[facts["kind"]], {**facts, **about_here(folder)})


def write_small(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file that is whole at any time; it is renewed often, so it need not outlive a power cut."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(unfinished, flags, 0o644), "w") as file:
        file.write(json.dumps(facts))
    unfinished.replace(path)


@contextlib.contextmanager
def kept(
    folder: Path, facts: Callable[[], Mapping[str, Any]], every: float = EVERY
) -> Iterator[Callable[[], None]]:
    """Keep the status of a process in its folder while the block runs; gives what writes it at once.

    A full disk does not disturb the work.
    """
    ended, alone = threading.Event(), threading.Lock()

    def write() -> None:
        with alone, contextlib.suppress(OSError, RuntimeError):  # a mapping may change while it is read
            write_status(folder, facts())

    def renew() -> None:
        while not ended.wait(every):
            write()

    thread = threading.Thread(target=renew, name="status", daemon=True)
    write()
    thread.start()
    try:
        yield write
    finally:
        ended.set()
        thread.join()
        write()


def read_status(folder: Path) -> dict[str, Any]:
    """The status in a folder, the one renewed last; empty if there is none."""
    path = status_file(folder)
    if path is None:
        return {}
    found = read_json(path, "remove it", most=SETTINGS, follow=False)
    if not isinstance(found, dict) or found.get("kind") not in [*FORMS]:
        raise RunError(f"{path} was not written by potluck; remove it")
    _refuse_beyond(path, found)
    try:
        facts = FORMS[found["kind"]].model_validate(found).model_dump()
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise RunError(
            f"{path} was not written by this version of potluck: see its {place!r}; remove it"
        ) from error
    _refuse_beyond(path, facts)  # a number may be written as a text
    return dict(_shown(facts))


class _Facts(BaseModel, extra="allow"):
    """What every status says; later versions may say more."""

    kind: str
    potluck: str
    flower: str | None = None
    pid: int
    memory: dict[str, int] = {}
    disk_free: float
    updated: float
    started: float
    state: str = "running"
    notice: str = ""
    noticed: float | None = None
    sent: int = 0
    received: int = 0


class _RunFacts(_Facts):
    run: str = ""
    name: str
    method: str
    why: str = ""
    round: int
    rounds: int
    clients: dict[str, ClientStatus]
    strangers: dict[str, str] = {}
    notices: list[tuple[float, str]] = []


class _SiteFacts(_Facts):
    client: str
    half: Literal["both", "worker", "node"]
    server: str = ""
    taken_in: float | None = None
    pulled: float | None = None
    trouble: str = ""
    run: str = ""
    round: int | None = None
    order: str = ""
    ordered: float | None = None
    orders: dict[str, int] = {}  # none before the first
    refused: str = ""
    refused_at: float | None = None


FORMS: dict[str, type[_Facts]] = {"run": _RunFacts, "server": _RunFacts, "site": _SiteFacts}


def status_file(folder: Path) -> Path | None:
    """The file with the status of a folder's process; of two the one renewed last."""
    there = [path for name in {*FILES.values()} if os.path.lexists(path := folder / name)]
    return max(there, key=lambda path: path.lstat().st_mtime, default=None)


def _refuse_beyond(path: Path, values: Any) -> None:
    if not is_finite(values):
        raise RunError(
            f"{path} was not written by potluck: it has a number beyond all that are measured; remove it"
        )


def is_finite(value: Any) -> bool:
    """Whether no number in a value is infinite, undefined, or too large to be counted with."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) < LARGEST


def _shown(value: Any) -> Any:
    """What a file says, safe to print on a terminal."""
    if isinstance(value, dict):
        return {printable(str(name)): _shown(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value
