"""The world of an experiment: data, split, models and seeds, none of which a method can influence."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from potluck.core.card import Card, ClientId
from potluck.core.client import Client
from potluck.core.contract import Shapes, shapes_below
from potluck.core.dataset import Data, Dataset
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.model import Model
from potluck.core.public import Public, check_same_samples
from potluck.core.rng import Rng, Seeds
from potluck.core.server import Server
from potluck.core.settings import ClientOverrides, ClientTraining
from potluck.core.state import BufferPolicy, Part, Precision
from potluck.core.streams import Prepare, Source
from potluck.core.task import Task
from potluck.data import ClientSplit, Split
from potluck.data.public import public_for
from potluck.errors import ConfigError
from potluck.models import ModelPool
from potluck.models.probe import stem_shape, trains_body


@dataclass(frozen=True)
class Ground:
    """What a group of clients works on: a data set, which is also their task, and how its samples are prepared."""

    data: Dataset
    clients: int  # how many, in the order of the split
    prepare: Prepare | None = None
    augmented: bool = True


class World:
    """Builds clients, cards and the server; everything comes from the seeds and the split.

    Clients of different grounds have different data sets, and perhaps tasks. `task` is that of the first ground:
    of all clients, unless the method says that it takes any.
    """

    def __init__(
        self,
        *,
        method: Method,
        data: Data,
        split: Split,
        pool: ModelPool,
        seeds: Seeds,
        training: ClientTraining,
        overrides: Mapping[ClientId, ClientOverrides] | None = None,
        participation: float = 1.0,
        prepare: Prepare | None = None,
        augmented: bool = True,
        grounds: Sequence[Ground] = (),
        public: tuple[Dataset, np.ndarray] | None = None,
        independent_init: bool = False,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        self.method, self.data, self.split, self.pool, self.seeds = method, data, split, pool, seeds
        self.training, self.overrides = training, dict(overrides or {})
        self.participation = participation
        self.method_name = method.name
        self.independent_init = independent_init
        self.precision = precision
        if isinstance(data, Dataset):
            grounds = grounds or [Ground(data, len(split), prepare, augmented)]
        self.grounds = tuple(grounds)
        places = (place for place, ground in enumerate(self.grounds) for _ in range(ground.clients))
        self._places = dict(zip(split.ids, places, strict=True))
        self.task: Task = self.grounds[0].data.task
        self._public_samples = public  # a data set, and the ids of the samples that are public
        self._settle(torch.device(device))
        self._splits = {client.id: client for client in split.clients}
        self._index = {client.id: number for number, client in enumerate(split.clients)}
        self._named: dict[str, tuple[int, Shapes]] = {}
        self._held: dict[ClientId, tuple[int, ...]] = {}
        self._kinds: dict[ClientId, str] = {}
        self._stems: dict[str, tuple[int, ...]] = {}
        self._bodies: dict[str, bool] = {}
        self._flexible: dict[str, bool] = {}
        self._global_tests: dict[int, np.ndarray] = {}
        self.cards: Mapping[ClientId, Card] = _Cards(self)
        for client in self.overrides:
            if client not in self._splits:
                raise ConfigError(f"training.per_client names client {client!r}, which does not exist")

    def _settle(self, device: torch.device) -> None:
        """Bring the data to a device, prepared where nothing about that is random; equal grounds share it."""
        self.device = device
        placed: dict[tuple[int, int], Source] = {}
        for ground in self.grounds:
            key = id(ground.data), id(ground.prepare)
            placed[key] = placed.get(key) or self._placed(ground)
        self._sources = [placed[id(ground.data), id(ground.prepare)] for ground in self.grounds]
        self.source = self._sources[0]
        self._publics = [] if self._public_samples is None else [*map(self._public_for, self.grounds)]

    def _public_for(self, ground: Ground) -> Public:
        assert self._public_samples is not None
        rng = self.seeds.tree("training").child("public")
        return public_for(*self._public_samples, ground.data, ground.prepare, rng, self.device)

    def _placed(self, ground: Ground) -> Source:
        data, device = ground.data, self.device
        source = Source(data.x.to(device), data.y.to(device), ground.prepare)
        settled = device.type == "cuda" and data.x.dim() == 4 and not ground.augmented
        return source.prepared(self._channels_last(data)) if settled and self._fits_prepared(data) else source

    def _channels_last(self, data: Dataset) -> bool:
        """Where convolutions are faster on images stored as height, width, channels."""
        return data.x.dim() == 4 and (self.device.type == "cpu" or self.precision == "bfloat16")

    def _takes_channels_last(self, client: ClientId, model: Model) -> bool:
        """Whether a model runs on such images; one that reshapes with `view` does not. Tried once per form."""
        form = self._form(client)
        if form not in self._flexible:
            self._flexible[form] = _runs_channels_last(model, self.task_of(client))
        return self._flexible[form]

    def on(self, device: torch.device) -> World:
        """The same world with its data on another device."""
        other = copy.copy(self)
        other._settle(device)
        return other

    @property
    def population(self) -> World:
        """The facts about the clients, as engines read them."""
        return self

    @property
    def ids(self) -> tuple[ClientId, ...]:
        """Every client, in order."""
        return tuple(self._splits)

    @cached_property
    def trainers(self) -> tuple[ClientId, ...]:
        """The clients that take part in training: all but the held-out ones."""
        held_out = set(self.split.held_out)
        return tuple(client for client in self._splits if client not in held_out)

    @property
    def cohort_size(self) -> int:
        """How many clients a round has."""
        return max(1, round(self.participation * len(self.trainers)))

    def cohort(self, round_: int, size: int) -> tuple[ClientId, ...]:
        """The clients of a round, in client order; the draw depends on the cohort seed and the round alone."""
        draw = self.seeds.tree("cohort").child("round", round_).numpy()
        chosen = draw.choice(len(self.trainers), size=min(size, len(self.trainers)), replace=False)
        return tuple(self.trainers[number] for number in sorted(chosen))

    @cached_property
    def first_clients(self) -> tuple[ClientId, ...]:
        """The first client of each ground: what is true of its task and data is true of the others'."""
        first = {place: client for client, place in reversed(self._places.items())}
        return tuple(first[place] for place in sorted(first))

    def ground(self, client: ClientId) -> Ground:
        """What a client works on."""
        return self.grounds[self._places[client]]

    def task_of(self, client: ClientId) -> Task:
        """A client's task: that of its data set."""
        return self.ground(client).data.task

    def public(self, client: ClientId | None = None) -> Public | None:
        """The public data as a client sees it, or the server: in the form of the first client's."""
        place = 0 if client is None else self._places[client]
        return self._publics[place] if self._publics else None

    def architecture(self, client: ClientId) -> str:
        """The key of a client's architecture."""
        return self.pool.key(self._index[client], client, len(self._index))

    def kind(self, client: ClientId) -> str:
        """The key of clients whose states are alike in shape: one live client can be any of them."""
        if client not in self._kinds:
            options = (f"{name}={value}" for name, value in self.method.client_options(client).items())
            self._kinds[client] = " ".join([self._form(client), *options])
        return self._kinds[client]

    def _form(self, client: ClientId) -> str:
        """The key of clients whose models are alike: in shape, and in the data a captured step reads."""
        architecture = self.architecture(client)
        return architecture if len(self.grounds) == 1 else f"{architecture} group={self._places[client]}"

    def label(self, client: ClientId) -> str:
        """A short name of a client's model."""
        return self.pool.label(self._index[client], client, len(self._index))

    def origin(self, client: ClientId) -> str:
        """What a client's initial state is made from: its architecture, or the client itself."""
        return client if self.independent_init else self.architecture(client)

    def build_model(self, client: ClientId) -> Model:
        """The client's private model as it starts: the same whatever the method."""
        with self._init(client, "model").as_default():
            return self.pool.build(self.architecture(client), self.task_of(client), who=f"client {client}")

    def _fits_prepared(self, data: Dataset) -> bool:
        """Whether the prepared samples, as floating numbers, take little of the device's memory."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return data.x.numel() * 4 < free / 8

    def fingerprints(self) -> dict[str, str]:
        """A hash of the weights each architecture starts from; modules of one's own may bring any."""
        first = {self._form(client): client for client in reversed(self.ids)}
        return {
            key: hashlib.sha256(Message(dict(self.build_model(client).state_dict())).encode()).hexdigest()
            for key, client in first.items()
        }

    def build_client(self, client_id: ClientId) -> Client:
        """A live client in its initial state."""
        model, task = self.build_model(client_id), self.task_of(client_id)
        with self._init(client_id, "state").as_default():
            state = self.method.client_state(task, model, **self.method.client_options(client_id))
        source, images = (
            self._sources[self._places[client_id]],
            self._channels_last(self.ground(client_id).data),
        )
        flexible = images and self._takes_channels_last(client_id, model)
        for module in state.values() if flexible else ():
            if isinstance(module, nn.Module):
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if source.channels_last and not flexible:
            source = replace(source, contiguous=True)
        client = Client(task, source, self.device, self.precision)
        client.public_data = self.public(client_id)
        client.declare({name: _to(value, self.device) for name, value in state.items()}, self._buffers)
        client.pack()
        self.assign(client, client_id)
        return client

    def assign(self, client: Client, client_id: ClientId) -> None:
        """Let a live client be this one: its data and its own training values."""
        if client.id == client_id:
            return
        split = self._splits[client_id]
        client.id = client_id
        client.rows = {"train": split.train, "validation": split.validation, "test": split.test}
        client.rows["global"] = self.global_test(client_id)
        client.classes_held = self.classes_held(client_id)
        client.training = self.client_training(client_id)
        client.secret = self.seeds.secret(client_id)

    def enter(self, client: Client, round_: int, counters: dict[str, int]) -> None:
        """Let a client enter a round, with its own branch of the randomness."""
        rng = self.seeds.tree("training").child("round", round_, "client", client.id)
        client.enter(round_, rng, counters)

    def client_training(self, client: ClientId) -> ClientTraining:
        """The training values of one client."""
        own = self.overrides.get(client)
        return self.training if own is None else own.apply(self.training)

    def classes_held(self, client: ClientId) -> tuple[int, ...]:
        """The classes a client has training samples of."""
        if client not in self._held:
            data = self.ground(client).data
            self._held[client] = data.task.rules.held(data.y.cpu().numpy()[self._splits[client].train])
        return self._held[client]

    def class_names(self, client: ClientId) -> tuple[str, ...]:
        """What the classes of a client's task are called."""
        return self.ground(client).data.class_names

    def samples(self, client: ClientId) -> dict[str, int]:
        """The size of each split of a client."""
        split = self._splits[client]
        return {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)}

    def global_test(self, client: ClientId) -> np.ndarray:
        """The rows of the test set clients of a ground share: the official one, or their test parts together."""
        place = self._places[client]
        if place not in self._global_tests:
            own = [part for part in self.split.clients if self._places[part.id] == place]
            self._global_tests[place] = _global_test(self.grounds[place].data, own)
        return self._global_tests[place]

    def save_split(self, path: Path) -> None:
        """Write down who has which rows, and how many of which class."""
        self.split.save(path, [(ground.data, ground.clients) for ground in self.grounds])

    def server(self) -> Server:
        """The server in its initial state."""
        server = Server(self.task, self.cards, self.device, self.precision)
        server.public_data = self.public()
        own = {"lr_decay": 1.0, "clip": None}  # the clients' schedule and clipping are theirs
        server.training = self.training.model_copy(update=own)
        with self.seeds.tree("init").child("server").as_default():
            state = self.method.server_state(self.task)
        placed = {name: _to(value, self.device) for name, value in state.items()}
        server.declare(placed, self._buffers, remember=True)
        return server

    def server_rng(self, round_: int) -> Rng:
        """The server's branch of the randomness in a round."""
        return self.seeds.tree("training").child("round", round_, "server")

    def card(self, client: ClientId) -> Card:
        """What a client says of itself: only what the method asks for."""
        extra: dict[str, object] = {}
        fields = self.method.card_fields
        if "classes_held" in fields:
            extra["classes_held"] = self.classes_held(client)
        if "width" in fields:
            extra["width"] = self.width(client)
        if "stem" in fields:
            extra["stem"] = self.stem(client)
        if "names" in fields:
            extra["names"] = self.names(client)
        public = self.public()
        if public is not None:
            extra["public"] = public.fingerprint
        return Card(client, len(self._splits[client].train), self.task_of(client), extra)

    def width(self, client: ClientId) -> int:
        """The width of a client's representation."""
        return self._described(client)[0]

    def names(self, client: ClientId) -> Shapes:
        """The tensors of a client's model that may cross, with their shapes."""
        return self._described(client)[1]

    def head(self, client: ClientId) -> Shapes:
        """The tensors of a client's head, with their shapes; no model is built for it."""
        return shapes_below(self.pool.signature(self.architecture(client), self.task), "head")

    def stem(self, client: ClientId) -> tuple[int, ...]:
        """The shape of one sample after the stem of a client's model, empty where the model has none."""
        key = self._form(client)
        if key not in self._stems:
            model = self.build_model(client)
            self._stems[key] = stem_shape(model, self.task_of(client)) if model.has_stem else ()
        return self._stems[key]

    def trains_body(self, client: ClientId) -> bool:
        """Whether the body of a client's model has parameters to train."""
        key = self._form(client)
        if key not in self._bodies:
            self._bodies[key] = trains_body(self.build_model(client), self.task_of(client))
        return self._bodies[key]

    def _described(self, client: ClientId) -> tuple[int, Shapes]:
        key = self._form(client)
        if key not in self._named:
            model = self.build_model(client)
            wire = Part(model, self._buffers).wire()
            self._named[key] = (
                int(model.rep_dim),
                {name: tuple(value.shape) for name, value in wire.items()},
            )
        return self._named[key]

    def _init(self, client: ClientId, what: str) -> Rng:
        return self.seeds.tree("init").child(what, self.origin(client))

    @property
    def _buffers(self) -> BufferPolicy:
        policy: BufferPolicy = self.method.config.buffers
        return policy


def check_public(world: World) -> None:
    """Refuse clients that can read nothing of the public data, or mean other samples than the server."""
    own = world.public()
    for client in world.first_clients:
        view = world.public(client)
        if view is not None and not bool(view.mask.any()):
            raise ConfigError(
                f"{world.method.name}: client {client} can read nothing of the public data {view.name!r}, which is "
                "not in its modality; choose a data set with pairs, such as cifar10-captions"
            )
    if own is not None:
        check_same_samples(own, {client: world.card(client) for client in world.first_clients})


def _global_test(data: Dataset, clients: Sequence[ClientSplit]) -> np.ndarray:
    official = np.arange(data.train_rows, len(data.y))
    used = np.zeros(len(data.y), dtype=bool)
    for client in clients:
        used[client.train] = True
    if len(official) and not used[official].any():
        return official
    return np.sort(np.concatenate([client.test for client in clients]))


class _Cards(Mapping[ClientId, Card]):
    """The cards of all clients that train, written when first read: a large federation costs nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._written: dict[ClientId, Card] = {}

    def __getitem__(self, client: ClientId) -> Card:
        if client not in self._written:
            self._written[client] = self._world.card(client)
        return self._written[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._world.trainers)

    def __len__(self) -> int:
        return len(self._world.trainers)


def _to(value: object, device: torch.device) -> object:
    """Move a module or a tensor; a mapping of tensors stays the object it is."""
    if isinstance(value, dict):
        for name, tensor in value.items():
            value[name] = tensor.to(device)
        return value
    return value.to(device) if hasattr(value, "to") else value


def _runs_channels_last(model: Model, task: Task) -> bool:
    probe = copy.deepcopy(model).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            probe(torch.zeros(2, *task.input))
    except RuntimeError:
        return False
    return True
