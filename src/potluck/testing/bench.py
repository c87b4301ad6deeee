"""A tiny federation to try a method on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.dataset import Dataset
from potluck.core.method import Method
from potluck.core.packed import State
from potluck.core.rng import Rng
from potluck.core.streams import Stream
from potluck.core.task import Task
from potluck.data import ClientSplit, Split, from_arrays
from potluck.engine.cohort import Cohort
from potluck.engine.numerics import threads
from potluck.engine.protocol import Engine
from potluck.engine.rounds import Rounds
from potluck.engine.runner import StoringEngine
from potluck.engine.serial import SerialEngine
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation
from potluck.testing.faulty_engines import Heard, Spy

CLASSES = 3
ALL = ("0", "1", "2", "3")
SIZES = (12, 9, 8, 1)  # the third client has one class, the last one sample
DEFAULT_MODELS = ("mlp-small", "conv-large")  # conv-large has batch norm

AnyMethod = str | type[Method] | Mapping[str, Any]


class Bench:
    """Four clients of 8×8 images, one with one class, one with one sample, and public data of the same kind."""

    def __init__(
        self,
        method: AnyMethod,
        models: Any = DEFAULT_MODELS,
        make_engine: Callable[[ClientBuilder], StoringEngine] = SerialEngine,
        **settings: Any,
    ) -> None:
        self.options = _options(method)
        self.models = models
        self.make_engine = make_engine
        self.settings: dict[str, Any] = {"training": _training(0.05), "engine": {"device": "cpu"}} | settings
        self.data, self.public = _tiny_data("check"), _tiny_data("public")
        self.split = _tiny_split(self.data)

    def with_numbers(self, outputs: int) -> Bench:
        """The same clients with numbers to predict instead of a class: regression, whose loss is steeper."""
        other = copy.copy(self)
        vars(other).pop("spied", None)
        if self.settings["training"] == _training(0.05):
            other.settings = self.settings | {"training": _training(0.001)}
        other.data = _as_numbers(self.data, outputs)
        return other

    def build(self, method: Mapping[str, Any] | None = None) -> Federation:
        """A fresh federation, with nothing in it from another one."""
        experiment = Experiment.make(
            name="check",
            data=self.data,
            partition=self.split,
            models=list(self.models) if isinstance(self.models, list | tuple) else self.models,
            public={"data": self.public},  # for methods that use some
            method=dict(method or self.options),
            **self.settings,
        )
        return experiment.build()

    @functools.cached_property
    def spied(self) -> tuple[Played, Spy]:
        """Two rounds of everyone; several checks compare with them."""
        with listening() as heard:
            played, spy = self.spy()
        spy.heard = heard
        return played, spy

    def spy(self, kind: type[Spy] = Spy) -> tuple[Played, Spy]:
        """Two rounds of everyone with a spy around the engine."""
        spies: list[Spy] = []

        def wrap(engine: Engine) -> Spy:
            spies.append(kind(engine))
            return spies[0]

        return self.play([ALL, ALL], wrap), spies[0]

    def play(
        self,
        schedule: Sequence[Sequence[ClientId]],
        wrap: Callable[[Engine], Engine] = lambda engine: engine,
        method: Mapping[str, Any] | None = None,
    ) -> Played:
        """Play rounds with the given cohorts from the start."""
        played = Played(self.build(method), wrap, self.make_engine)
        for cohort in schedule:
            played.round(cohort)
        return played


class Played:
    """Rounds that were played, and the states they led to."""

    def __init__(
        self,
        federation: Federation,
        wrap: Callable[[Engine], Engine] = lambda engine: engine,
        engine: Callable[[ClientBuilder], StoringEngine] = SerialEngine,
    ) -> None:
        self.federation, self.make_engine = federation, engine
        self.local = engine(federation.clients)
        self.rounds = Rounds(federation, wrap(self.local), name="check")
        self.number = 0
        self.cohorts: list[Cohort] = []

    def round(self, ids: Sequence[ClientId]) -> Cohort:
        """Play one more round."""
        self.number += 1
        try:
            with threads(1):
                cohort = self.rounds.play(self.number, tuple(ids))
        except Exception as error:
            everyone = self.federation.population.ids
            error.add_note(
                f"in round {self.number} with the clients {', '.join(ids)} of {', '.join(everyone)}"
            )
            raise
        self.cohorts.append(cohort)
        return cohort

    def client(self, client: ClientId) -> State | None:
        """A client's stored state, None if it was never touched."""
        record = self.local.store.peek(client)
        return record.base if record else None

    def states(self) -> dict[str, State | None]:
        """Everything: the server and every client."""
        return {"server": self.rounds.server.snapshot()} | {
            one: self.client(one) for one in self.federation.population.ids
        }

    def reborn(self, federation: Federation) -> Played:
        """The same federation in a new process: only what was saved is left."""
        other = Played(federation, engine=self.make_engine)
        other.number = self.number
        other.rounds.accepted = dict(self.rounds.accepted)
        other.rounds.server.restore(_through_disk(self.rounds.server.snapshot(), federation.device))
        for client in self.federation.population.ids:
            state = self.client(client)
            if state is not None:
                other.local.store.put(client, _through_disk(state, federation.device))
        return other


def _training(lr: float) -> dict[str, Any]:
    return {"epochs": 2, "batch_size": 4, "optimizer": {"lr": lr, "momentum": 0.9}}


def _options(method: AnyMethod) -> dict[str, Any]:
    if isinstance(method, str):
        options: dict[str, Any] = {"name": method}
    elif isinstance(method, type) and issubclass(method, Method):
        if not vars(method).get("name"):
            raise ConfigError(
                f"{method.__name__} has no name of its own, so it is no method yet: give a class derived from "
                "potluck.Method with a name = '…' in it"
            )
        options = {"name": method.name}
    elif isinstance(method, Mapping):
        options = dict(method)
    else:
        raise ConfigError(f"give a method by its name, its class or a block with options, not {method!r}")
    return options


def _tiny_data(name: str) -> Dataset:
    draw = Rng(0, (name,)).numpy()
    y = np.concatenate(
        [draw.permutation(np.arange(2 * size) % CLASSES) for size in SIZES[:2]]
        + [np.full(2 * SIZES[2], 1), np.array([2, 0])]
    )
    x = draw.normal(size=(len(y), 1, 8, 8)).astype(np.float32) + y[:, None, None, None]
    return from_arrays(x.astype(np.float32), y, classes=CLASSES, name=name)


def _as_numbers(data: Dataset, outputs: int) -> Dataset:
    y = data.x.flatten(1)[:, :outputs] - data.y[:, None]
    names = tuple(f"number {place}" for place in range(outputs))
    task = Task("regression", outputs, data.task.input)
    return dataclasses.replace(data, task=task, y=y[:, 0] if outputs == 1 else y, class_names=names)


def _tiny_split(data: Dataset) -> Split:
    start, clients = 0, []
    for number, size in enumerate(SIZES):
        rows = np.arange(start, start + 2 * size)
        clients.append(ClientSplit(str(number), rows[:size], np.arange(0), rows[size:]))
        start += 2 * size
    return Split.of(clients)


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Record the rows of the first private training batches of every client in each round."""
    heard: Heard = {}
    original = Client.batches

    def listen(client: Client, *args: Any, **keywords: Any) -> Stream:
        stream = original(client, *args, **keywords)
        if stream.split == "train":
            heard.setdefault((client.id, client.round), [rows.tolist() for rows in stream.order])
        return stream

    with mock.patch.object(Client, "batches", listen):
        yield heard


def _through_disk(state: State, device: torch.device) -> State:
    written = safetensors.torch.save({name: value.contiguous() for name, value in state.items()})
    return {name: value.to(device) for name, value in safetensors.torch.load(written).items()}
