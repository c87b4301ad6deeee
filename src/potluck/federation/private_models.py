"""The model each client starts with: the same whatever the method."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.contract import Shapes, shapes_below
from potluck.core.message import Message
from potluck.core.model import Model
from potluck.core.rng import Rng, Seeds
from potluck.core.task import Task
from potluck.models import ModelPool


class PrivateModels:
    """Which architecture each client has, and its first weights, from the pool and the seed `init`."""

    def __init__(
        self,
        pool: ModelPool,
        ids: Sequence[ClientId],
        seeds: Seeds,
        independent_init: bool = False,
        places: Mapping[ClientId, int] | None = None,
    ) -> None:
        """`independent_init`: every client starts from weights of its own, not from its architecture's.

        `places` has the place of each client among `ids`, where that is known.
        """
        self.pool, self.independent_init = pool, independent_init
        self._seed, self._ids = seeds.tree("init"), ids
        self._index = places if places is not None else {client: place for place, client in enumerate(ids)}

    def architecture(self, client: ClientId) -> str:
        """The key of a client's architecture."""
        return self.pool.key(self._index[client], client, len(self._index))

    def firsts(self, places: range) -> list[ClientId]:
        """The first client of each architecture among those at some places."""
        return [self._ids[place] for place in self.pool.firsts(places, self._ids, len(self._ids))]

    def label(self, client: ClientId) -> str:
        """A short name of a client's model."""
        return self.pool.label(self._index[client], client, len(self._index))

    def origin(self, client: ClientId) -> str:
        """What a client's initial state is made from: its architecture, or the client itself."""
        return client if self.independent_init else self.architecture(client)

    def rng(self, client: ClientId, what: str) -> Rng:
        """The randomness of a client's first weights (`model`), or of the rest of its state (`state`)."""
        return self._seed.child(what, self.origin(client))

    def build(self, client: ClientId, task: Task) -> Model:
        """The client's private model as it starts."""
        with self.rng(client, "model").as_default():
            return self.pool.build(self.architecture(client), task, who=f"client {client}")

    def head(self, client: ClientId, task: Task) -> Shapes:
        """The tensors of a client's head; no model is built for it."""
        return shapes_below(self.pool.signature(self.architecture(client), task), "head")


def fingerprint(model: Model) -> str:
    """A hash of a model's weights."""
    return hashlib.sha256(Message(dict(model.state_dict())).encode()).hexdigest()
