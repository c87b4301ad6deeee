"""Flower's processes: SuperLink, SuperNode, and the run that gives `potluck serve` a Grid to speak over."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from potluck.engine import frames
from potluck.engine.frames import Letter, Node
from potluck.errors import ConfigError, RunError
from potluck.version import __version__

NAME = "potluck"
START = 120.0  # seconds Flower's processes have to start
SLACK = 60.0  # seconds beyond an exchange's deadline after which the relay is given up
GRACE = 10.0  # seconds a process has to end by itself
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FLOWER_ERROR = re.compile(r"^ERROR\s*:\s*(.+(?:\n.+)*)", re.MULTILINE)  # up to the next empty line
APP = f"""\
[project]
name = "potluck-relay"
version = "{__version__}"
dependencies = []

[tool.flwr.app]
publisher = "potluck"

[tool.flwr.app.components]
serverapp = "potluck.deploy.flower.apps:server"
clientapp = "potluck.deploy.flower.apps:client"

[tool.flwr.app.config]
socket = ""
"""


@dataclass(frozen=True)
class Security:
    """How a connection is kept: certificates beyond this machine, plain text only where it is asked for."""

    insecure: bool = False
    ca: Path | None = None  # certificate of the authority that signed the server's
    certificate: Path | None = None  # the server's own, and its key
    key: Path | None = None
    node_key: Path | None = None  # a node's private key
    node_keys: bool = False  # the server takes in only nodes whose key was registered
    client_keys: Path | None = None  # a folder with the public key of every client

    def check(self, address: str, needed: Sequence[str]) -> None:
        """Refuse plain text beyond this machine, and options that are named in part."""
        given = [name for name in needed if getattr(self, name) is not None]
        if self.insecure and given:
            raise ConfigError(f"--insecure and --{given[0].replace('_', '-')} do not go together; choose one")
        if given and len(given) < len(needed):
            missing = next(name for name in needed if name not in given)
            raise ConfigError(f"--{missing.replace('_', '-')} is missing; TLS needs it beside --{given[0]}")
        if not given and not self.insecure and not is_loopback(address):
            wanted = ", ".join(f"--{name.replace('_', '-')}" for name in needed)
            raise ConfigError(
                f"{address} is beyond this machine: give {wanted}, or --insecure to send everything in plain text"
            )

    @property
    def plain(self) -> bool:
        """No TLS."""
        return self.ca is None


def is_loopback(address: str) -> bool:
    """Whether an address stays within this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host and port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no address; write host:port, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def from_here(address: str) -> str:
    """The address of a server that listens everywhere, as this machine reaches it."""
    host, port = split_address(address)
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "::") else address


def free_port() -> int:
    """A port of this machine nobody listens on now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def is_open(address: str) -> bool:
    """Whether somebody listens there."""
    host, port = split_address(from_here(address))
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def check_server(address: str, security: Security) -> None:
    """Refuse a server that speaks otherwise than this site, or that it cannot trust; an absent one may come yet."""
    host, port = split_address(address)
    trust = ssl.create_default_context(cafile=security.ca)
    if security.plain:
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), GRACE) as channel:
            trust.wrap_socket(channel, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        told = f"the certificate of {address} is not to be trusted: {error.verify_message}"
        raise ConfigError(f"{told}; is {security.ca} of its authority?") from error
    except ssl.SSLError as error:
        if not security.plain:
            raise ConfigError(f"{address} does not speak TLS, this site asks for it with --ca") from error
        return
    except OSError:
        return
    if security.plain:
        raise ConfigError(f"{address} speaks TLS, this site would speak in plain text; give --ca")


def installed(package: str) -> bool:
    """Whether a package is there; a mere folder of its name, such as the one Ray leaves in /tmp, is not it."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_flower() -> None:
    """One sentence where the extra is not installed."""
    if not installed("flwr"):
        raise ConfigError("this needs Flower; install it with: pip install 'potluck[flower]'")


def require_files(*paths: Path | None) -> None:
    """One sentence about a file that was named and is not there."""
    missing = next((path for path in paths if path is not None and not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"there is no file {missing}")


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: nothing calls home, nothing is installed while it runs."""
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
    """A child process and all it starts, with its output in a file."""

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
        """Whether it runs."""
        return self.popen.poll() is None

    def tail(self) -> str:
        """What it said in the end: its last error of Flower's kind, else its last line."""
        said = COLOURS.sub("", self.log.read_bytes()[self._begins :].decode(errors="replace"))
        errors = FLOWER_ERROR.findall(said)
        lines = [errors[-1] if errors else line for line in said.splitlines() if line.strip()]
        return " ".join(lines[-1].split()) if lines else "it wrote nothing"

    def wait(self) -> None:
        """Give it time to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(GRACE)

    def end(self) -> None:
        """End it and what it started: politely, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)
            self.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


def program(name: str) -> str:
    """One of Flower's programs, the one beside this Python first."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"Flower's {name} is not there; install it with: pip install 'potluck[flower]'")
    return found


def start_superlink(address: str, security: Security, home: Path) -> Process:
    """A SuperLink that listens when this returns."""
    host, port = split_address(address)
    words = [program("flower-superlink"), "--host", host, "--port", str(port)]
    words += ["--disable-runtime-dependency-installation"]
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
    """A SuperNode that hands orders to the worker at a socket."""
    words = [program("flower-supernode"), "--superlink", address, "--port", str(port)]
    words += ["--node-config", f'socket="{socket_path}"']
    words += ["--insecure"] if security.plain else ["--root-certificates", str(security.ca)]
    if security.node_key is not None:
        words += ["--auth-supernode-private-key", str(security.node_key)]
    return Process(words, home / "supernode.log", environment(home))


class Relay:
    """Flower's ServerApp, as `potluck serve` speaks to it: a courier."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._keys: dict[Node, str] = {}

    def nodes(self) -> list[Node]:
        """Who is there now."""
        note, _ = self._ask({"ask": "nodes"}, (), SLACK, 0)
        self._keys = {int(node): str(key) for node, key in zip(note["nodes"], note["keys"], strict=True)}
        return list(self._keys)

    def keys(self) -> Mapping[Node, str]:
        """The keys of those who were there when `nodes` was asked last: the SuperLink has checked them."""
        return self._keys

    def exchange(self, letters: Sequence[Letter], timeout: float, most: Sequence[int]) -> list[bytes | str]:
        """The answer to every letter, in order; a sentence where none came in time, or one that is too large."""
        to = [node for node, _ in letters]
        note = {"ask": "exchange", "to": to, "timeout": timeout, "most": list(most)}
        told, answers = self._ask(note, [data for _, data in letters], timeout + SLACK, sum(most))
        return [failure or answer for failure, answer in zip(told["failures"], answers, strict=True)]

    def _ask(
        self, note: Mapping[str, Any], pieces: Sequence[bytes], timeout: float, most: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        self._channel.settimeout(timeout)
        try:
            frames.send(self._channel, note, pieces)
            return frames.receive(self._channel, most)
        except (EOFError, OSError, frames.TooLarge) as error:
            raise RunError(f"the connection to Flower is lost ({error}); the same command goes on") from error


@contextlib.contextmanager
def relaying(address: str, security: Security, home: Path, notice: Callable[[str], None]) -> Iterator[Relay]:
    """A courier over the SuperLink at an address, which is started if nobody listens there."""
    require_flower()
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        _name_superlink(address, security, home)
        if is_open(address):
            notice(f"a SuperLink is at {address} already: it is used, and left running")
        else:
            stack.callback(start_superlink(address, security, home).end)
            _register(security, home)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-")))
        door = stack.enter_context(frames.listening(folder / "serve"))
        log = _submit(home, folder / "serve")
        door.settimeout(START)
        try:
            channel, _ = door.accept()
        except OSError as error:
            raise RunError(f"Flower does not start the server's relay (see {log.parent})") from error
        stack.callback(channel.close)
        yield Relay(channel)


def _name_superlink(address: str, security: Security, home: Path) -> None:
    """Write down where Flower's commands find the SuperLink."""
    trust = "insecure = true"
    if security.ca is not None:
        trust = f'root-certificates = "{security.ca.resolve()}"'
    (home / "config.toml").write_text(f'[superlink.{NAME}]\naddress = "{from_here(address)}"\n{trust}\n')


def _register(security: Security, home: Path) -> None:
    """Make the clients' keys known to a SuperLink that has just been started."""
    if security.client_keys is None or not security.node_keys:
        return
    for key in sorted(security.client_keys.glob("*.pub")):
        _command(["supernode", "register", str(key), NAME], home / "keys.log", f"the key {key}", home)


def _submit(home: Path, path: Path) -> Path:
    """Have Flower start the relay."""
    app, log = home / "potluck-relay", home / "run.log"
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(APP)
    _command(["run", str(app), NAME, "--run-config", f'socket="{path}"'], log, "the run", home)
    return log


def _command(words: Sequence[str], log: Path, what: str, home: Path) -> None:
    """One of Flower's commands, which takes something; one sentence if it does not."""
    process = Process([program("flwr"), *words], log, environment(home))
    try:
        process.popen.wait(START)
    except subprocess.TimeoutExpired:
        process.end()
    if process.popen.returncode != 0:
        raise RunError(f"Flower does not take {what}: {process.tail()} (see {log})")
