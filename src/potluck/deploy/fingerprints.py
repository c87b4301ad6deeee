"""Fingerprints of public keys. Flower's apps import this, so it must not import torch."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from pathlib import Path

from potluck.errors import ConfigError
from potluck.files import read_bounded

LARGEST_KEY = 1 << 16  # bytes of a file with one public key
KIND = b"ecdsa-sha2-nistp"  # how the kinds of keys begin that Flower takes


def fingerprint(line: bytes) -> str:
    """The fingerprint of a public key in the format of a `.pub` file: kind, key, perhaps a comment."""
    digest = hashlib.sha256(b64decode(line.split()[1], validate=True)).digest()
    return f"SHA256:{b64encode(digest).decode().rstrip('=')}"


def client_keys(folder: Path, clients: Iterable[str], may_lack: bool = False) -> dict[str, str]:
    """Client → fingerprint of its key, read from `<client>.pub` in a folder; no two may be the same.

    With `may_lack` a client without a file has an empty one.
    """
    files = {client: folder / f"{client}.pub" for client in clients}
    found = {
        client: "" if may_lack and not path.exists() else _read(path, client)
        for client, path in files.items()
    }
    owners = {key: client for client, key in found.items()}
    twice = next((client for client, key in found.items() if key and owners[key] != client), None)
    if twice is not None:
        raise ConfigError(
            f"{folder}: the clients {twice} and {owners[found[twice]]} have the same key; give each its own"
        )
    return found


def bare_keys(folder: Path, clients: Iterable[str]) -> dict[str, Path]:
    """The keys of clients without their comments, which may be in any encoding, and the files they are in."""
    files = {client: folder / f"{client}.pub" for client in clients}
    there = {client: path for client, path in files.items() if path.exists()}
    return {_read(path, client, _bare): path for client, path in there.items()}


def _bare(line: bytes) -> str:
    kind, key = line.split()[:2]
    return f"{kind.decode('ascii')} {key.decode('ascii')}"


def _read(path: Path, client: str, take: Callable[[bytes], str] = fingerprint) -> str:
    """What a function takes from the line in a key's file, which is a plain one: a pipe would keep us waiting."""
    try:
        line = read_bounded(path, LARGEST_KEY)
        taken = take(line)
    except OSError as error:
        lost = isinstance(error, FileNotFoundError)
        remedy = "check --client-keys, or put it there" if lost else "check its rights"
        why = error.strerror or error
        raise ConfigError(f"the key of client {client}, {path}, cannot be read: {why}; {remedy}") from error
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path} is no public key; write one with ssh-keygen") from error
    if not line.split()[0].startswith(KIND):
        raise ConfigError(
            f"{path} is no ECDSA key, and Flower takes no other; make one with ssh-keygen -t ecdsa -b 384"
        )
    return taken
