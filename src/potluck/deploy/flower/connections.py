"""Where a server is, and how connections to it are secured."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.addresses import port_of
from potluck.errors import ConfigError

FREE_PORTS = range(20_000, 32_000)  # below those that systems hand out
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Security:
    """TLS and keys of a connection. Beyond this machine plain text must be asked for with `insecure`."""

    insecure: bool = False
    ca: Path | None = None  # certificate of the authority that signed the server's
    certificate: Path | None = None  # the server's own, and its key
    key: Path | None = None
    node_key: Path | None = None  # a node's private key
    node_keys: bool = False  # the server takes in only nodes whose key was registered
    client_keys: Path | None = None  # a folder with the public key of every client

    def check(self, address: str, needed: Sequence[str]) -> None:
        """Refuse plain text beyond this machine, and TLS options (`needed`) of which only some are given."""
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
        """Whether the connection is plain text, without TLS."""
        return self.ca is None


def is_loopback(address: str) -> bool:
    """Whether an address stays within this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`."""
    host, colon, port = address.rpartition(":")
    number = port_of(port)
    if not colon or not host or number is None:
        raise ConfigError(f"{address!r} is no address; write host:port, such as 127.0.0.1:8000")
    return host.strip("[]"), number


def from_here(address: str) -> str:
    """The address to reach a server from this machine, also one that listens on all interfaces."""
    host, port = split_address(address)
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "::") else address


def is_same_place(listen: str, reached: str) -> bool:
    """Whether who listens at one address would be reached at another."""
    (host, port), (other, wanted) = split_address(listen), split_address(from_here(reached))
    if port != wanted:
        return False
    there = _numbers(other)
    if host in ("0.0.0.0", "::"):
        return any(map(_is_here, there))
    return host == other or not _numbers(host).isdisjoint(there)


def _numbers(host: str) -> set[IPAddress]:
    """The addresses that a name stands for; none where nobody knows it."""
    try:
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()
    addresses = map(ipaddress.ip_address, found)
    return {getattr(address, "ipv4_mapped", None) or address for address in addresses}


def _is_here(address: IPAddress) -> bool:
    """Whether an address is one of this machine's: what went there would come from there. Nothing is sent."""
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((str(address), 9))
            return bool(way.getsockname()[0] == str(address))
    except OSError:
        return False


def free_port() -> int:
    """A port of this machine that is free now.

    It is none of those that the system itself hands out: one of them may go to somebody else before it is used.
    """
    for _ in FREE_PORTS:
        with socket.socket() as door, contextlib.suppress(OSError):
            door.bind(("127.0.0.1", secrets.choice(FREE_PORTS)))
            return int(door.getsockname()[1])
    raise ConfigError(
        f"no port between {FREE_PORTS[0]} and {FREE_PORTS[-1]} of this machine is free; free one"
    )


def is_open(address: str) -> bool:
    """Whether somebody listens at an address."""
    host, port = split_address(from_here(address))
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True
