"""Child processes: Flower's SuperLink and SuperNode, and how any of ours is started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from potluck.deploy.flower.connections import Security, is_open, split_address
from potluck.deploy.printable import printable
from potluck.errors import ConfigError, RunError

START = 120.0  # seconds Flower's processes have to start
GRACE = 10.0  # seconds a process has to end by itself
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FLOWER_ERROR = re.compile(r"^ERROR\s*:\s*(.+(?:\n.+)*)", re.MULTILINE)  # up to the next empty line


def installed(package: str) -> bool:
    """Whether a package is installed; a folder of that name, such as Ray leaves in /tmp, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_flower() -> None:
    """Refuse to go on where Flower is not installed."""
    if not installed("flwr"):
        raise ConfigError("this needs Flower; install it with: pip install 'potluck[flower]'")


def require_files(*paths: Path | None) -> None:
    """Refuse files that do not exist."""
    missing = next((path for path in paths if path is not None and not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"there is no file {missing}")


def environment(home: Path) -> dict[str, str]:
    """Environment variables for Flower's processes: no telemetry, no update check, no installation at run time."""
    home.mkdir(parents=True, exist_ok=True)
    quiet = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    return {**os.environ, **quiet}


class Process:
    """A child process with all that it starts in turn, and its output in a log file."""

    def __init__(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str], piped: bool = False
    ) -> None:
        self.name, self.log = Path(words[0]).name, log
        with log.open("ab") as file:
            self._begins = file.tell()
            self.popen = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.popen.poll() is None

    def tail(self) -> str:
        """The last error in the format of Flower's log, else the last line of the output."""
        said = COLOURS.sub("", self.log.read_bytes()[self._begins :].decode(errors="replace"))
        errors = FLOWER_ERROR.findall(said)
        lines = [errors[-1] if errors else line for line in said.splitlines() if line.strip()]
        return printable(lines[-1]) if lines else "it wrote nothing"

    def wait(self) -> None:
        """Give the process time to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE)

    def end(self) -> None:
        """End the process and all that it started: first with SIGTERM, then with SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)
            self.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


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
    process = Process(words, home / "superlink.log", environment(home))
    end = time.monotonic() + START
    while not is_open(address):
        if not process.alive or time.monotonic() > end:
            process.end()
            raise RunError(f"the SuperLink does not start: {process.tail()} (see {process.log})")
        time.sleep(0.1)
    return process


def start_supernode(address: str, security: Security, home: Path, socket_path: Path, port: int) -> Process:
    """Start a SuperNode that hands orders to the worker at a socket."""
    words = [program("flower-supernode"), "--superlink", address, "--port", str(port)]
    words += ["--node-config", f'socket="{socket_path}"']
    words += ["--insecure"] if security.plain else ["--root-certificates", str(security.ca)]
    if security.node_key is not None:
        words += ["--auth-supernode-private-key", str(security.node_key)]
    return Process(words, home / "supernode.log", environment(home))
