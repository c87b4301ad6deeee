"""Child processes: Flower's SuperLink and SuperNode, and how any of ours is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from potluck.core.plain_values import printable
from potluck.deploy import guard
from potluck.deploy.flower.connections import Security, is_loopback, is_open, split_address
from potluck.errors import ConfigError, RunError
from potluck.files import read_json, write_json

STARTING = "POTLUCK_FLOWER_START"  # in the environment: the seconds that Flower's processes have to start
GRACE = 10.0  # seconds a process has to end by itself
LOOK_BACK = 1 << 16  # bytes of a log in which an error is looked for
PULSE = "pulse.json"  # what a SuperNode notes of its calls
LOOPBACK = ("localhost", "127.0.0.1", "::1")
# For a program that speaks with a SuperLink alone, which we reach.
DIRECT = {"no_proxy": "*", "NO_PROXY": "*"}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FLOWER_ERROR = re.compile(r"^ERROR\s*:\s*(.+(?:\n.+)*)", re.MULTILINE)  # up to the next empty line


def _start_seconds() -> float:
    """What the environment allows, else two minutes."""
    told = os.environ.get(STARTING, "120")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(told)) <= 86400:
            return seconds
    raise ConfigError(f"{STARTING} is {told!r}: give it seconds, such as 600")


START = _start_seconds()
TOO_SLOW = f"not within {START:g} s: the machine is busy; run it again, with {STARTING}=600 for more time"


def installed(package: str) -> bool:
    """Whether a package is installed; a folder of that name, such as Ray leaves in /tmp, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_flower() -> None:
    """Refuse to go on where Flower is not installed."""
    if not installed("flwr"):
        raise ConfigError("this needs Flower; install it with: pip install 'potluck[flower]'")


def require_files(*paths: Path | None) -> None:
    """Refuse files that do not exist, and what is no file."""
    missing = next((path for path in paths if path is not None and not path.is_file()), None)
    if missing is None:
        return
    if missing.exists():
        raise ConfigError(f"{missing} is {'a folder' if missing.is_dir() else 'no plain file'}; name a file")
    raise ConfigError(f"there is no file {missing}; check the path")


def environment(home: Path, address: str = "") -> dict[str, str]:
    """Environment variables for Flower's processes: no telemetry, no update check, no installation at run time.

    Their calls within this machine go through no proxy, those to an `address` of it included.
    """
    home.mkdir(parents=True, exist_ok=True)
    quiet = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    return {**os.environ, **quiet, **_past_proxies(address)}


def _past_proxies(address: str) -> dict[str, str]:
    """The variables that name the hosts to call directly: what they say, and this machine."""
    told = next((found for name in DIRECT if (found := os.environ.get(name))), "")
    named = [name.strip().strip("[]") for name in told.split(",")]  # Flower's client refuses brackets
    if "*" in named:
        return DIRECT
    hosts = [*named, *LOOPBACK, split_address(address)[0] if address and is_loopback(address) else ""]
    return dict.fromkeys(DIRECT, ",".join(dict.fromkeys(filter(None, hosts))))


class Process:
    """A child process with all that it starts in turn, and its output in a log file.

    It ends with this process, however that ends: a guard beside it watches a pipe. With `note`, a file, a child
    that outlived even that is found and ended before a new one starts.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        piped: bool = False,
        name: str = "",
        note: Path | None = None,
    ) -> None:
        self.name, self.log = name or Path(words[0]).name, log
        if note is not None:
            end_stale(note)
        watched, self._held = os.pipe()
        try:
            with open_log(log) as file:
                self._begins = file.seek(0, os.SEEK_END)
                self.popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, str(watched), *words],
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    pass_fds=[watched],
                )
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(watched)
        if note is not None:
            with contextlib.suppress(RunError, OSError):  # on a full disk: it works, and its guard ends it
                write_json(note, {"pid": self.popen.pid, "started": _started(self.popen.pid)})

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.popen.poll() is None

    def tail(self) -> str:
        """The last error in the format of Flower's log, else the last line of the output; safe to print."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begins = self._begins if self._begins <= size else 0  # it was cut since
                file.seek(max(begins, size - LOOK_BACK))
                said = COLOURS.sub("", file.read().decode(errors="replace"))
        except OSError as error:
            return f"its log {self.log} cannot be read: {error.strerror or error}"
        errors = FLOWER_ERROR.findall(said)
        lines = [errors[-1] if errors else line for line in said.splitlines() if line.strip()]
        return printable(lines[-1]) if lines else "it wrote nothing"

    def wait(self) -> None:
        """Give the process time to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE)

    def end(self) -> None:
        """End the process and all that it started: first with SIGTERM, then with SIGKILL."""
        _end_group(self.popen.pid, self.wait)
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def open_log(path: Path) -> BinaryIO:
    """Open a log to add to it; a link, a pipe or the like is refused, as it leads elsewhere or keeps us waiting."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, flags, 0o644)
    except OSError as error:
        raise ConfigError(f"the log {path} cannot be written: {error.strerror}; move it away") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ConfigError(f"the log {path} is no file; move it away")
    return os.fdopen(handle, "ab")


def _end_group(pid: int, wait: Callable[[], None]) -> None:
    """End a process group; one that is stopped (SIGSTOP) does not hear SIGTERM before it is continued."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
            os.killpg(pid, signal.SIGCONT)
        wait()


def end_stale(note: Path) -> None:
    """End the process that a note names, left behind by a parent that is gone; a stranger with its number stays."""
    try:
        about = read_json(note)
        pid, started = int(about["pid"]), str(about["started"])
    except (RunError, KeyError, TypeError, ValueError):
        return
    if started and pid > 1 and _started(pid) == started and _is_ours(pid, note.parent):
        _end_group(pid, lambda: _await_end(pid, started))


def _is_ours(pid: int, home: Path) -> bool:
    """Whether a process is a guard whose command names this folder: a note in it may be forged, or copied."""
    words = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return guard.__file__ in said and str(home) in said


def _await_end(pid: int, started: str) -> None:
    end = time.monotonic() + GRACE
    while time.monotonic() < end and _started(pid) == started:
        time.sleep(0.1)


def _started(pid: int) -> str:
    """When a process started, which tells it from a later one with its number; empty if there is none."""
    words = ["ps", "-o", "lstart=,stat=", "-p", str(pid)]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    return "" if not said or said[-1].startswith("Z") else " ".join(said[:-1])


def program(name: str) -> str:
    """The path of one of Flower's programs; the one beside this Python comes first."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"Flower's {name} is not there; install it with: pip install 'potluck[flower]'")
    return found


def start_superlink(address: str, security: Security, home: Path, database: Path | None = None) -> Process:
    """Start a SuperLink and wait until it listens; with a database it knows its nodes again after a restart."""
    host, port = split_address(address)
    words = [program("flower-superlink"), "--host", host, "--port", str(port)]
    words += ["--disable-runtime-dependency-installation"]
    words += ["--database", str(database)] if database is not None else []
    if security.plain:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(security.ca), "--ssl-certfile", str(security.certificate)]
        words += ["--ssl-keyfile", str(security.key)]
    words += ["--enable-supernode-auth"] if security.node_keys else []
    log, note = home / "superlink.log", home / "superlink.pid"
    process = Process(words, log, environment(home) | DIRECT, name="the SuperLink", note=note)
    end = time.monotonic() + START
    while not is_open(address):
        late = time.monotonic() > end
        if not process.alive or late:
            process.end()
            why = TOO_SLOW if late else process.tail()
            raise RunError(f"the SuperLink does not start: {why}; see {process.log}")
        time.sleep(0.1)
    return process


def start_supernode(address: str, security: Security, home: Path, socket_path: Path, port: int) -> Process:
    """Start a SuperNode that hands orders to the worker at a socket; it ends when it no longer pulls."""
    words = [sys.executable, "-P", "-m", "potluck.deploy.flower.node", str(home / PULSE)]
    words += ["--superlink", address, "--port", str(port), "--node-config", f'socket="{socket_path}"']
    words += ["--insecure"] if security.plain else ["--root-certificates", str(security.ca)]
    if security.node_key is not None:
        words += ["--auth-supernode-private-key", str(security.node_key)]
    (home / PULSE).unlink(missing_ok=True)  # that of an earlier one
    log, note = home / "supernode.log", home / "supernode.pid"
    return Process(words, log, environment(home, address), name="the SuperNode", note=note)
