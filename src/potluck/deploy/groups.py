"""Clients that share a part of the server's state among themselves, such as those of one architecture.

What one of them has spoiled no other client gets to see, so the round goes on without them all. When everyone who
is left of such a group fails over it, what only they use is dropped, and they begin anew with first weights of one
of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from potluck.core.card import Card, ClientId
from potluck.core.method import Method
from potluck.core.server import Server
from potluck.deploy.suspects import diverges


class Groups:
    """The groups of a federation, and who could not train with what the server has when it was last asked."""

    def __init__(self, method: Method, cards: Mapping[ClientId, Card]) -> None:
        self.keys = {client: method.state_keys(card) for client, card in cards.items()}
        self._failing: set[ClientId] = set()

    def of(self, client: ClientId, among: Sequence[ClientId]) -> list[ClientId]:
        """Those `among` whose part of the state is that of a client, which may be out by now."""
        keys = self.keys.get(client)
        return [one for one in among if self.keys.get(one) == keys] if keys is not None else []

    def share(self, client: ClientId, other: ClientId) -> bool:
        """Whether two clients get anything in common of the server's state."""
        mine, others = self.keys[client], self.keys[other]
        return bool(mine & others) or not mine or not others

    def note(self, failures: Mapping[ClientId, str], accepted: Collection[ClientId]) -> None:
        """Take note of a round. What a client did when it was last asked counts, so that a draw changes nothing."""
        self._failing -= {*accepted}
        self._failing |= {client for client, reason in failures.items() if diverges(reason)}

    def begin_anew(self, server: Server) -> list[ClientId]:
        """Drop what only clients use that all fail, and give these. It stays as long as one does not fail."""
        lost = [
            client
            for client in self.keys
            if all(one in self._failing for one in self.of(client, [*self.keys]))
        ]
        rest = frozenset[str]().union(*(keys for client, keys in self.keys.items() if client not in lost))
        lost = [client for client in lost if self.keys[client] - rest]
        dropped = frozenset[str]().union(*(self.keys[client] for client in lost)) - rest
        if not _drop(server, dropped):
            return []
        self._failing -= {*lost}
        return lost


def _drop(server: Server, keys: Collection[str]) -> bool:
    """Take tensors out of all mappings of the server's state; False if it has none of them."""
    mappings = {name for name, part in server.parts.items() if isinstance(part.content, dict)}
    state = server.snapshot()
    kept = {name: value for name, value in state.items() if not _is_below(name, mappings, keys)}
    if len(kept) < len(state):
        server.restore(kept)
    return len(kept) < len(state)


def _is_below(name: str, mappings: Collection[str], keys: Collection[str]) -> bool:
    part, _, key = name.partition("/")
    return part in mappings and key in keys
