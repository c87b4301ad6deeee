"""The server's view of its clients in a real federation: their cards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from potluck.core.card import Card, ClientId
from potluck.core.contract import Shapes
from potluck.core.dataset import Dataset
from potluck.core.method import Method
from potluck.core.public import Public, check_same_samples
from potluck.core.task import Task
from potluck.data import Split
from potluck.data.split import PARTS, ClientSplit
from potluck.deploy.wire import (
    Enrolment,
)
from potluck.errors import ConfigError
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.federation.world import Ground, World
from potluck.methods.registry import find_method

VECTOR = Task("classification", 2, (1,))  # nothing of images or texts can be read as this


class EnrolledWorld(World):
    """The server's world: the clients' cards, and for what they do not tell, the models its experiment names."""

    def __init__(self, experiment: Experiment, enrolled: Mapping[ClientId, Enrolment]) -> None:
        sites = _sites(experiment)
        self.enrolled = {client: enrolled[client] for client in sites.sites}
        pool = experiment.pool()
        pool.cover(sites.sites)
        method = find_method(experiment.method.name)(experiment.method, pool)
        if not takes_any_task(type(method)):
            _check_common_task(self.enrolled, sites.classes)
        grounds = [Ground(_no_samples(one.card.task), 1) for one in self.enrolled.values()]
        super().__init__(
            method=method,
            data=grounds[0].data,
            grounds=grounds if takes_any_task(type(method)) else (),
            public=experiment.public_samples(method),
            split=_placeholders(self.enrolled),
            pool=pool,
            seeds=experiment.all_seeds(),
            training=experiment.training.for_clients(),
            overrides=experiment.training.per_client,
            participation=experiment.training.participation,
            independent_init=experiment.models.init == "per_client",
            device=experiment.engine.torch_device(),
            precision=experiment.engine.precision,
        )
        public = self.public()
        if public is not None:
            check_same_samples(public, self.cards)
        with self.seeds.tree("init").child("check").as_default():
            self.method.setup(self)
            self.method.check(self)

    def _public_for(self, ground: Ground) -> Public:
        """The server has no words of the sites: of texts it knows the ids alone."""
        if ground.data.task.kind not in ("text-classification", "retrieval"):
            return super()._public_for(ground)
        return super()._public_for(Ground(_no_samples(VECTOR), 1))

    def global_test(self, client: ClientId) -> np.ndarray:
        """The server has no data."""
        return np.zeros(0, dtype=np.int64)

    def save_split(self, path: Path) -> None:
        """Write down how many rows every client has; which classes they are of is not known."""
        self.split.save(path)

    def card(self, client: ClientId) -> Card:
        """As the client wrote it."""
        return self.enrolled[client].card

    def samples(self, client: ClientId) -> dict[str, int]:
        """As the client counted them."""
        return dict(self.enrolled[client].samples)

    def label(self, client: ClientId) -> str:
        """The server does not know the clients' models."""
        return "its own model"

    def classes_held(self, client: ClientId) -> tuple[int, ...]:
        """As the card says; all where it does not."""
        told: tuple[int, ...] = self._told(client, "classes_held", tuple(range(self.task.classes)))
        return told

    def width(self, client: ClientId) -> int:
        """As the card says, else that of the experiment's model."""
        told: int = self._told(client, "width", None) or super().width(client)
        return told

    def stem(self, client: ClientId) -> tuple[int, ...]:
        """As the card says, else that of the experiment's model."""
        told: tuple[int, ...] | None = self._told(client, "stem", None)
        return told if told is not None else super().stem(client)

    def trains_body(self, client: ClientId) -> bool:
        """No card tells; the site looks before it joins."""
        return True

    def names(self, client: ClientId) -> Shapes:
        """As the card says, else those of the experiment's model."""
        told: Shapes = self._told(client, "names", None) or super().names(client)
        return told

    def _told(self, client: ClientId, field: str, default: Any) -> Any:
        return self.enrolled[client].card.extra.get(field, default)


def _placeholders(enrolled: Mapping[ClientId, Enrolment]) -> Split:
    """Rows in the numbers the clients told, one client's after the other's: there is nothing behind them."""
    clients, start = [], 0
    for client, enrolment in enrolled.items():
        ends = np.cumsum([start, *(enrolment.samples[part] for part in PARTS)])
        rows = {part: np.arange(ends[number], ends[number + 1]) for number, part in enumerate(PARTS)}
        clients.append(ClientSplit(client, **rows))
        start = int(ends[-1])
    return Split.of(clients)


def _sites(experiment: Experiment) -> Sites:
    if not isinstance(experiment.partition, Sites):
        raise ConfigError(
            "a federation needs to know its clients: write partition: {sites: [north, south], classes: 10}"
        )
    return experiment.partition


def takes_any_task(method: type[Method]) -> bool:
    """Whether sites may bring tasks of their own. What goes by the names of classes may not: cards have none."""
    return method.tasks == "any" and "classes_held" not in method.card_fields


def _no_samples(task: Task) -> Dataset:
    kind = torch.long if task.kind == "text-classification" else torch.float32
    nothing = torch.zeros(0, *task.input, dtype=kind), torch.zeros(0, dtype=torch.long)
    return Dataset("data of the sites", task, *nothing, 0, tuple(map(str, range(task.classes))))


def _check_common_task(enrolled: Mapping[ClientId, Enrolment], classes: int | None) -> None:
    tasks = {client: enrolment.card.task for client, enrolment in enrolled.items()}
    first, task = next(iter(tasks.items()))
    for client, other in tasks.items():
        if other != task or other.classes != (classes or task.classes):
            raise ConfigError(
                f"client {client} has another task than client {first} and the experiment's "
                f"{classes or task.classes} classes: {other.to_json()}, {task.to_json()}"
            )
