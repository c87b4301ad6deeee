"""The world of an experiment: data, split, models and seeds, none of which a method can influence."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import nn

from potluck.client import Card, Client, ClientId
from potluck.data import Dataset, Split
from potluck.errors import ConfigError
from potluck.message import Message, Shapes
from potluck.method import Method
from potluck.models import Model, ModelPool
from potluck.rng import Rng, Seeds
from potluck.server import Server
from potluck.settings import ClientOverrides, ClientTraining
from potluck.state import BufferPolicy, Part, Precision
from potluck.streams import Prepare, Source
from potluck.task import Task


class World:
    """Builds clients, cards and the server; everything comes from the seeds and the split."""

    def __init__(
        self,
        *,
        method: Method,
        data: Dataset,
        split: Split,
        pool: ModelPool,
        seeds: Seeds,
        training: ClientTraining,
        overrides: Mapping[ClientId, ClientOverrides] | None = None,
        prepare: Prepare | None = None,
        augmented: bool = True,
        independent_init: bool = False,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        self.method, self.data, self.split, self.pool, self.seeds = method, data, split, pool, seeds
        self.training, self.overrides = training, dict(overrides or {})
        self.independent_init = independent_init
        self.precision = precision
        self.task: Task = data.task
        self._prepare, self._augmented = prepare, augmented
        self._settle(torch.device(device))
        self._labels = data.y.cpu().numpy()
        self._splits = {client.id: client for client in split.clients}
        self._index = {client.id: number for number, client in enumerate(split.clients)}
        self._named: dict[str, tuple[int, Shapes]] = {}
        self._held: dict[ClientId, tuple[int, ...]] = {}
        self._kinds: dict[ClientId, str] = {}
        self._stems: dict[str, tuple[int, ...]] = {}
        self.cards: Mapping[ClientId, Card] = _Cards(self)
        for client in self.overrides:
            if client not in self._splits:
                raise ConfigError(f"training.per_client names client {client!r}, which does not exist")

    def _settle(self, device: torch.device) -> None:
        """Bring the data to a device, prepared where nothing about that is random."""
        self.device, data = device, self.data
        self.source = Source(data.x.to(device), data.y.to(device), self._prepare)
        images = data.x.dim() == 4
        self.channels_last = images and device.type == "cuda" and self.precision == "bfloat16"
        if device.type == "cuda" and images and not self._augmented and self._fits_prepared():
            self.source = self.source.prepared(self.channels_last)

    def on(self, device: torch.device) -> World:
        """The same world with its data on another device."""
        other = copy.copy(self)
        other._settle(device)
        return other

    @property
    def ids(self) -> tuple[ClientId, ...]:
        """Every client, in order."""
        return tuple(self._splits)

    @cached_property
    def trainers(self) -> tuple[ClientId, ...]:
        """The clients that take part in training: all but the held-out ones."""
        held_out = set(self.split.held_out)
        return tuple(client for client in self._splits if client not in held_out)

    def cohort(self, round_: int, size: int) -> tuple[ClientId, ...]:
        """The clients of a round, in client order; the draw depends on the cohort seed and the round alone."""
        draw = self.seeds.tree("cohort").child("round", round_).numpy()
        chosen = draw.choice(len(self.trainers), size=min(size, len(self.trainers)), replace=False)
        return tuple(self.trainers[number] for number in sorted(chosen))

    def architecture(self, client: ClientId) -> str:
        """The key of a client's architecture."""
        return self.pool.key(self._index[client], client, len(self._index))

    def kind(self, client: ClientId) -> str:
        """The key of clients whose states are alike in shape: one live client can be any of them."""
        if client not in self._kinds:
            options = (f"{name}={value}" for name, value in self.method.client_options(client).items())
            self._kinds[client] = " ".join([self.architecture(client), *options])
        return self._kinds[client]

    def label(self, client: ClientId) -> str:
        """A short name of a client's model."""
        return self.pool.label(self._index[client], client, len(self._index))

    def origin(self, client: ClientId) -> str:
        """What a client's initial state is made from: its architecture, or the client itself."""
        return client if self.independent_init else self.architecture(client)

    def build_model(self, client: ClientId) -> Model:
        """The client's private model as it starts: the same whatever the method."""
        with self._init(client, "model").as_default():
            return self.pool.build(self.architecture(client), self.task, who=f"client {client}")

    def _fits_prepared(self) -> bool:
        """Whether the prepared samples, as floating numbers, take little of the device's memory."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.data.x.numel() * 4 < free / 8

    def fingerprints(self) -> dict[str, str]:
        """A hash of the weights each architecture starts from; modules of one's own may bring any."""
        first = {self.architecture(client): client for client in reversed(self.ids)}
        return {
            key: hashlib.sha256(Message(dict(self.build_model(client).state_dict())).encode()).hexdigest()
            for key, client in first.items()
        }

    def build_client(self, client_id: ClientId) -> Client:
        """A live client in its initial state."""
        model = self.build_model(client_id)
        with self._init(client_id, "state").as_default():
            state = self.method.client_state(self.task, model, **self.method.client_options(client_id))
        for module in state.values() if self.channels_last else ():
            if isinstance(module, nn.Module):
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        client = Client(self.task, self.source, self.device, self.precision)
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
        client.rows["global"] = self.global_test
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
            labels = np.unique(self._labels[self._splits[client].train])
            self._held[client] = tuple(int(label) for label in labels)
        return self._held[client]

    def samples(self, client: ClientId) -> dict[str, int]:
        """The size of each split of a client."""
        split = self._splits[client]
        return {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)}

    @cached_property
    def global_test(self) -> np.ndarray:
        """The rows of the global test set: the official one, or all clients' test parts together."""
        official = np.arange(self.data.train_rows, len(self.data.y))
        used = np.zeros(len(self.data.y), dtype=bool)
        for client in self.split.clients:
            used[client.train] = True
        if len(official) and not used[official].any():
            return official
        return np.sort(np.concatenate([client.test for client in self.split.clients]))

    def server(self) -> Server:
        """The server in its initial state."""
        server = Server(self.task, self.cards, self.device, self.precision)
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
        return Card(client, len(self._splits[client].train), self.task, extra)

    def width(self, client: ClientId) -> int:
        """The width of a client's representation."""
        return self._described(client)[0]

    def names(self, client: ClientId) -> Shapes:
        """The tensors of a client's model that may cross, with their shapes."""
        return self._described(client)[1]

    def stem(self, client: ClientId) -> tuple[int, ...]:
        """The shape of one sample after the stem of a client's model, empty where the model has none."""
        key = self.architecture(client)
        if key not in self._stems:
            model = self.build_model(client)
            self._stems[key] = model.stem_shape(self.task) if model.has_stem else ()
        return self._stems[key]

    def _described(self, client: ClientId) -> tuple[int, Shapes]:
        key = self.architecture(client)
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
