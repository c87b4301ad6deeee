"""The population: who takes part, and what is known of each client before anything runs."""

from __future__ import annotations

from typing import Protocol

from potluck.core.card import ClientId
from potluck.core.contract import Shapes
from potluck.core.model import Model
from potluck.core.public import Public
from potluck.core.task import Task


class Population(Protocol):
    """Facts about the clients: all that `setup`, `check` and `explain` may look at."""

    method_name: str  # what sentences about the population begin with
    participation: float
    task: Task  # that of the first client

    @property
    def ids(self) -> tuple[ClientId, ...]:
        """Every client, in order."""

    @property
    def trainers(self) -> tuple[ClientId, ...]:
        """The clients that take part in training: all but the held-out ones."""

    @property
    def cohort_size(self) -> int:
        """How many clients a round has."""

    @property
    def first_clients(self) -> tuple[ClientId, ...]:
        """The first client of each group: what is true of its task and data is true of the others'."""

    def task_of(self, client: ClientId) -> Task:
        """A client's task."""

    def label(self, client: ClientId) -> str:
        """A short name of a client's model."""

    def architecture(self, client: ClientId) -> str:
        """The key of a client's architecture."""

    def build_model(self, client: ClientId) -> Model:
        """A fresh model like the client's, as far as it is known here."""

    def samples(self, client: ClientId) -> dict[str, int]:
        """The size of each split of a client."""

    def classes_held(self, client: ClientId) -> tuple[int, ...]:
        """The classes a client has training samples of."""

    def class_names(self, client: ClientId) -> tuple[str, ...]:
        """What the classes of a client's task are called."""

    def width(self, client: ClientId) -> int:
        """The width of a client's representation."""

    def names(self, client: ClientId) -> Shapes:
        """The tensors of a client's model that may cross, with their shapes."""

    def head(self, client: ClientId) -> Shapes:
        """The tensors of a client's head, with their shapes."""

    def stem(self, client: ClientId) -> tuple[int, ...]:
        """The shape of one sample after the stem of a client's model, empty where the model has none."""

    def trains_body(self, client: ClientId) -> bool:
        """Whether the body of a client's model has parameters to train."""

    def public(self, client: ClientId | None = None) -> Public | None:
        """The public data as a client sees it, or (None) the server."""
