"""The replies to one `ask`, always in the order of the clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from potluck.core.card import Card, ClientId
from potluck.core.message import Content, Message
from potluck.core.state import Report
from potluck.core.task import Task


@dataclass(frozen=True)
class Replies(Mapping[ClientId, Message]):
    """A mapping from client to message, with the clients' cards and reports."""

    messages: Mapping[ClientId, Message]
    cards: Mapping[ClientId, Card]
    reports: Mapping[ClientId, Report] = field(default_factory=dict)

    def __getitem__(self, client: ClientId) -> Message:
        return self.messages[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The ids of the clients that answered."""
        return tuple(self.messages)

    def map(self, change: Callable[[ClientId, Message], Content]) -> Replies:
        """The same replies with other messages: renamed, filtered, decoded."""
        changed = {client: Message(change(client, message)) for client, message in self.items()}
        return Replies(changed, self.cards, self.reports)

    def among(self, clients: Collection[ClientId]) -> Replies:
        """The replies of some of the clients."""
        kept = {client: message for client, message in self.items() if client in clients}
        return Replies(kept, self.cards, self.reports)

    @classmethod
    def of(cls, contents: Mapping[ClientId, Content], samples: Mapping[ClientId, int]) -> Replies:
        """Replies built by hand, for tests and examples."""
        task = Task("classification", 2, (1,))
        cards = {client: Card(client, count, task) for client, count in samples.items()}
        return cls({client: Message(content) for client, content in contents.items()}, cards)
