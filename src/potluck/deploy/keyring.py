"""Ties client ids to keys, which may be replaced or revoked while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from potluck.core.card import ClientId

REVOKED = ""  # in place of a key: the client has none any more


class KeyRegister:
    """The key of every client: one known from the start, or the first one it came with.

    `keep` stores the keys each time one changes, before a client is accepted with it. `changed` gives the keys that
    the operator has put in place of others since it was last called.
    """

    def __init__(
        self,
        known: Mapping[ClientId, str],
        keep: Callable[[Mapping[ClientId, str]], None] = lambda keys: None,
        changed: Callable[[], Mapping[ClientId, str]] = dict,
    ) -> None:
        self.known, self._keep, self._changed = dict(known), keep, changed

    def renew(self) -> list[str]:
        """Take over changed keys; a sentence about each."""
        changes = {client: key for client, key in self._changed().items() if self.known.get(client) != key}
        if changes:
            self.known |= changes
            self._keep(self.known)
        return [
            f"client {client}: its key was revoked; it is out until it has a new one"
            if key == REVOKED
            else f"client {client}: its key is {key} from now on"
            for client, key in changes.items()
        ]

    def is_revoked(self, client: ClientId) -> bool:
        """Whether a client has no key any more."""
        return self.known.get(client) == REVOKED

    def owner(self, key: str) -> ClientId | None:
        """The client that a key belongs to."""
        return next((client for client, own in self.known.items() if key and own == key), None)

    def refuse(self, client: ClientId, key: str) -> str:
        """A sentence if this client may not use this key; else an empty string, and the key is the client's."""
        if key and client not in self.known and key not in self.known.values():
            self.known[client] = key
            self._keep(self.known)
        return self.wrong(client, key)

    def wrong(self, client: ClientId, key: str) -> str:
        """A sentence if this key is not the client's; an empty string if it is."""
        if not key:
            return f"client {client}: its node has shown no key"
        owner = self.owner(key)
        if owner not in (None, client):
            return f"client {client}: the key of its node, {key}, is that of client {owner}"
        if self.is_revoked(client):
            return f"client {client}: its key was revoked, and that of its node, {key}, is not its own"
        own = self.known[client]
        return "" if own == key else f"client {client}: the key of its node, {key}, is not its own, {own}"
