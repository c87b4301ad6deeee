"""A federation: the method, the population it is for, and what builds its clients and its server.

Everything follows from the experiment and its seeds; no method has a say in data, split, models or cohorts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from potluck.core.card import ClientId
from potluck.core.dataset import Data, Dataset
from potluck.core.method import Method
from potluck.core.own_metrics import OwnMetrics
from potluck.core.population import REMEMBERED, ClientFacts, Population
from potluck.core.public import Public, check_same_samples
from potluck.core.rng import Rng, Seeds
from potluck.core.server import Server
from potluck.core.settings import ClientOverrides, ClientTraining
from potluck.core.state import BufferPolicy, Precision
from potluck.core.task import Task
from potluck.data import Split
from potluck.data.client_splits import PARTS
from potluck.data.public import public_for
from potluck.errors import ConfigError, HeadError, ModelError, PublicDataError, some
from potluck.federation.builder import ClientBuilder, Publics, to_device
from potluck.federation.groups import GroupData
from potluck.federation.private_models import PrivateModels
from potluck.models import ModelPool

PublicSamples = tuple[Dataset, np.ndarray]  # a data set, and the ids of the samples that are public


@dataclass(frozen=True)
class Federation:
    """What a run needs before its first round."""

    method: Method
    population: Population
    clients: ClientBuilder
    split: Split
    seeds: Seeds

    @property
    def device(self) -> torch.device:
        """Where server and clients compute; of several devices the first."""
        return self.clients.device

    @property
    def precision(self) -> Precision:
        """The precision of forward passes."""
        return self.clients.precision

    @property
    def data(self) -> Data:
        """The data set, or that of each group of clients."""
        datasets = tuple(group.data for group in self.clients.groups)
        return datasets if len(datasets) > 1 else datasets[0]

    def server(self) -> Server:
        """The server in its initial state."""
        population, device = self.population, self.device
        server = Server(population.task, population.cards, device, self.precision)
        server.public_data = population.public()
        own = {"lr_decay": 1.0, "clip": None}  # the clients' schedule and clipping are theirs
        server.training = self.clients.training.model_copy(update=own)
        with self.seeds.tree("init").child("server").as_default():
            state = self.method.server_state(population.task)
        buffers: BufferPolicy = self.method.config.buffers
        placed = {name: to_device(value, device) for name, value in state.items()}
        server.declare(placed, buffers, remember=True)
        return server

    def server_rng(self, round_: int) -> Rng:
        """The server's branch of the randomness in a round."""
        return self.seeds.tree("training").child("round", round_, "server")

    def save_split(self, path: Path) -> None:
        """Write down who has which rows and, where the data are here, how many of which class."""
        groups = [(group.data, group.clients) for group in self.clients.groups]
        self.split.save(path, groups if any(len(data) for data, _ in groups) else None)

    def prepared(self) -> Federation:
        """Let the method set itself up for the population, and refuse what cannot work."""
        with self.seeds.tree("init").child("check").as_default():
            self.method.setup(self.population)
            self.method.check(self.population)
        return self


def assemble(
    method: Method,
    ids: Sequence[ClientId],
    facts: Callable[[ClientId], ClientFacts],
    models: PrivateModels,
    groups: Sequence[GroupData],
    split: Split,
    *,
    seeds: Seeds,
    training: ClientTraining,
    overrides: Mapping[ClientId, ClientOverrides] | None = None,
    participation: float = 1.0,
    publics: Publics = lambda device: (),
    representatives: Sequence[ClientId] | None = None,
    architecture: Callable[[ClientId], str] | None = None,
    secret: Callable[[ClientId], Rng] | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "float32",
    metrics: OwnMetrics | None = None,
    others_unknown: bool = False,
) -> Federation:
    """Put a federation together: `ids` and `facts` say who takes part, `split` has the rows that are here.

    `representatives`, `architecture` and `others_unknown` as in `Population`.
    """
    starts = np.cumsum([0, *(group.clients for group in groups)])
    population = Population(
        ids,
        facts,
        method_name=method.name,
        card_fields=method.told(),
        draws=seeds.tree("cohort"),
        first_clients=[split.ids[start] for start in starts[:-1]],
        representatives=representatives,
        architecture=architecture,
        held_out=split.held_out,
        participation=participation,
        publics=publics(torch.device(device)),
        buffers=method.config.buffers,
        training=lambda client: (overrides or {}).get(client, ClientOverrides()).apply(training),
        others_unknown=others_unknown,
    )
    clients = ClientBuilder(
        method,
        population,
        models,
        groups,
        split,
        seeds=seeds,
        training=training,
        overrides=overrides,
        publics=publics,
        secret=secret,
        device=device,
        precision=precision,
        metrics=metrics,
    )
    return Federation(method, population, clients, split, seeds)


def simulated(
    method: Method,
    groups: Sequence[GroupData],
    split: Split,
    pool: ModelPool,
    *,
    seeds: Seeds,
    independent_init: bool = False,
    public: PublicSamples | None = None,
    **settings: Any,
) -> Federation:
    """A federation whose clients are all here: their facts come from their data and the models they are dealt.

    The method must be able to learn their tasks; see `check_tasks`.

    `settings` are those of `assemble`: training, overrides, participation, device, precision, metrics.
    """
    models = PrivateModels(pool, split.ids, seeds, independent_init, split.clients.places)
    facts, publics = FactsFromData(groups, split, models), public_views(public, groups, seeds)
    federation = assemble(
        method,
        split.ids,
        facts,
        models,
        groups,
        split,
        seeds=seeds,
        publics=publics,
        representatives=facts.firsts(),
        architecture=models.architecture,
        **settings,
    )
    check_public(federation.population)
    try:
        check_trained(federation.prepared())
    except HeadError as error:
        raise ModelError(f"{error}{_odd_labels(groups)}") from error
    return federation


def _odd_labels(groups: Sequence[GroupData]) -> str:
    """For a sentence about heads: which labels make the number of classes larger than the labels that occur."""
    for data in (group.data for group in groups if group.data.task.single_label):
        found = torch.unique(data.y).tolist()
        gaps = sorted({*range(data.task.classes)} - {*found})
        beyond = [str(label) for label in found if gaps and label > gaps[0]]
        if beyond:
            those = f"{some(map(str, gaps))} of {data.name!r} never occur"
            are = "is a mistake" if len(beyond) == 1 else "are mistakes"
            return f"; labels {those}, so if {some(beyond)} {are}, correct {'it' if len(beyond) == 1 else 'them'}"
    return ""


def _readable_data(task: Task) -> str:
    """Which public data a client could read."""
    if len(task.input) == 3 or task.vocabulary:
        return "choose a data set with pairs, such as cifar10-captions"
    return f"choose one whose samples are numbers of shape {'×'.join(map(str, task.input))}"


def check_trained(federation: Federation) -> None:
    """Refuse a client none of whose parameters can be trained: all are frozen, and the method adds none."""
    clients, population, method = federation.clients, federation.population, federation.method
    for client in reversed(population.representatives):
        task = population.task_of(client)
        key = population.architecture(client)
        if not clients.models.pool.is_frozen(key, task, who=f"client {client}"):
            continue
        with federation.seeds.tree("init").child("check").as_default():
            model = population.build_model(client)
            state = method.client_state(task, model, **method.client_options(client))
        modules = [part for part in state.values() if isinstance(part, nn.Module)]
        if not any(value.requires_grad for module in modules for value in module.parameters()):
            raise ConfigError(
                f"client {client} ({population.label(client)}): every parameter of its model is frozen, so "
                f"{method.name} has nothing to train; let some require a gradient (requires_grad_(True))"
            )


class FactsFromData:
    """What is known of clients whose data are here."""

    def __init__(self, groups: Sequence[GroupData], split: Split, models: PrivateModels) -> None:
        self.groups, self.split, self.models = groups, split, models
        self._starts = [0, *itertools.accumulate(group.clients for group in groups)]
        self._classes = lru_cache(maxsize=REMEMBERED)(self._read_classes)

    def firsts(self) -> list[ClientId]:
        """The first client of each architecture in each group."""
        groups = itertools.starmap(range, itertools.pairwise(self._starts))
        return [client for places in groups for client in self.models.firsts(places)]

    def __call__(self, client: ClientId) -> ClientFacts:
        """The facts of one client."""
        place, models = self.split.clients.places[client], self.models
        group = bisect_right(self._starts, place) - 1
        data, sizes = self.groups[group].data, self.split.clients.sizes[place].tolist()
        return ClientFacts(
            task=data.task,
            class_names=data.class_names,
            samples=dict(zip(PARTS, sizes, strict=True)),
            architecture=models.architecture(client),
            label=lambda: models.label(client),
            build_model=lambda: models.build(client, data.task),
            head=lambda: models.head(client, data.task),
            group=group,
            known=lambda field: self._classes(client, group) if field == "classes_held" else None,
        )

    def _read_classes(self, client: ClientId, group: int) -> tuple[int, ...]:
        data = self.groups[group].data
        return data.task.rules.held(data.y.cpu().numpy()[self.split[client].train])


def public_views(public: PublicSamples | None, groups: Sequence[GroupData], seeds: Seeds) -> Publics:
    """The public data in the form each group reads."""
    rng = seeds.tree("training").child("public")

    @cache
    def on(device: torch.device) -> list[Public]:
        if public is None:
            return []
        return [public_for(*public, group.data, group.prepare, rng, device) for group in groups]

    return on


def check_public(population: Population) -> None:
    """Refuse clients that can read nothing of the public data, or mean other samples than the server."""
    for client in population.first_clients:
        view = population.public(client)
        if view is not None and not bool(view.mask.any()):
            raise PublicDataError(
                f"{population.method_name}: client {client} can read nothing of the public data {view.name!r}, "
                f"which is not in its modality; {_readable_data(population.task_of(client))}"
            )
    own = population.public()
    if own is not None:
        check_same_samples(own, {client: population.card(client) for client in population.first_clients})
