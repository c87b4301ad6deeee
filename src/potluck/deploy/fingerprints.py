"""Fingerprints of public keys. Flower's apps import this, so it must not import torch."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path

from potluck.errors import ConfigError


def fingerprint(line: bytes) -> str:
    """The fingerprint of a public key in the format of a `.pub` file: kind, key, perhaps a comment."""
    digest = hashlib.sha256(b64decode(line.split()[1], validate=True)).digest()
    return f"SHA256:{b64encode(digest).decode().rstrip('=')}"


def client_keys(folder: Path, clients: Iterable[str]) -> dict[str, str]:
    """Client → fingerprint of its key, read from `<client>.pub` in a folder; no two may be the same."""
    found = {client: _read(folder / f"{client}.pub", client) for client in clients}
    owners = {key: client for client, key in found.items()}
    twice = next((client for client, key in found.items() if owners[key] != client), None)
    if twice is not None:
        raise ConfigError(f"{folder}: the clients {twice} and {owners[found[twice]]} have the same key")
    return found


def _read(path: Path, client: str) -> str:
    try:
        return fingerprint(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the key of client {client}, {path}, cannot be read: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path} is no public key such as ssh-keygen writes") from error
