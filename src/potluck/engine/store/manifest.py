"""The manifest of a checkpoint: which files hold a run after a round, with size and checksum of each.

It has a checksum of itself, too."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.files import LARGEST_JSON, check_values, read_bounded

SEAL = "seal"  # the key that has the checksum of all that stands before it
_SERVER = re.compile(r"server-\d{6,}\.safetensors")
_CLIENT = re.compile(r"clients-\d{8,}\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """What a manifest says; files are names beside it."""

    round: int
    server: str
    clients: Mapping[ClientId, str]
    sha256: Mapping[str, str]  # file → checksum
    sizes: Mapping[str, int]  # file → bytes; empty in a manifest of an earlier version
    notes: Mapping[str, Any]

    @property
    def names(self) -> set[str]:
        """All files that it names."""
        return {self.server, *self.clients.values()}

    @property
    def files(self) -> dict[str, tuple[str, int | None]]:
        """Checksum and size of each of its files; None for a size that it does not know."""
        return {name: (found, self.sizes.get(name)) for name, found in self.sha256.items()}

    def to_bytes(self) -> bytes:
        """The content of its file."""
        values = {
            "round": self.round,
            "server": self.server,
            "clients": dict(self.clients),
            "sha256": dict(self.sha256),
            "sizes": dict(self.sizes),
            **self.notes,
        }
        return json.dumps(values | {SEAL: _seal(values)}).encode()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest; a `ValueError` says what is wrong with one that was not written like this."""
        try:
            content = read_bounded(path, LARGEST_JSON, follow=False)
            check_values(content)
            values = json.loads(content)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping")
        values = dict(values)
        seal = values.pop(SEAL, None)
        whole = dict(values)
        try:
            round_, server = values.pop("round"), values.pop("server")
            clients, sha256 = values.pop("clients"), values.pop("sha256")
        except KeyError as error:
            raise ValueError(f"it does not say {error}") from error
        sizes = values.pop("sizes", {})
        found = cls(round_, server, clients, sha256, sizes, values)
        found._check()
        if seal != _seal(whole):
            raise ValueError("its checksum is another one: it was changed after it was written")
        return found

    def _check(self) -> None:
        """A manifest names files beside it: those of another folder must be neither read nor removed."""
        if type(self.round) is not int or self.round < 0:
            raise ValueError("its round is no number from 0")
        if not all(isinstance(one, dict) for one in (self.clients, self.sha256, self.sizes)):
            raise ValueError("clients, sha256 or sizes is no mapping")
        wanted = [(_SERVER, self.server), *((_CLIENT, name) for name in self.clients.values())]
        for pattern, name in wanted:
            if not isinstance(name, str) or not pattern.fullmatch(name):
                raise ValueError(f"it names {name}, which is not a file beside it")
            if not isinstance(self.sha256.get(name), str):
                raise ValueError(f"it has no checksum of {name}")
            if self.sizes and type(self.sizes.get(name)) is not int:
                raise ValueError(f"it has no size of {name}")


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
