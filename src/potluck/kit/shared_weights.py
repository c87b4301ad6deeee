"""The base of methods that average weights by name: what is averaged with what, and where weights start."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content
from potluck.core.method import Clients, Method, Needs, client_step
from potluck.core.population import Population
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.state import Part
from potluck.errors import ConfigError
from potluck.kit.averaging import Weights, average
from potluck.kit.requirements import named, one_per_architecture


class SharedWeights(Method):
    """Averages the clients' tensors under keys; tensors with equal keys are averaged together.

    The option `share` of a subclass chooses the keys: `all`, `groups` or `layers`. The part `weights` of the
    server's state holds the averages. Where it lacks a tensor of the cohort, `introduce` fetches initial values.
    """

    averaged_parts: tuple[str, ...] = ("model",)  # the parts of a client's state that are averaged

    server_needs: ClassVar[Needs] = "names"
    card_fields: ClassVar[tuple[str, ...]] = ("names",)

    def check(self, population: Population) -> None:
        """With `share: all` every client must have the same model."""
        if self.config.share != "all":
            return
        first, *others = population.representatives
        for client in others:
            if population.names(client) != population.names(first):
                raise ConfigError(
                    f"{self.name}: {named(population, client)} has another model than {named(population, first)}; "
                    "set method.share to groups or layers"
                )

    def advice(self, population: Population) -> Iterator[str]:
        """Say where models share nothing before their heads, or nobody shares anything."""
        yield from super().advice(population)
        clients = Counter(map(population.form, population.trainers))
        first = {population.form(client): client for client in one_per_architecture(population)}
        keys = {form: set(self.keys(population.card(client)).values()) for form, client in first.items()}
        holders: Counter[str] = Counter()
        for form, own in keys.items():
            holders.update(dict.fromkeys(own, clients[form]))
        if clients.total() > 1 and max(holders.values(), default=0) < 2:
            yield (
                f"{self.name}: no two clients have a tensor in common under method.share: {self.config.share}, so "
                "nothing is averaged; give several clients the same model"
            )
        elif self.config.share == "layers" and len(keys) > 1:
            yield from self._apart(population, first, keys)

    def _apart(
        self, population: Population, first: Mapping[str, ClientId], keys: Mapping[str, set[str]]
    ) -> Iterator[str]:
        """A sentence if some model shares nothing but its head with models unlike it."""
        apart = {}
        for form, own in keys.items():
            others = set().union(*(other for name, other in keys.items() if name != form))
            shared = own & others
            if all(key.startswith("head.") for key in shared):
                apart[form] = shared
        if apart:
            form, shared = next(iter(apart.items()))
            also = f" (as of {len(apart)} of {len(keys)} models)" if len(apart) > 1 else ""
            common = "only the head" if shared else "nothing"
            yield (
                f"{self.name}: method.share: layers averages what has the same name and shape, and of "
                f"{population.label(first[form])}{also} unlike models have {common}; the rest is averaged among "
                "clients of the same model alone; name layers alike where they should meet"
            )

    @client_step(
        up=lambda method: {
            part: state_of(part, "initial weights the server has not seen yet")
            for part in method.averaged_parts
        },
        purpose="setup",
    )
    def bring(self, client: Client) -> Content:
        """Send the initial weights."""
        return {part: client[part].state() for part in self.averaged_parts}

    def introduce(self, server: Server, clients: Clients) -> None:
        """Fetch initial values for the tensors of this cohort that the server does not hold."""
        while donors := self.donors(server, clients):  # again if one of them failed
            replies = clients.ask(self.bring, only=donors)
            for client in sorted(replies, key=donors.index):
                for part in self.averaged_parts:
                    fresh = self.keyed(replies, client, part)
                    held = server["weights"].tensors()
                    server["weights"].load({key: value for key, value in fresh.items() if key not in held})

    def donors(self, server: Server, clients: Clients) -> list[ClientId]:
        """The clients that can send the tensors the server does not hold, the largest model first."""
        known = set(server["weights"].tensors())
        donors = []
        for client in sorted(clients.ids, key=lambda one: -len(clients.cards[one].names)):
            card = clients.cards[client]
            keys = {key for part in self.averaged_parts for key in self.keys_of(card, part).values()}
            if not keys <= known:
                donors.append(client)
                known |= keys
        return donors

    def mean(self, replies: Replies, group: str, weights: Weights) -> dict[str, Tensor]:
        """The mean of a group of tensors, under the server's keys."""
        keyed = replies.map(lambda client, _: {group: self.keyed(replies, client, group)})
        return average(keyed, group, weights)

    def keyed(self, replies: Replies, client: ClientId, group: str) -> dict[str, Tensor]:
        """A client's tensors under the server's keys."""
        keys = self.keys_of(replies.cards[client], group)
        return {keys[name]: value for name, value in replies[client].group(group).items()}

    def share_of(self, server: Server, held_in: str, card: Card, part: str = "model") -> dict[str, Tensor]:
        """The server's tensors for a part of this client's state, under the client's names."""
        held = server[held_in].tensors()
        return {name: held[key].clone() for name, key in self.keys_of(card, part).items() if key in held}

    def keys_of(self, card: Card, part: str) -> dict[str, str]:
        """The keys of a part's tensors: those of the model, or of another part that is averaged."""
        if part == "model" or part not in self.averaged_parts:
            return self.keys(card)
        start = f"{group_of(card)}:" if self.config.share == "groups" else ""
        shapes = self.expected(card, part) or {}
        return {name: f"{start}{part}/{name}:{_size(shape)}" for name, shape in shapes.items()}

    def state_keys(self, card: Card) -> frozenset[str]:
        """The keys of this client's averages."""
        return frozenset(key for part in self.averaged_parts for key in self.keys_of(card, part).values())

    def keys(self, card: Card) -> dict[str, str]:
        """The server's key of each of a client's tensors; tensors with equal keys are averaged together."""
        names = card.names
        if self.config.share == "all":
            return {name: name for name in names}
        if self.config.share == "layers":
            return {name: f"{name}:{_size(shape)}" for name, shape in names.items()}
        group = group_of(card)
        return {name: f"{group}:{name}" for name in names}


def group_of(card: Card) -> str:
    """A name for all models that have tensors of these names and shapes."""
    return hashlib.sha256(repr(sorted(card.names.items())).encode()).hexdigest()[:12]


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def move(part: Part, changes: Mapping[str, Tensor], rates: Mapping[str, float] | None = None) -> None:
    """Add changes, each times its rate, to the server's tensors; one it does not have yet starts at zero."""
    held = part.tensors()
    scaled = changes if rates is None else {key: change * rates[key] for key, change in changes.items()}
    part.load({key: held[key] + change if key in held else change for key, change in scaled.items()})
