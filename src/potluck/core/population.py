"""The population: who takes part, and what is known of each client before anything runs.

A method's `setup` and `check`, `explain` and the server look at it. A simulation fills it from data and models, the
server of a real federation from cards, a site from itself; see `ClientFacts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from potluck.core.card import Card, ClientId
from potluck.core.card_fields import MODEL_FIELDS, Own, find_field
from potluck.core.contract import Shapes
from potluck.core.model import Model
from potluck.core.public import Public
from potluck.core.rng import Rng
from potluck.core.settings import ClientTraining
from potluck.core.state import BufferPolicy
from potluck.core.task import Task
from potluck.core.trial import trains_body

REMEMBERED = 4096  # clients whose facts are kept; those of others are looked up again


def _nothing(field: str) -> Any:
    return None


def _defaults(client: ClientId) -> ClientTraining:
    return ClientTraining()


@dataclass(frozen=True)
class ClientFacts:
    """What is known of one client. What `known` does not tell is read off a model like the client's."""

    task: Task
    class_names: tuple[str, ...]
    samples: Mapping[str, int]  # the size of each split
    architecture: str  # the key of its model's architecture
    label: Callable[[], str]  # a short name of its model, for people
    build_model: Callable[[], Model]  # a fresh model like the client's
    head: Callable[[], Shapes]  # of such a model, without building it
    group: int = 0  # clients of a group have one data set and task
    known: Callable[[str], Any] = _nothing  # a card field's value, None where the model has to tell


class Population(Mapping[ClientId, ClientFacts]):
    """Every client in order, the held-out ones too. Facts are looked up when they are asked for."""

    def __init__(
        self,
        ids: Sequence[ClientId],
        facts: Callable[[ClientId], ClientFacts],
        *,
        method_name: str,
        card_fields: Sequence[str],
        draws: Rng,
        first_clients: Sequence[ClientId] | None = None,
        representatives: Sequence[ClientId] | None = None,
        architecture: Callable[[ClientId], str] | None = None,
        held_out: Sequence[ClientId] = (),
        participation: float = 1.0,
        publics: Sequence[Public] = (),
        buffers: BufferPolicy = "average",
        training: Callable[[ClientId], ClientTraining] = _defaults,
        others_unknown: bool = False,
    ) -> None:
        """`draws` is the seed of cohorts; `publics` has the public data as each group sees them.

        `representatives` are the first clients of each architecture and group, where that is all that a client's
        model, task and public data depend on; by default everyone. `architecture` gives that of a client, where
        it can be had without its other facts. With `others_unknown` there may be clients of whom the facts here
        tell nothing: a site knows itself alone, and to a server some come late.
        """
        self.others_unknown = others_unknown
        self.ids = tuple(ids)
        self.method_name = method_name  # sentences about the population begin with it
        self.first_clients = tuple(first_clients or self.ids[:1])  # one of each group
        # Who stands for all in what follows from models and groups: a check need not ask a million alike.
        self.representatives = tuple(representatives or self.ids)
        self.held_out = frozenset(held_out)
        self.participation = participation
        self.training = training  # how a client trains, with its own values applied
        self.cards: Mapping[ClientId, Card] = _Cards(self)
        self._facts, self._architecture = lru_cache(maxsize=REMEMBERED)(facts), architecture
        self._card_fields, self._draws = tuple(card_fields), draws
        self._cohorts = lru_cache(maxsize=2)(self._cohort)  # a round asks for its own and the next one's
        self._publics, self._buffers = publics, buffers
        self._found: dict[tuple[str, int], dict[str, Any]] = {}  # by architecture and group

    def __getitem__(self, client: ClientId) -> ClientFacts:
        return self._facts(client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def trainers(self) -> tuple[ClientId, ...]:
        """The clients that take part in training: all but the held-out ones."""
        return tuple(client for client in self.ids if client not in self.held_out)

    @property
    def cohort_size(self) -> int:
        """How many clients a round has."""
        return max(1, round(self.participation * len(self.trainers)))

    def cohort(self, round_: int, size: int | None = None) -> tuple[ClientId, ...]:
        """The clients of a round, in client order; the draw depends on the cohort seed and the round alone."""
        return self._cohorts(round_, size or self.cohort_size)

    def _cohort(self, round_: int, wanted: int) -> tuple[ClientId, ...]:
        draw = self._draws.child("round", round_).numpy()
        chosen = draw.choice(len(self.trainers), size=min(wanted, len(self.trainers)), replace=False)
        return tuple(self.trainers[number] for number in sorted(chosen))

    def cohort_without(self, round_: int, out: Collection[ClientId]) -> tuple[ClientId, ...]:
        """The clients of a round, with others drawn in place of those who are `out`, as far as there are others.

        The draw depends on the cohort seed, the round and who is out, so a run that goes on has the same cohort.
        """
        drawn = self.cohort(round_)
        kept = {client for client in drawn if client not in out}
        others = [client for client in self.trainers if client not in drawn and client not in out]
        draw = self._draws.child("round", round_, "in place of", *sorted(out)).numpy()
        wanted = min(len(drawn) - len(kept), len(others))
        kept |= {others[number] for number in draw.choice(len(others), size=wanted, replace=False)}
        return tuple(client for client in self.trainers if client in kept)

    @cached_property
    def task(self) -> Task:
        """The task of the first client: of all clients, unless the method takes any."""
        return self[self.ids[0]].task

    def task_of(self, client: ClientId) -> Task:
        """A client's task."""
        return self[client].task

    def class_names(self, client: ClientId) -> tuple[str, ...]:
        """What the classes of a client's task are called."""
        return self[client].class_names

    def samples(self, client: ClientId) -> dict[str, int]:
        """The size of each split of a client."""
        return dict(self[client].samples)

    def label(self, client: ClientId) -> str:
        """A short name of a client's model."""
        return self[client].label()

    def architecture(self, client: ClientId) -> str:
        """The key of a client's architecture."""
        return self[client].architecture if self._architecture is None else self._architecture(client)

    def form(self, client: ClientId) -> str:
        """What tells a client's model from others: its architecture, and what its card says of it, if there is one.

        The clients of a real federation bring models of their own, whatever the experiment names for them.
        """
        facts = self[client]
        told = {name: value for name in MODEL_FIELDS if (value := facts.known(name)) is not None}
        if not told:
            return facts.architecture
        return f"{facts.architecture}:{hashlib.sha256(repr(told).encode()).hexdigest()}"

    def build_model(self, client: ClientId) -> Model:
        """A fresh model like the client's, as far as it is known here."""
        return self[client].build_model()

    def head(self, client: ClientId) -> Shapes:
        """The tensors of the head of a client's model, with their shapes."""
        return self[client].head()

    def public(self, client: ClientId | None = None) -> Public | None:
        """The public data as a client sees it, or the server: in the form of the first client's."""
        group = 0 if client is None else self[client].group
        return self._publics[group] if self._publics else None

    def classes_held(self, client: ClientId) -> tuple[int, ...]:
        """The classes a client has training samples of."""
        return tuple(self.fact("classes_held", client))

    def width(self, client: ClientId) -> int:
        """The width of a client's representation."""
        return int(self.fact("width", client))

    def names(self, client: ClientId) -> Shapes:
        """The tensors of a client's model that may cross, with their shapes."""
        shapes: Shapes = self.fact("names", client)
        return shapes

    def stem(self, client: ClientId) -> tuple[int, ...]:
        """The shape of one sample after the stem of a client's model, empty where the model has none."""
        return tuple(self.fact("stem", client))

    def trains_body(self, client: ClientId) -> bool:
        """Whether the body of a client's model has parameters to train."""
        return bool(self._once(client, "trains_body", lambda own: trains_body(own.model, own.task)))

    def fact(self, field: str, client: ClientId) -> Any:
        """A card field of a client: as it is known, or as a model like the client's tells."""
        return self._once(client, field, find_field(field).read)

    def _once(self, client: ClientId, name: str, read: Callable[[Own], Any]) -> Any:
        """What is not known is looked up once per architecture and group."""
        facts = self[client]
        known = facts.known(name)
        if known is not None:
            return known
        found = self._found.setdefault((facts.architecture, facts.group), {})
        if name not in found:
            public = self.public()
            own = Own(
                facts.task,
                facts.build_model,
                self._buffers,
                public=None if public is None else public.fingerprint,
            )
            found[name] = read(own)
            if "model" in vars(own):  # building it was the work; these cost nothing now
                found |= {
                    "width": int(own.model.rep_dim),
                    "names": own.names,
                    "parameter_names": own.parameter_names,
                }
        return found[name]

    def card(self, client: ClientId) -> Card:
        """What a client says of itself: only what the method asks for."""
        facts = self[client]
        told = {name: self.fact(name, client) for name in self._card_fields}
        return Card(client, facts.samples["train"], facts.task, told)


class _Cards(Mapping[ClientId, Card]):
    """The cards of all clients that train, written when first read: a large federation costs nothing."""

    def __init__(self, population: Population) -> None:
        self._population = population
        self._card = lru_cache(maxsize=REMEMBERED)(population.card)

    def __getitem__(self, client: ClientId) -> Card:
        return self._card(client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._population.trainers)

    def __len__(self) -> int:
        return len(self._population.trainers)
