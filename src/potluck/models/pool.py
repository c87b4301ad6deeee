"""The models of an experiment: which client has which, with one key per architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from potluck.core.model import Model
from potluck.core.task import Task
from potluck.core.trial import blame
from potluck.errors import ConfigError, ModelError, nearest
from potluck.models.build import Entry, Source, build, source_name, unpack
from potluck.models.check import check_width
from potluck.models.registry import POOLS, names

Order = Literal["cycle", "blocks"]
Entries = Entry | Sequence[Entry] | Mapping[str, Entry] | Mapping[int, Entry]


@dataclass(frozen=True)
class Outline:
    """What is known about a model without running it: names and shapes of its state, numbers of parameters."""

    signature: Mapping[str, tuple[int, ...]]
    parameters: int
    trained: int  # of them those that require a gradient
    batch_norm: bool
    width: int  # of the representation


class ModelPool:
    """Says which model each client has, and builds it.

    `entries` is one entry for all; a list, where client i gets entry i mod length (`order="cycle"`) or the
    clients are cut into as many even blocks as there are entries (`order="blocks"`); or a mapping from client
    id to entry. The name of a pool (`POOLS`) stands for the list of its models, and options beside it apply
    to each of them. `rep_dim` is the width for entries that do not set one. Entries of the same architecture
    share a key.

    >>> pool = ModelPool(["cnn1", {"name": "resnet18", "stem": "cifar"}])
    >>> [pool.key(i, str(i), total=4) for i in range(4)]
    ['cnn1', 'resnet18(stem=cifar)', 'cnn1', 'resnet18(stem=cifar)']

    `adapter` (linear, pool or max-pool) changes the width of models whose entries name none.
    """

    def __init__(
        self,
        entries: Entries,
        rep_dim: int | None = None,
        *,
        order: Order = "cycle",
        adapter: str | None = None,
    ) -> None:
        with blame("the model pool"):
            check_width(rep_dim)
        if order not in get_args(Order):
            raise ConfigError(f"unknown order {order!r} of models; {nearest(order, get_args(Order))}")
        self.rep_dim = rep_dim
        self.order = order
        self.adapter = adapter
        self._clients, listed = _listed(entries)
        self._entries: dict[str, Entry] = {}
        self._places = _keys(listed)
        for key, entry in zip(self._places, listed, strict=True):
            self._entries.setdefault(key, entry)
        self._outlines: dict[tuple[str, Task, int | None], Outline] = {}
        self._checked: set[tuple[str, Task, int | None]] = set()

    @classmethod
    def of_keys(
        cls,
        entries: Mapping[str, Entry],
        clients: Mapping[str, str],
        rep_dim: int | None = None,
        adapter: str | None = None,
    ) -> Self:
        """A pool whose architectures have given keys, and who has which: that of a run, made again."""
        pool = cls(list(entries.values()), rep_dim, adapter=adapter)
        pool._entries, pool._places = dict(entries), list(entries)
        places = {key: place for place, key in enumerate(entries)}
        pool._clients = {client: places[key] for client, key in clients.items()}
        return pool

    @property
    def entries(self) -> dict[str, Entry]:
        """The entry of every architecture, by its key."""
        return dict(self._entries)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of every architecture, in the order of first mention."""
        return tuple(self._entries)

    @property
    def labels(self) -> dict[str, str]:
        """A short name for every key: the model's name, unless several keys share it."""
        called = {key: source_name(unpack(entry)[0]) for key, entry in self._entries.items()}
        counts = list(called.values())
        return {key: name if counts.count(name) == 1 else key for key, name in called.items()}

    def key(self, client_index: int, client_id: str, total: int) -> str:
        """The key of a client's architecture."""
        if self._clients is not None:
            if client_id not in self._clients:
                raise ConfigError(f"client {client_id}: it has no model; name it in the mapping of models")
            return self._places[self._clients[client_id]]
        if not 0 <= client_index < total:
            raise ConfigError(
                f"client {client_id}: its index {client_index} is not below the total of {total}"
            )
        if self.order == "cycle":
            return self._places[client_index % len(self._places)]
        return self._places[client_index * len(self._places) // total]

    def firsts(self, places: range, client_ids: Sequence[str], total: int) -> list[int]:
        """The places of the first client of each architecture, among some of the clients."""
        found: dict[str, int] = {}
        for place in self._candidates(places, total):
            found.setdefault(self.key(place, client_ids[place], total), place)
        return sorted(found.values())

    def _candidates(self, places: range, total: int) -> Iterable[int]:
        """Places among which each architecture comes for the first time; by far not all where they are dealt."""
        if self._clients is not None:
            return places
        kinds = len(self._places)
        if self.order == "cycle":
            return places[:kinds]
        starts = {places.start, *(-(-kind * total // kinds) for kind in range(kinds))}
        return sorted(place for place in starts if place in places)

    def entry(self, client_index: int, client_id: str, total: int) -> Entry:
        """A client's entry as it was given."""
        return self._entries[self.key(client_index, client_id, total)]

    def label(self, client_index: int, client_id: str, total: int) -> str:
        """A short name of a client's model, for people."""
        return self.labels[self.key(client_index, client_id, total)]

    def cover(self, client_ids: Iterable[str]) -> None:
        """Refuse a mapping that leaves clients out or names unknown ones."""
        if self._clients is None:
            return
        wanted = list(client_ids)
        missing = [client for client in wanted if client not in self._clients]
        unknown = [client for client in self._clients if client not in set(wanted)]
        if missing:
            raise ConfigError(
                f"the mapping of models leaves out {_counted(missing)}; give each client a model"
            )
        if unknown:
            hint = nearest(unknown[0], wanted) if len(wanted) <= 10 else f"there are {len(wanted)} clients"
            raise ConfigError(
                f"the mapping of models names client {unknown[0]}, which does not exist; {hint}"
            )

    def build(self, entry: Entry, task: Task, rep_dim: int | None = None, *, who: str = "model") -> Model:
        """A fresh model for a key or an entry; `rep_dim` overrides the entry's width, which overrides the pool's.

        The first model of a key, task and width is tried on a made-up batch; later ones are the same.
        """
        if not (isinstance(entry, str) and entry in self._entries):
            return build(entry, task, self._width(entry, rep_dim), who=who, default_adapter=self.adapter)
        place = (entry, task, rep_dim)
        model = self._build(entry, task, rep_dim, who, check=place not in self._checked)
        self._checked.add(place)
        if place not in self._outlines:
            self._outlines[place] = _outline(model)
        return model

    def signature(self, key: str, task: Task, rep_dim: int | None = None) -> dict[str, tuple[int, ...]]:
        """Names and shapes of parameters and buffers."""
        return dict(self._outline(key, task, rep_dim).signature)

    def parameters(self, key: str, task: Task, rep_dim: int | None = None) -> int:
        """The number of parameters."""
        return self._outline(key, task, rep_dim).parameters

    def width(self, key: str, task: Task) -> int:
        """The width of the representation."""
        return self._outline(key, task, None).width

    def sets_width(self, key: str) -> bool:
        """Whether an entry has a width of its own, whatever that of the pool is."""
        entry = self._entries[key]
        return isinstance(entry, Mapping) and entry.get("rep_dim") is not None

    def is_frozen(self, key: str, task: Task, *, who: str) -> bool:
        """Whether the model has no parameter that requires a gradient."""
        return not self._outline(key, task, None, who).trained

    def has_batch_norm(self, key: str, task: Task) -> bool:
        """Whether the model has batch norm."""
        return self._outline(key, task, None).batch_norm

    def smallest(self, task: Task) -> str:
        """The key with the fewest parameters among those that fit the task."""
        sizes = self._sizes(task)
        return min(sizes, key=sizes.__getitem__)

    def largest(self, task: Task) -> str:
        """The key with the most parameters among those that fit the task."""
        sizes = self._sizes(task)
        return max(sizes, key=sizes.__getitem__)

    def _sizes(self, task: Task) -> dict[str, int]:
        """The number of parameters of every key that fits the task; of none: the first one's error."""
        sizes: dict[str, int] = {}
        errors: list[ModelError] = []
        for key in self.keys:
            try:
                sizes[key] = self.parameters(key, task)
            except ModelError as error:
                errors.append(error)
        if not sizes:
            raise errors[0]
        return sizes

    def _width(self, entry: Entry, rep_dim: int | None) -> int | None:
        own = entry.get("rep_dim") if isinstance(entry, Mapping) else None
        return next((width for width in (rep_dim, own, self.rep_dim) if width is not None), None)

    def _build(self, key: str, task: Task, rep_dim: int | None, who: str, check: bool) -> Model:
        entry = self._entries[key]
        width = self._width(entry, rep_dim)
        return build(entry, task, width, who=who, check=check, default_adapter=self.adapter)

    def _outline(self, key: str, task: Task, rep_dim: int | None, who: str = "the model pool") -> Outline:
        if key not in self._entries:
            raise ModelError(f"unknown key {key!r} of the model pool; {nearest(key, self.keys)}")
        place = (key, task, rep_dim)
        if place not in self._outlines:
            with torch.random.fork_rng(devices=[]):
                self._outlines[place] = self._measure(key, task, rep_dim, who)
        return self._outlines[place]

    def _measure(self, key: str, task: Task, rep_dim: int | None, who: str) -> Outline:
        """Registered models are built on the meta device; others for real, as a callable may keep its module."""
        if isinstance(unpack(self._entries[key])[0], str):
            try:
                with torch.device("meta"):
                    return _outline(self._build(key, task, rep_dim, who, check=False))
            except (ModelError, RuntimeError):
                pass  # a builder that reads values needs real memory; a broken one raises its error below
        return _outline(self._build(key, task, rep_dim, who, check=True))


def _outline(model: Model) -> Outline:
    state = {
        name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    batch_norm = any(isinstance(part, _BatchNorm) for part in model.modules())
    return Outline(state, size, trained, batch_norm, int(model.rep_dim))


def _listed(entries: Entries) -> tuple[dict[str, int] | None, list[Entry]]:
    """The entries as a list and, for a mapping, the position of each client's entry."""
    if isinstance(entries, Mapping) and not {"name", "model"} & set(entries):
        clients = {str(client): place for place, client in enumerate(entries)}
        listed: list[Entry] = list(entries.values())
        if len(clients) != len(listed):
            raise ConfigError(
                "the mapping of models names a client twice, as a number and as a text; name it once"
            )
    else:
        clients = None
        given = list(entries) if isinstance(entries, list | tuple) else [cast(Entry, entries)]
        listed = [member for entry in given for member in _members(entry)]
    if not listed:
        raise ConfigError("the model pool is empty; give at least one model")
    return clients, listed


def _members(entry: Entry) -> list[Entry]:
    """The models of a named pool, each with the options beside the pool's name; else the entry itself."""
    name = entry.get("name") if isinstance(entry, Mapping) else entry
    if not isinstance(name, str) or name not in POOLS or name in names():
        return [entry]
    return [{**entry, "name": member} if isinstance(entry, Mapping) else member for member in POOLS[name]]


def _keys(entries: list[Entry]) -> list[str]:
    """A key per entry: name and options, or for a callable or module the position of its first mention."""
    keys: list[str] = []
    first: dict[int, int] = {}
    meaning: dict[str, dict[str, object]] = {}
    for place, entry in enumerate(entries):
        with blame("the model pool"):
            source, options = unpack(entry)
        key = _source_key(source, first.setdefault(id(source), place)) + _option_text(options)
        if (
            meaning.setdefault(key, options) != options
        ):  # options that only look the same, such as two lambdas
            key += f"@{place}"
        keys.append(key)
    return keys


def is_module_key(key: str) -> bool:
    """Whether the key of an architecture is that of a module, and not of a name, class or function."""
    return re.match(r"module-\d+:", key) is not None


def _source_key(source: Source, place: int) -> str:
    if isinstance(source, str):
        return source
    return f"{'module' if isinstance(source, nn.Module) else 'callable'}-{place}:{source_name(source)}"


def _option_text(options: Mapping[str, object]) -> str:
    text = ",".join(f"{name}={getattr(options[name], '__name__', options[name])}" for name in sorted(options))
    return f"({text})" if text else ""


def _counted(clients: list[str]) -> str:
    shown = ", ".join(clients[:5])
    more = f" and {len(clients) - 5} more" if len(clients) > 5 else ""
    return f"client {shown}" if len(clients) == 1 else f"clients {shown}{more}"
