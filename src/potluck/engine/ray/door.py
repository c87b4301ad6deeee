"""Before a Ray cluster is joined: is it there, does it let this process in, and nobody without a token?"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from potluck.addresses import port_of
from potluck.errors import ConfigError

REACH = 5.0  # seconds in which a machine must take a connection
KNOCK = 20.0  # seconds in which a cluster must say who is there
TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with it"


def check_address(address: str) -> None:
    """Refuse an address that is none, or where nobody listens."""
    host, _, port = address.rpartition(":")
    number = port_of(port)
    if "://" in address or not host or number is None:
        raise ConfigError(
            f"engine.address: give the head of a Ray cluster, such as 10.0.0.5:6379, not {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), number), REACH).close()
    except OSError as error:
        raise ConfigError(
            f"engine.address: nobody listens at {address} ({error.strerror or error}); start a Ray cluster there, "
            "with a token, as docs/cluster.md shows"
        ) from error


def check_door(address: str, alone: bool) -> None:
    """Refuse a cluster that does not let this process in, has no machine here, or takes commands from anybody."""
    with _knocking(address) as own, _knocking(address, RAY_AUTH_MODE="disabled") as anybody:
        code, said, error = _heard(own)
        if code:
            raise ConfigError(f"engine.address: {why_not(error, address)}")
        _check_here(address, json.loads(said))
        if not alone and _heard(anybody)[0] == 0:
            raise ConfigError(
                f"engine.address: the cluster at {address} takes commands without a token, so whoever reaches it "
                "runs code on its machines; start it with RAY_AUTH_MODE=token, as docs/cluster.md shows"
            )


@contextlib.contextmanager
def _knocking(address: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that asks the head of a cluster who is there."""
    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, str(Path(__file__).with_name("knock.py")), address]
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipe)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _heard(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How such a process ended, what it said, and its last words if it failed."""
    try:
        said, error = process.communicate(timeout=KNOCK)
    except subprocess.TimeoutExpired:
        return -1, "", f"no answer within {KNOCK:g} s"
    return process.returncode, said, error


def _check_here(address: str, machines: Sequence[tuple[str, str]]) -> None:
    """Refuse a cluster without a node on this machine: Ray's drivers need one."""
    if not any(_is_here(host) for host, _ in machines):
        known = ", ".join(f"{name} ({host})" for host, name in machines) or "none"
        raise ConfigError(
            f"engine.address: no node of the cluster at {address} runs on this machine, they are on {known}; start "
            f"one here with: ray start --address={address}"
        )


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
            door.bind((host, 0))
    except OSError:
        return False
    return True


def why_not(text: str, address: str) -> str:
    """Why a cluster could not be joined, from what Ray said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"]
    if "version" in text.lower() and "mismatch" in text.lower():
        return (
            f"install the same Ray and Python on all machines of {address}: {_from('Version mismatch', text)}"
        )
    if "token" in text.lower() or "auth" in text.lower():
        return f"the cluster at {address} wants its token: {TOKEN}"
    return f"the cluster at {address} does not answer ({lines[-1]})"


def _from(start: str, text: str) -> str:
    """The text from these words on, in one line."""
    return " ".join(text[max(text.find(start), 0) :].split())


def listens(host: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection((host, port), REACH).close()
    except OSError:
        return False
    return True
