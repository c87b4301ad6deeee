"""`potluck join`: runs a worker and a SuperNode, and restarts either when it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from potluck.deploy.flower.connections import Security, check_server, free_port, split_address
from potluck.deploy.flower.processes import Process, require_files, require_flower, start_supernode
from potluck.errors import ConfigError

BAD_INPUT = 2  # exit code of a worker whose input is bad: starting it again would not help
HALVES = ("", "worker", "node")
PAUSE = 1.0  # seconds between two checks
LONGEST = 30.0  # seconds between two starts of a process that keeps ending


@dataclass(frozen=True)
class Joining:
    """The options of `potluck join`."""

    server: str
    client: str
    model: str
    data: str
    home: Path
    security: Security
    accept: Path | None = None
    device: str = "cpu"
    simulated: bool = False
    only: str = ""  # `worker` or `node`: start this half alone, the other runs as another user
    socket: Path | None = None  # between worker and node; default: a temporary one
    metrics: tuple[str, ...] = ()  # functions of this site's own

    def check(self) -> None:
        """Refuse options that cannot work, before a process starts."""
        if self.only not in HALVES:
            raise ConfigError(f"--only: {self.only!r} is neither worker nor node")
        if self.only and self.socket is None:
            raise ConfigError("--only needs --socket: where worker and node meet")
        if self.only != "worker":
            require_flower()
            split_address(self.server)
            self.security.check(self.server, ("ca",))
        if self.only != "node" and not (self.model and self.data):
            raise ConfigError("--model and --data are missing: what does this client bring?")
        own = [
            Path(word.rpartition(":")[0]) for word in (self.model, self.data, *self.metrics) if ".py:" in word
        ]
        require_files(*own, self.accept, self.security.ca, self.security.node_key)

    def worker_words(self, socket_path: Path) -> list[str]:
        """The command line of the worker."""
        words = [sys.executable, "-m", "potluck.deploy.flower.worker", "--client", self.client]
        words += ["--model", self.model, "--data", self.data, "--home", str(self.home)]
        words += ["--socket", str(socket_path), "--device", self.device]
        words += ["--accept", str(self.accept)] if self.accept is not None else []
        words += [word for metric in self.metrics for word in ("--metric", metric)]
        words += ["--shared"] if self.only == "worker" else []
        return words + (["--simulated"] if self.simulated else [])


@dataclass
class Watched:
    """A process that is restarted when it ends, with growing pauses."""

    start: Callable[[], Process]
    process: Process
    since: float
    pause: float = PAUSE

    def look(self, notice: Callable[[str], None]) -> None:
        """Restart the process if it has ended; the pause doubles each time it ends soon."""
        if self.process.alive:
            return
        lived = time.monotonic() - self.since
        self.pause = PAUSE if lived > LONGEST else min(2 * self.pause, LONGEST)
        if self.process.popen.returncode == BAD_INPUT:
            raise ConfigError(self.process.tail().removeprefix("error: "))
        self.process.end()  # its own children may have outlived it
        notice(f"{self.process.name} ended ({self.process.tail()}); it is started again")
        time.sleep(self.pause)
        self.process, self.since = self.start(), time.monotonic()


def join(joining: Joining, notice: Callable[[str], None]) -> None:
    """Take part until interrupted."""
    joining.check()
    if joining.only != "worker":
        check_server(joining.server, joining.security)
    joining.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    flower, port = joining.home / "flower", free_port()
    flower.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        path = (
            joining.socket
            or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-"))) / "worker"
        )
        words = joining.worker_words(path)

        def worker() -> Process:
            log = joining.home / "worker.log"
            return Process(words, log, {**os.environ, "PYTHONUNBUFFERED": "1"}, piped=True)

        def supernode() -> Process:
            return start_supernode(joining.server, joining.security, flower, path, port)

        halves = {"worker": worker, "node": supernode}
        watched = [_watch(start, stack) for half, start in halves.items() if joining.only in ("", half)]
        notice(f"client {joining.client}: logs are in {joining.home}")
        where = f"takes part at {joining.server}" if joining.only != "worker" else f"waits at {path}"
        notice(f"client {joining.client} {where}; Ctrl-C ends it")
        while True:
            time.sleep(PAUSE)
            for one in watched:
                one.look(notice)


def _watch(start: Callable[[], Process], stack: contextlib.ExitStack) -> Watched:
    watched = Watched(start, start(), time.monotonic())
    stack.callback(lambda: watched.process.end())
    return watched


def default_home(client: str) -> Path:
    """Where a client keeps its records by default."""
    return Path("sites") / client
