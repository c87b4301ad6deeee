"""The way from `potluck serve` to the nodes: a run on a SuperLink whose app relays our letters.

The other end of the relay is `server` in `apps`, which Flower starts.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.deploy.flower.connections import Security, from_here, is_open
from potluck.deploy.flower.processes import (
    START,
    Process,
    environment,
    program,
    require_flower,
    start_superlink,
)
from potluck.engine import frames
from potluck.engine.frames import Letter, Node
from potluck.errors import RunError
from potluck.version import __version__

NAME = "potluck"  # of the SuperLink in Flower's configuration
SLACK = 60.0  # seconds beyond an exchange's deadline after which the relay is given up
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


class Relay:
    """A courier that sends letters to nodes through the ServerApp that Flower runs."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._keys: dict[Node, str] = {}

    def nodes(self) -> list[Node]:
        """The nodes that are connected now."""
        note, _ = self._ask({"ask": "nodes"}, (), SLACK, 0)
        self._keys = {int(node): str(key) for node, key in zip(note["nodes"], note["keys"], strict=True)}
        return list(self._keys)

    def keys(self) -> Mapping[Node, str]:
        """The keys of the nodes at the last call of `nodes`; the SuperLink has checked them."""
        return self._keys

    def exchange(self, letters: Sequence[Letter], timeout: float, most: Sequence[int]) -> list[bytes | str]:
        """The answer to every letter, in order; a sentence where none came in time or it was too large."""
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
    """A courier over the SuperLink at an address; one is started if nobody listens there."""
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
    """Write the configuration that tells Flower's commands where the SuperLink is."""
    trust = "insecure = true"
    if security.ca is not None:
        trust = f'root-certificates = "{security.ca.resolve()}"'
    (home / "config.toml").write_text(f'[superlink.{NAME}]\naddress = "{from_here(address)}"\n{trust}\n')


def _register(security: Security, home: Path) -> None:
    """Register the clients' keys with a SuperLink that has just been started."""
    if security.client_keys is None or not security.node_keys:
        return
    for key in sorted(security.client_keys.glob("*.pub")):
        _command(["supernode", "register", str(key), NAME], home / "keys.log", f"the key {key}", home)


def _submit(home: Path, path: Path) -> Path:
    """Submit the relay to the SuperLink as a Flower app."""
    app, log = home / "potluck-relay", home / "run.log"
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(APP)
    _command(["run", str(app), NAME, "--run-config", f'socket="{path}"'], log, "the run", home)
    return log


def _command(words: Sequence[str], log: Path, what: str, home: Path) -> None:
    """Run one of Flower's commands; if it fails, a sentence says what was not accepted."""
    process = Process([program("flwr"), *words], log, environment(home))
    try:
        process.popen.wait(START)
    except subprocess.TimeoutExpired:
        process.end()
    if process.popen.returncode != 0:
        raise RunError(f"Flower does not take {what}: {process.tail()} (see {log})")
