"""`potluck join`: runs a worker and a SuperNode, and restarts either when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.deploy.announcements import Listener
from potluck.deploy.flower.certificates import OutOfTime, check_server, dates_told
from potluck.deploy.flower.connections import Security, free_port, split_address
from potluck.deploy.flower.processes import PULSE, Process, require_files, require_flower, start_supernode
from potluck.deploy.flower.watching import (
    PAUSE,
    Connection,
    DiskWatch,
    NodeWatch,
    OtherHalf,
    Watched,
    WorkerWatch,
    takes_calls,
)
from potluck.deploy.logs import VARIABLE, Log
from potluck.deploy.node_keys import check_node_key
from potluck.deploy.record_files import own_folder, stays
from potluck.deploy.site_status import SiteStatus, read_orders
from potluck.engine import frames
from potluck.errors import ConfigError
from potluck.live.prometheus import exposed
from potluck.live.snapshot import Follower
from potluck.live.status_file import about_here, kept

Notice = Callable[..., None]  # a sentence, and perhaps facts of it by name
HALVES = ("", "worker", "node")
KNOWN_NOISE = (
    "--simulated takes private noise from the experiment's seed, which the server knows: it protects nothing; "
    "leave it out but for tests"
)
LOCK = ".join.lock"  # in a home, held while a `join` is at work there


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
    prometheus: int | None = None  # a port of this machine on which the site's state is told
    log: str = "text"  # or json

    def check(self) -> None:
        """Refuse options that cannot work, before a process starts."""
        if self.only not in HALVES:
            raise ConfigError(f"--only: {self.only!r} is no half of a site; give worker or node")
        if self.only and self.socket is None:
            raise ConfigError("--only needs --socket; give the path at which worker and node meet")
        if self.socket is not None:
            frames.check_path(self.socket)
        if self.only != "worker":
            require_flower()
            split_address(self.server)
            self.security.check(self.server, ("ca",))
        if self.only != "node" and not (self.model and self.data):
            raise ConfigError("--model and --data are missing; give FILE.py:FUNCTION for each")
        own = [
            Path(word.rpartition(":")[0]) for word in (self.model, self.data, *self.metrics) if ".py:" in word
        ]
        require_files(*own, self.accept, self.security.ca, self.security.node_key)
        if self.only != "worker" and self.security.node_key is not None:
            check_node_key(self.security.node_key)

    def worker_words(self, socket_path: Path, first: bool = False) -> list[str]:
        """The command line of the worker; the `first` one tries the site's data and model before it answers."""
        words = [sys.executable, "-P", "-m", "potluck.deploy.flower.worker", "--client", self.client]
        words += ["--model", self.model, "--data", self.data, "--home", str(self.home)]
        words += ["--socket", str(socket_path), "--device", self.device]
        words += ["--accept", str(self.accept)] if self.accept is not None else []
        words += [word for metric in self.metrics for word in ("--metric", metric)]
        words += ["--shared"] if self.only == "worker" else []
        words += ["--try-first"] if first else []
        return words + (["--simulated"] if self.simulated else [])


def join(joining: Joining) -> None:
    """Take part until interrupted; what happens is told on standard error, with the time."""
    joining.check()
    home = own_folder(joining.home)
    check_home(home)
    status = SiteStatus(joining.client, joining.server, home, home / "flower" / PULSE, joining.only)
    with alone(home), stays(home) as check_place:
        status.pulse.unlink(missing_ok=True)  # that of an earlier node
        with (
            exposed(joining.prometheus, Follower(home, facts=lambda: status.facts() | about_here(home)).look),
            kept(home, status.facts),
        ):
            try:
                _take_part(joining, _notice(joining, status), check_place)
            finally:
                status.ended = True


def _notice(joining: Joining, status: SiteStatus) -> Notice:
    """Tell a sentence to the log, with the round that the worker is in, and keep it in the status.

    A sentence that comes with facts of its own says of which round it is.
    """
    log = Log(joining.log == "json")

    def tell(sentence: str, **facts: Any) -> None:
        status.say(sentence)
        if facts:
            log(sentence, client=joining.client, **facts)
            return
        round_ = _round_now(joining.home, status.started)
        where = "" if round_ is None or log.as_json else f"round {round_}: "
        log(f"{where}{sentence}", client=joining.client, round=round_)

    return tell


def _round_now(home: Path, started: float) -> int | None:
    """The round that the worker is in; none before its first order since this `join` began, and after a run."""
    orders = read_orders(home)
    if orders.get("over") or (orders.get("ordered") or 0.0) < started:
        return None
    return orders.get("round")


def check_home(home: Path) -> None:
    """Refuse a home in which a link leads elsewhere, or a pipe would keep us waiting."""
    for folder in (home, home / "flower"):
        for path in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
            kind = path.lstat().st_mode
            leads_out = stat.S_ISLNK(kind) and not path.resolve().is_relative_to(home.resolve())
            if leads_out or stat.S_ISFIFO(kind):
                what = "a link to another place" if leads_out else "a pipe"
                raise ConfigError(f"{path} is {what}; a site keeps its files in its own folder: move it away")


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold a home, so that a second `join` does not end the processes of the first as leftovers."""
    lock = home / LOCK
    try:
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {lock}: {error.strerror}; choose another --home") from error
    with os.fdopen(handle, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another potluck join is at work in {home}; end it first, or give this one a --home of its own"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock {lock}: {error.strerror}; choose a --home on a file system with locks"
            ) from error
        yield


def _take_part(joining: Joining, notice: Notice, check_place: Callable[[], None] = lambda: None) -> None:
    if joining.only != "worker":
        _look_at_server(joining, notice)
    if joining.simulated:
        notice(KNOWN_NOISE)
    flower = joining.home / "flower"
    flower.mkdir(exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        path = joining.socket or stack.enter_context(frames.meeting_folder()) / "worker"
        starts = itertools.count()

        def worker() -> Process:
            check_place()  # one that starts in another folder would make a secret of its own there
            if joining.socket is None:
                make_meeting_place(path.parent)
            log, note = joining.home / "worker.log", joining.home / "worker.pid"
            unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1", VARIABLE: joining.log}
            words = joining.worker_words(path, first=next(starts) == 0)
            return Process(words, log, unbuffered, piped=True, name="the worker", note=note)

        def supernode() -> Process:
            check_place()
            return start_supernode(joining.server, joining.security, flower, path, free_port())

        watched: list[Watched] = []
        said = Listener(joining.home)
        notice(f"client {joining.client}: logs are in {joining.home}")
        if joining.only != "node":
            watched.append(_watch(worker, stack))
            watched[-1].stalled = WorkerWatch(path).stalled
            _await_worker(watched[-1], path, notice)
            _pass_on(said, notice)
        if joining.only != "worker":
            node = NodeWatch(flower, joining.server)
            watched.append(_watch(supernode, stack))
            watched[-1].reason, watched[-1].stalled = node.reason, node.stalled
            watched[-1].hushed = node.hushed
        connection = Connection(flower / PULSE, joining.server)
        room = DiskWatch(joining.home, check_place=check_place)
        half = OtherHalf(path)
        where = f"takes part at {joining.server}" if joining.only != "worker" else f"waits at {path}"
        notice(f"client {joining.client} {where}; Ctrl-C ends it")
        while True:
            time.sleep(PAUSE)
            for one in watched:
                one.look(notice)
            connection.look(notice)
            room.look(notice)
            if joining.only == "node":
                half.look(notice)
            _pass_on(said, notice)


def _look_at_server(joining: Joining, notice: Notice) -> None:
    """Refuse a server that this site cannot speak to, and tell of one that it may speak to later."""
    for sentence in dates_told(joining.security):
        notice(sentence)
    try:
        if not check_server(joining.server, joining.security):
            notice(f"nobody answers at {joining.server} yet: it is tried until the server is there")
    except OutOfTime as error:
        notice(f"{error}; it is tried again")


def _await_worker(worker: Watched, path: Path, notice: Notice) -> None:
    """Wait until the worker has tried its data and model, and takes orders; raises what it cannot start with."""
    while not takes_calls(path):
        time.sleep(PAUSE)
        worker.look(notice)
    worker.works = True


def _pass_on(said: Listener, notice: Notice) -> None:
    for sentence, facts in said.new():
        notice(sentence, **facts)


def make_meeting_place(folder: Path) -> None:
    """Make the folder of the socket anew where a cleaner of temporary files took it; nobody else's will do."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ConfigError(f"{folder} is not this user's alone; move it away, or give a --socket elsewhere")


def _watch(start: Callable[[], Process], stack: contextlib.ExitStack) -> Watched:
    watched = Watched(start, start(), time.monotonic())
    stack.callback(lambda: watched.process.end())
    return watched


def default_home(client: str, only: str = "") -> Path:
    """Where a client keeps its records by default; a node on its own has another home than its worker."""
    return Path("sites") / (f"{client}-node" if only == "node" else client)
