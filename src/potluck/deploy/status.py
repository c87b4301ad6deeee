"""Where a federation stands: facts gathered as it goes, kept in a file for `potluck status` and for Prometheus.

The server keeps them in its run folder, a site in its home folder. Neither Flower nor torch is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from potluck.core.plain_values import printable
from potluck.errors import RunError
from potluck.files import SETTINGS, read_json
from potluck.version import __version__

FILES = {"server": "status.json", "site": "site-status.json"}  # a folder may have seen both
EVERY = 5.0  # seconds between two writings
STALE = 30.0  # seconds without a writing after which the process is taken to be gone
LARGEST = 1e18  # any number in a status
REMEMBERED = 100  # nodes that were refused


@dataclass
class ClientStatus:
    """What the server knows of one client; times are seconds since 1970."""

    connected: bool = False
    since: float | None = None  # it was taken in, or seen again after it had gone
    replied: float | None = None  # its last answer that could be used
    refused: str = ""  # why its last one was not, or why it was not taken in
    refused_at: float | None = None
    refusals: int = 0
    excluded: bool = False


@dataclass
class Board:
    """The facts of a server; its engine and its run write on it."""

    run: str = ""
    name: str = ""
    method: str = ""
    state: str = "waiting"  # for clients; then playing, finished or stopped
    round: int = 0
    rounds: int = 0
    started: float = field(default_factory=time.time)
    clients: dict[str, ClientStatus] = field(default_factory=dict)
    strangers: dict[str, str] = field(default_factory=dict)  # nodes that were not taken in, and why
    sent: int = 0
    received: int = 0
    notice: str = ""
    noticed: float | None = None
    clock: Callable[[], float] = field(default=time.time, repr=False)

    def client(self, name: str) -> ClientStatus:
        """The entry of a client."""
        return self.clients.setdefault(name, ClientStatus())

    def seen(self, present: Collection[str]) -> None:
        """Note who is connected now."""
        for name in present:
            self.client(name)
        for name, entry in self.clients.items():
            if (name in present) != entry.connected:
                entry.connected = name in present
                entry.since = self.clock() if entry.connected else entry.since

    def replied(self, name: str) -> None:
        """Note an answer that could be used."""
        self.client(name).replied = self.clock()

    def refused(self, name: str, reason: str) -> None:
        """Note an answer that could not be used, or that none came."""
        entry = self.client(name)
        entry.refused, entry.refused_at = _reason(name, reason), self.clock()
        entry.refusals += 1

    def dropped(self, name: str, reason: str) -> None:
        """Note that a client dropped out of a round, unless that is noted already."""
        entry = self.client(name)
        if entry.refused != _reason(name, reason):
            self.refused(name, reason)

    def say(self, sentence: str) -> None:
        """Keep the last thing that was said."""
        self.notice, self.noticed = printable(sentence), self.clock()

    def stranger(self, node: str, reason: str) -> None:
        """Note a node that was not taken in."""
        if len(self.strangers) >= REMEMBERED:
            self.strangers.pop(next(iter(self.strangers)))
        self.strangers[node] = printable(reason)

    def facts(self) -> dict[str, Any]:
        """All of it as plain values."""
        known = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "clock"}
        known["clients"] = {name: asdict(entry) for name, entry in [*self.clients.items()]}
        return {"kind": "server", **known, "strangers": dict(self.strangers)}


def _reason(name: str, reason: str) -> str:
    return printable(reason.removeprefix(f"client {name}: "))


def about_here(folder: Path) -> dict[str, Any]:
    """What is true of this process and machine: versions, room on the disk."""
    return {
        "potluck": __version__,
        "flower": _version("flwr"),
        "pid": os.getpid(),
        "disk_free": shutil.disk_usage(folder).free,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_status(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the status of a server or a site into its folder."""
    write_small(folder / FILES[facts["kind"]], {**facts, **about_here(folder), "updated": time.time()})


def write_small(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file that is whole at any time; it is renewed often, so it need not outlive a power cut."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(unfinished, flags, 0o644), "w") as file:
        json.dump(facts, file, indent=1)
    unfinished.replace(path)


@contextlib.contextmanager
def kept(folder: Path, facts: Callable[[], Mapping[str, Any]], every: float = EVERY) -> Iterator[None]:
    """Keep the status of a process in its folder while the block runs; a full disk does not disturb the work."""
    ended = threading.Event()

    def write() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a mapping changed while it was read
            write_status(folder, facts())

    def renew() -> None:
        while not ended.wait(every):
            write()

    thread = threading.Thread(target=renew, name="status", daemon=True)
    write()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write()


def read_status(folder: Path, now: float | None = None) -> dict[str, Any]:
    """The status in a folder, the one renewed last, with `alive`: whether its process still renews it."""
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}")
    path = status_file(folder)
    found = read_json(path, most=SETTINGS, follow=False)
    if not isinstance(found, dict) or found.get("kind") not in [*FORMS]:
        raise RunError(f"{path} was not written by potluck")
    if not _is_finite(found):
        raise RunError(f"{path} was not written by potluck: it has a number beyond all that are measured")
    try:
        known = FORMS[found["kind"]].model_validate(found).model_dump()
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise RunError(f"{path} was not written by this version of potluck: see its {place!r}") from error
    age = (time.time() if now is None else now) - known["updated"]
    ended = known["state"] in ("finished", "stopped")
    return {**_shown(known), "alive": not ended and age < STALE, "age": round(age, 1)}


class _Facts(BaseModel, extra="allow"):
    """What every status says."""

    kind: str
    potluck: str
    flower: str | None = None
    pid: int
    disk_free: float
    updated: float
    started: float
    state: str = "running"
    notice: str = ""
    noticed: float | None = None
    sent: int = 0
    received: int = 0


class _ServerFacts(_Facts):
    name: str
    method: str
    round: int
    rounds: int
    clients: dict[str, ClientStatus]
    strangers: dict[str, str] = {}


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


FORMS: dict[str, type[_Facts]] = {"server": _ServerFacts, "site": _SiteFacts}


def status_file(folder: Path) -> Path:
    """The file with the status of a folder's process; of two the one renewed last."""
    there = [path for name in FILES.values() if (path := folder / name).is_file()]
    if not there:
        names = " and no ".join(FILES.values())
        raise RunError(
            f"{folder} has no {names}: it is neither the run folder of potluck serve nor the home of potluck join"
        )
    return max(there, key=lambda path: path.stat().st_mtime)


def _is_finite(value: Any) -> bool:
    """Whether no number in a value is infinite, undefined, or too large to be counted with."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) < LARGEST


def _shown(value: Any) -> Any:
    """What a file says, safe to print on a terminal."""
    if isinstance(value, dict):
        return {printable(str(name)): _shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value
