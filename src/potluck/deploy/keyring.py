"""Which key a client id belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from potluck.core.card import ClientId


class KeyRegister:
    """Which key a client id belongs to: the one it is known by, or the one that came with it first.

    `keep` writes a new entry down, before the client is taken in.
    """

    def __init__(
        self,
        known: Mapping[ClientId, str],
        keep: Callable[[Mapping[ClientId, str]], None] = lambda keys: None,
    ) -> None:
        self.known, self._keep = dict(known), keep

    def refuse(self, client: ClientId, key: str) -> str:
        """One sentence if a client may not come with a key; else it belongs to that from now on."""
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
