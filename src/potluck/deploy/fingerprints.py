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
        raise ConfigError(f"{folder}: the clients {twice} and {owners[found[twice]]} have the same key")
    return found


def _read(path: Path, client: str) -> str:
    try:
        return fingerprint(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the key of client {client}, {path}, cannot be read: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise ConfigError(f"{path} is no public key such as ssh-keygen writes") from error
