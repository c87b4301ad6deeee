"""The builder of live clients: from facts, rows of data and seeds to a client that can work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.method import Method
from potluck.core.model import Model
from potluck.core.own_metrics import OwnMetrics
from potluck.core.population import Population
from potluck.core.public import Public
from potluck.core.rng import Rng, Seeds
from potluck.core.settings import ClientOverrides, ClientTraining
from potluck.core.state import BufferPolicy, Precision
from potluck.core.streams import Source
from potluck.core.task import Task
from potluck.data import Split
from potluck.data.client_splits import ClientSplits
from potluck.data.views import client_samples
from potluck.errors import ConfigError
from potluck.federation.groups import GroupData, shared_test
from potluck.federation.private_models import PrivateModels, fingerprint

DEEP = 4  # convolutions from which a network is deep
Publics = Callable[[torch.device], Sequence[Public]]  # the public data on a device, as each group sees them


class Recipe(Protocol):
    """What another process needs to make the same clients; the machines of a cluster are sent one, as a pickle."""

    def files(self) -> Mapping[str, Path]:
        """Code of the user's that must lie in the other process's folder: its name there, and the file here."""

    def clients(self, device: str) -> ClientBuilder:
        """Make the clients in this process; a `PotluckError` if its data or code are not those of the sender."""


class ClientBuilder:
    """Builds clients and moves them from one to the next. Everything comes from the seeds and the split."""

    def __init__(
        self,
        method: Method,
        population: Population,
        models: PrivateModels,
        groups: Sequence[GroupData],
        split: Split,
        *,
        seeds: Seeds,
        training: ClientTraining,
        overrides: Mapping[ClientId, ClientOverrides] | None = None,
        publics: Publics = lambda device: (),
        secret: Callable[[ClientId], Rng] | None = None,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
        metrics: OwnMetrics | None = None,
    ) -> None:
        """`secret` gives a client's own randomness; by default it is derived from the seed."""
        self.method, self.population, self.models, self.split = method, population, models, split
        self.groups, self.precision = tuple(groups), precision
        self.metrics = dict(metrics or {})
        self.training, self.overrides = training, dict(overrides or {})
        self._make_publics, self._secret = publics, secret or seeds.secret
        self._draws = seeds.tree("training")
        self.recipe: Callable[[], Recipe] | None = None  # to make the same clients in another process
        self._kinds: dict[ClientId, str] = {}
        self._flexible: dict[str, bool] = {}
        self._shared_tests: dict[int, np.ndarray] = {}
        own = (self.clients_of(place) for place in range(len(self.groups)))
        self._samples = [client_samples(group.data, mine) for group, mine in zip(groups, own, strict=True)]
        self._place_data(torch.device(device))
        for client in {*self.overrides} - {*population.ids} if self.overrides else ():
            raise ConfigError(
                f"training.per_client names client {client!r}, which does not exist; leave it out"
            )

    def on(self, device: torch.device) -> ClientBuilder:
        """The same builder with its data on another device."""
        other = copy.copy(self)
        other._place_data(device)
        return other

    def kind(self, client: ClientId) -> str:
        """The key of clients whose states are alike in shape: one live client can be any of them."""
        if client not in self._kinds:
            options = (f"{name}={value}" for name, value in self.method.client_options(client).items())
            self._kinds[client] = " ".join([self._form(client), *options])
        return self._kinds[client]

    def origin(self, client: ClientId) -> str:
        """What a client's initial state is made from: its architecture, or the client itself."""
        return self.models.origin(client)

    def label(self, client: ClientId) -> str:
        """A short name of a client's model."""
        return self.population.label(client)

    def build_model(self, client: ClientId) -> Model:
        """The client's private model as it starts."""
        return self.population.build_model(client)

    def build_client(self, client_id: ClientId) -> Client:
        """A live client in its initial state."""
        model, task = self.build_model(client_id), self.population.task_of(client_id)
        with self.models.rng(client_id, "state").as_default():
            state = self.method.client_state(task, model, **self.method.client_options(client_id))
        group = self.population[client_id].group
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        beside = [module for module in modules if isinstance(module, Model) and module is not model]
        flexible = self._takes_channels_last(client_id, model, *beside)
        for module in modules if flexible else ():
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        source = self._laid_out(self.sources[group], flexible, modules)
        return self._live(
            client_id, source, {name: to_device(value, self.device) for name, value in state.items()}
        )

    def _laid_out(self, source: Source, flexible: bool, modules: Iterable[nn.Module]) -> Source:
        """The source with the layout that the client's models need, or that saves their convolutions copies."""
        if source.channels_last:
            return source if flexible else replace(source, layout=torch.contiguous_format)
        if flexible and self.device.type == "cpu" and any(map(_has_convolutions, modules)):
            return replace(source, layout=torch.channels_last)
        return source

    def copied_client(self, client_id: ClientId, other: Client) -> Client:
        """A live client like another one of its kind, in any state; faster than to build it where a model is deep.

        A module that holds a function, as a hook does, is built: its copy could call into the other's.
        """
        if not all(map(_is_plain, other.modules().values())):
            return self.build_client(client_id)
        state = {name: part.content for name, part in other.parts.items()}
        return self._live(client_id, other.source, copy.deepcopy(state))

    def _live(self, client_id: ClientId, source: Source, state: Mapping[str, object]) -> Client:
        """A live client with this state, in one piece of memory."""
        client = Client(self.population.task_of(client_id), source, self.device, self.precision)
        client.public_data = self.public(client_id)
        buffers: BufferPolicy = self.method.config.buffers
        client.declare(state, buffers)
        client.pack()
        self.assign(client, client_id)
        return client

    def assign(self, client: Client, client_id: ClientId) -> None:
        """Let a live client be this one: its data and its own training values."""
        if client.id == client_id:
            return
        split = self.split[client_id]
        client.id = client_id
        client.rows = {"train": split.train, "validation": split.validation, "test": split.test}
        client.rows["global"] = self.shared_test(client_id)
        client.classes_held = self.population.classes_held(client_id)
        client.training = self.client_training(client_id)
        client.secret = self._secret(client_id)

    def enter(self, client: Client, round_: int, counters: dict[str, int]) -> None:
        """Let a client enter a round, with its own branch of the randomness."""
        client.enter(round_, self._draws.child("round", round_, "client", client.id), counters)

    def public(self, client: ClientId) -> Public | None:
        """The public data as a client sees it, on this builder's device."""
        return self._publics[self.population[client].group] if self._publics else None

    def client_training(self, client: ClientId) -> ClientTraining:
        """The training values of one client."""
        own = self.overrides.get(client)
        return self.training if own is None else own.apply(self.training)

    def shared_test(self, client: ClientId) -> np.ndarray:
        """The rows of the test set that the clients of a group share."""
        group = self.population[client].group
        if group not in self._shared_tests:
            self._shared_tests[group] = shared_test(self.groups[group].data, self.clients_of(group))
        return self._shared_tests[group]

    def clients_of(self, group: int) -> ClientSplits:
        """The clients of a group with their rows."""
        start = sum(part.clients for part in self.groups[:group])
        return self.split.clients[start : start + self.groups[group].clients]

    def fingerprints(self) -> dict[str, str]:
        """A hash of the weights each architecture starts from; modules of one's own may bring any."""
        first = {self._form(client): client for client in reversed(self.population.representatives)}
        return {form: fingerprint(self.build_model(client)) for form, client in first.items()}

    def _form(self, client: ClientId) -> str:
        """The key of clients whose models are alike: in shape, and in the data a captured step reads."""
        facts = self.population[client]
        return facts.architecture if len(self.groups) == 1 else f"{facts.architecture} group={facts.group}"

    def _place_data(self, device: torch.device) -> None:
        """Bring the data to a device, prepared where nothing about that is random; equal groups share it."""
        self.device = device
        placed: dict[tuple[int, int, int], Source] = {}
        self.sources = []
        for group, samples in zip(self.groups, self._samples, strict=True):
            key = id(group.data), id(group.prepare), id(samples)
            placed[key] = placed.get(key) or self._placed(group, samples)
            self.sources.append(placed[key])
        self._publics = self._make_publics(device)

    def _placed(self, group: GroupData, samples: Tensor | None) -> Source:
        data, device = group.data, self.device
        x = data.x if samples is None else samples
        source = Source(x.to(device), data.y.to(device), group.prepare)
        settled = device.type == "cuda" and data.x.dim() == 4 and not group.augmented
        if not settled or data.x.numel() * 4 >= torch.cuda.mem_get_info(device)[0] / 8:
            return source  # as floating numbers the samples would take much of the device's memory
        return source.prepared(self._channels_last(group))

    def _channels_last(self, group: GroupData) -> bool:
        """Where convolutions are faster on images stored as height, width, channels."""
        return group.data.x.dim() == 4 and (self.device.type == "cpu" or self.precision != "float32")

    def _takes_channels_last(self, client: ClientId, model: Model, *beside: Model) -> bool:
        """Whether a model gets such images, and it and those beside it run on them; tried once per form."""
        if not self._channels_last(self.groups[self.population[client].group]):
            return False
        form = self._form(client)
        if form not in self._flexible:
            always = self.device.type == "cpu" or self.precision == "bfloat16"
            task, gains = self.population.task_of(client), always or _gains_from_channels_last(model)
            self._flexible[form] = gains and all(_runs_channels_last(each, task) for each in (model, *beside))
        return self._flexible[form]


def to_device(value: object, device: torch.device) -> object:
    """Move a module or a tensor; a mapping of tensors stays the object it is."""
    if isinstance(value, dict):
        for name, tensor in value.items():
            value[name] = tensor.to(device)
        return value
    return value.to(device) if hasattr(value, "to") else value


_PLAIN = (str, int, float, type, type(None), torch.dtype, torch.device)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module and those below it hold data alone, so that a copy shares nothing with it."""
    return all(
        key == "_modules" or _is_data(value)
        for layer in module.modules()
        for key, value in vars(layer).items()
    )


def _is_data(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.is_leaf  # others have a history, which is not copied
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_data, value))
    return isinstance(value, _PLAIN)


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in module.modules())


def _gains_from_channels_last(model: Model) -> bool:
    """Whether tf32 convolutions of a model are faster so on a GPU: if there are many.

    Two convolutions on few channels are as fast in either layout. For depthwise ones cuDNN compiles kernels anew
    for every size of batch, four seconds for a MobileNet, which only thousands of steps repay.
    """
    found = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    depthwise = any(layer.groups == layer.in_channels > 1 for layer in found)
    return len(found) >= DEEP and not depthwise


def _runs_channels_last(model: Model, task: Task) -> bool:
    """A model that reshapes with `view` does not."""
    probe = copy.deepcopy(model).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            probe(torch.zeros(2, *task.input).contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return False
    return True
