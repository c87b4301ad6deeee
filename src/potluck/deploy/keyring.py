"""Ties client ids to keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from potluck.core.card import ClientId


class KeyRegister:
    """The key of every client: one known from the start, or the first one it came with.

    `keep` stores the keys each time one is added, before the client is accepted.
    """

    def __init__(
        self,
        known: Mapping[ClientId, str],
        keep: Callable[[Mapping[ClientId, str]], None] = lambda keys: None,
    ) -> None:
        self.known, self._keep = dict(known), keep

    def refuse(self, client: ClientId, key: str) -> str:
        """A sentence if this client may not use this key; else an empty string, and the key is the client's."""
        if not key:
            return f"client {client}: its node has shown no key"
        owner = next((other for other, own in self.known.items() if own == key), client)
        if owner != client:
            return f"client {client}: the key of its node, {key}, is that of client {owner}"
        if client not in self.known:
            self.known[client] = key
            self._keep(self.known)
        own = self.known[client]
        return "" if own == key else f"client {client}: the key of its node, {key}, is not its own, {own}"
