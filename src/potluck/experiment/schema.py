"""One experiment: what is trained, on what, by whom and how, checked before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from torch import nn

from potluck.core.dataset import Data, Dataset
from potluck.core.method import Method, MethodConfig
from potluck.core.rng import Rng, Seeds
from potluck.core.settings import ClientOverrides, ClientTraining, Settings
from potluck.data import DataConfig, PartitionConfig, Split, from_index_file, join_splits, make_split
from potluck.data.public import choose_ids
from potluck.engine.evaluate import EvaluateSettings
from potluck.engine.settings import EngineSettings, ask_for_queues
from potluck.errors import ConfigError, nearest
from potluck.experiment.overrides import Override, apply_override, read_yaml
from potluck.federation.federation import Federation, simulated
from potluck.federation.groups import GroupData
from potluck.methods.registry import find_method
from potluck.models import ModelPool
from potluck.plugins import load_plugin

SEVERAL = ("variants", "sweep")  # keys of a file that holds several experiments: see `sweep`


class IndexFile(Settings):
    """A split of one's own: `partition: {file: split.json}`."""

    file: Path


class Sites(Settings):
    """No split: every client brings its own data to a federation: `partition: {sites: [north, south]}`."""

    sites: tuple[str, ...] = Field(min_length=1)  # the clients, by the ids they join with
    classes: int | None = Field(default=None, ge=2)  # of the task all share; none: each site says its own

    @field_validator("sites", mode="before")
    @classmethod
    def _ids_as_text(cls, value: Any) -> Any:
        ids = [str(one) for one in value] if isinstance(value, list | tuple) else value
        if isinstance(ids, list) and len(set(ids)) < len(ids):
            raise ValueError("a client is named twice")
        return ids


class ModelSettings(Settings):
    """The clients' models: one entry, a list dealt out in turn, or a mapping from client to entry.

    An entry is a name, a mapping with a name and options, a callable that returns a module, or a module. The name
    of a pool stands for the list of its models.
    """

    pool: Any = None
    rep_dim: int | None = Field(default=None, ge=1)  # one representation width for every model
    adapter: Literal["linear", "pool", "max-pool"] | None = None  # what brings models to it; none: linear
    order: Literal["cycle", "blocks"] = "cycle"
    init: Literal["per_architecture", "per_client"] = "per_architecture"  # who starts from the same weights

    @field_serializer("pool")
    def _names(self, pool: Any) -> Any:
        return _plain_entries(pool)


class Group(Settings):
    """Clients of a federation that share a data set, and with it a task; their models as in `models.pool`."""

    data: DataConfig | Dataset = DataConfig()
    partition: PartitionConfig | IndexFile | Sites | Split
    models: Any

    @property
    def portable(self) -> bool:
        """Whether a YAML file can say all of it."""
        own = isinstance(self.data, Dataset) or isinstance(self.partition, Split)
        return not own and _is_plain(self.models)


class PublicSettings(Settings):
    """Unlabelled samples that the server and all clients can reach: `public: {data: cifar100, samples: 5000}`."""

    data: DataConfig | Dataset
    samples: int | None = Field(default=None, ge=1)  # drawn from the split seed; none: all to train on

    @field_validator("data")
    @classmethod
    def _prepared_by_clients(cls, data: DataConfig | Dataset) -> DataConfig | Dataset:
        plain = {key: field.default for key, field in DataConfig.model_fields.items()}
        for key in ("normalize", "augment", "tokenizer"):
            if isinstance(data, DataConfig) and getattr(data, key) != plain[key]:
                raise ValueError(f"leave out {key}, as clients prepare public samples like their own")
        return data


class TrainingSettings(ClientTraining):
    """How long and how the clients train."""

    rounds: int = Field(default=10, ge=1)
    participation: float = Field(default=1.0, gt=0, le=1)  # share of the clients in a round
    quorum: float = Field(default=0.5, gt=0, le=1)  # share of the cohort that must answer
    attempts: int = Field(default=2, ge=1)  # tries at a round that misses the quorum
    per_client: dict[str, ClientOverrides] = {}

    @field_validator("per_client", mode="before")
    @classmethod
    def _ids_as_text(cls, value: Any) -> Any:
        """YAML reads the client id 3 as a number."""
        return {str(client): own for client, own in value.items()} if isinstance(value, Mapping) else value

    def for_clients(self) -> ClientTraining:
        """The part a client sees."""
        return ClientTraining(**{name: getattr(self, name) for name in ClientTraining.model_fields})


class CheckpointSettings(Settings):
    """How often a run can be resumed from."""

    # seconds between checkpoints; 0: after every round; or never
    every: float = Field(default=60.0, ge=0, allow_inf_nan=True)

    @field_validator("every", mode="before")
    @classmethod
    def _with_unit(cls, value: Any) -> Any:
        """`60s`, `5m`, `1h`, a number of seconds, or `never`: a stopped run then starts over."""
        if value == "never":
            return math.inf
        found = re.fullmatch(r"\s*([\d.]+)\s*([smh])\s*", value) if isinstance(value, str) else None
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else value


class SeedSettings(Settings):
    """Seeds that are held while the others follow `seed`."""

    split: int | None = None
    init: int | None = None
    cohort: int | None = None
    training: int | None = None


class Experiment(Settings):
    """Everything that decides a run's numbers. From a YAML file, or from Python with one's own objects."""

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    data: DataConfig | Dataset = DataConfig()
    partition: PartitionConfig | IndexFile | Sites | Split | None = None
    models: ModelSettings = ModelSettings()
    federation: tuple[Group, ...] = ()  # groups of clients in place of data, partition and models.pool
    public: PublicSettings | None = None
    method: SerializeAsAny[MethodConfig]
    training: TrainingSettings = TrainingSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    engine: EngineSettings = EngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    seed: int = Field(default=0, ge=0)
    seeds: SeedSettings = SeedSettings()
    plugins: tuple[str, ...] = ()  # files or modules that register methods, data sets or models of one's own

    _folder: Path = PrivateAttr(default_factory=Path)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """`data: cifar10`, `models: [cnn1, cnn2]`, `method: fedavg`."""
        if not isinstance(values, dict):
            return values
        values = _with_blocks(values)
        models = values.get("models")
        if isinstance(values.get("federation"), list | tuple):
            values["federation"] = [_group(place, one) for place, one in enumerate(values["federation"])]
        elif models is not None and not isinstance(models, ModelSettings):
            values["models"] = models if isinstance(models, dict) and "pool" in models else {"pool": models}
        if isinstance(values.get("public"), str | Mapping):
            public = {"data": values["public"]} if isinstance(values["public"], str) else values["public"]
            values["public"] = _block(PublicSettings, "public", _with_blocks(public, "public."))
        return values

    @model_validator(mode="after")
    def _one_way_to_name_the_clients(self) -> Self:
        given = {
            "data": "data" in self.model_fields_set,
            "partition": self.partition,
            "models": self.models.pool,
        }
        for key, value in given.items():
            if not self.federation and key != "data" and value is None:
                raise ValueError(f"the key {key!r} is missing")
            if self.federation and value not in (None, False):
                raise ValueError(f"{key} stands beside federation; each of its groups has its own {key}")
        return self

    @field_validator("method", mode="before")
    @classmethod
    def _find_method(cls, value: Any) -> Any:
        if isinstance(value, MethodConfig):
            return value
        if not isinstance(value, str | Mapping):
            raise ValueError("give the name of a method, or a block with a name and its options")
        options = {"name": value} if isinstance(value, str) else dict(value)
        if "name" not in options:
            raise ValueError("method needs a name")
        return _block(find_method(str(options["name"])).Config, "method", options)

    @classmethod
    def make(cls, **values: Any) -> Self:
        """An experiment from Python values; a wrong one is told of in one sentence."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(one_sentence(error, cls)) from error

    @classmethod
    def load(cls, path: Path | str, overrides: Sequence[Override] = ()) -> Self:
        """An experiment from a YAML file, with overrides that reach any leaf; without its variants and sweep."""
        path = Path(path)
        values = {key: value for key, value in read_yaml(path).items() if key not in SEVERAL}
        for override in overrides:
            apply_override(values, override)
        for plugin in values.get("plugins") or ():
            load_plugin(str(plugin), path.resolve().parent)
        experiment = cls.make(**({"name": path.stem} | values))
        experiment._folder = path.resolve().parent
        return experiment

    def variant(self, **changes: Any) -> Self:
        """The same experiment with other top-level values."""
        values = {name: getattr(self, name) for name in self.model_fields_set} | changes
        experiment = type(self).make(**values)
        experiment._folder = self._folder
        return experiment

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the federation; without one all clients are one group."""
        if self.federation:
            return self.federation
        assert self.partition is not None  # checked above
        return (Group(data=self.data, partition=self.partition, models=self.models.pool),)

    @property
    def portable(self) -> bool:
        """Whether a YAML file can say all of it: no data, split, model or callable of one's own."""
        own = self.public is not None and isinstance(self.public.data, Dataset)
        return not own and _is_plain(self.method.model_dump()) and all(one.portable for one in self.groups)

    def to_yaml(self) -> str:
        """The whole experiment with every default written out; paths become absolute."""
        values = self.model_dump(
            mode="json", exclude={"data", "partition", "federation", "public"}, fallback=_plain
        )
        values["plugins"] = [
            str((self._folder / name).resolve()) if name.endswith(".py") else name for name in self.plugins
        ]
        written = [self._group_block(group) for group in self.groups]
        if self.federation:
            del values["models"]["pool"]
            clients: dict[str, Any] = {"federation": written}
        else:
            clients = {key: value for key, value in written[0].items() if key != "models"}
        if self.public is not None:
            clients["public"] = {"data": self._data_block(self.public.data), "samples": self.public.samples}
        ordered = {"name": values.pop("name"), **clients, **values}
        return yaml.safe_dump(ordered, sort_keys=False, default_flow_style=None, width=110)

    def _group_block(self, group: Group) -> dict[str, Any]:
        """A group as a file says it."""
        partition = group.partition
        if isinstance(partition, Split):
            cut: dict[str, Any] = {"file": "split.json"}
        elif isinstance(partition, IndexFile):
            cut = {"file": str((self._folder / partition.file).resolve())}
        else:
            cut = partition.model_dump(mode="json")
        data = self._data_block(group.data)
        return {"data": data, "partition": cut, "models": _plain_entries(group.models)}

    def _data_block(self, data: DataConfig | Dataset) -> dict[str, Any]:
        if isinstance(data, Dataset):
            return {"name": data.name}
        block = data.model_dump(mode="json", exclude_defaults=True) | {"name": data.name}
        if data.dir is not None:
            block["dir"] = str((self._folder / data.dir.expanduser()).resolve())
        if data.tokenizer is not None:
            block["tokenizer"] = data.tokenizer_from(self._folder)
        return block

    def all_seeds(self) -> Seeds:
        """The four seeds."""
        chosen = self.seeds.model_dump(exclude_none=True)
        return Seeds(**{name: chosen.get(name, self.seed) for name in SeedSettings.model_fields})

    def load_data(self, labels_only: bool = False) -> Data:
        """The data set, or that of each group of a federation; groups that name the same one share it."""
        if isinstance(self.partition, Sites):
            raise ConfigError("the data of this experiment are at its sites: run it with potluck serve")
        found: list[tuple[DataConfig | Dataset, Dataset]] = []
        for group in self.groups:
            known = next((data for config, data in found if _alike(config, group.data)), None)
            found.append((group.data, self._load(group.data, labels_only) if known is None else known))
        data = tuple(loaded for _, loaded in found)
        return data if self.federation else data[0]

    def _load(self, data: DataConfig | Dataset, labels_only: bool) -> Dataset:
        return data if isinstance(data, Dataset) else data.load(self._folder, labels_only=labels_only)

    def make_split(self, data: Data) -> Split:
        """Who has which rows: depends on the data, the partition and the split seed alone."""
        tree = self.all_seeds().tree("split")
        if isinstance(data, Dataset):
            return self._divide(self.groups[0], data, tree)
        splits = [
            self._divide(group, part, tree.child("group", place))
            for place, (group, part) in enumerate(zip(self.groups, data, strict=True))
        ]
        return join_splits(splits, [isinstance(group.partition, PartitionConfig) for group in self.groups])

    def _divide(self, group: Group, data: Dataset, rng: Rng) -> Split:
        if isinstance(group.partition, Split):
            return group.partition
        if isinstance(group.partition, IndexFile):
            return from_index_file(self._folder / group.partition.file, data)
        if isinstance(group.partition, Sites):
            raise ConfigError("the sites of this experiment split nothing: each brings its own data")
        return make_split(data, group.partition, rng)

    def pool(self) -> ModelPool:
        """The models the experiment names."""
        chosen = self.models
        return ModelPool(chosen.pool, chosen.rep_dim, order=chosen.order, adapter=chosen.adapter)

    def build(self, data: Data | None = None, split: Split | None = None) -> Federation:
        """The federation this experiment is about, checked by its method."""
        ask_for_queues()
        data = data if data is not None else self.load_data()
        split = split if split is not None else self.make_split(data)
        groups = self.group_data(data, split)
        pool = self._pool(split, groups)
        method = find_method(self.method.name)(self.method, pool)
        return simulated(
            method,
            groups,
            split,
            pool,
            seeds=self.all_seeds(),
            independent_init=self.models.init == "per_client",
            public=self.public_samples(method),
            training=self.training.for_clients(),
            overrides=self.training.per_client,
            participation=self.training.participation,
            device=self.engine.torch_device(),
            precision=self.engine.precision,
        )

    def public_samples(self, method: Method, own: Dataset | None = None) -> tuple[Dataset, np.ndarray] | None:
        """The public data, or a side's own copy of them, and the ids of the samples, where the method uses any."""
        if not method.needs_public_data:
            return None
        if self.public is None:
            raise ConfigError(
                f"{method.name} needs public data; name some, for example public: {{data: cifar100, samples: 5000}}"
            )
        data = own if own is not None else self._load(self.public.data, labels_only=False)
        return data, choose_ids(data, self.public.samples, self.all_seeds().tree("split").child("public"))

    def group_data(self, data: Data, split: Split) -> tuple[GroupData, ...]:
        """What the clients of each group work on."""
        parts = (data,) if isinstance(data, Dataset) else data
        found: list[tuple[Group, GroupData]] = []
        for group, part in zip(self.groups, parts, strict=True):
            known = next((other for its, other in found if _alike(its.data, group.data)), None)
            config = group.data if isinstance(group.data, DataConfig) else DataConfig(name=part.name)
            ground = GroupData(
                part,
                self._size(group, part) if self.federation else len(split),
                known.prepare if known else config.preparation(part).prepare,
                isinstance(group.data, DataConfig) and bool(config.augment.operations),
            )
            found.append((group, ground))
        return tuple(ground for _, ground in found)

    def _size(self, group: Group, data: Dataset) -> int:
        partition = group.partition
        return (
            partition.clients
            if isinstance(partition, PartitionConfig)
            else len(self._divide(group, data, Rng(0)))
        )

    def _pool(self, split: Split, grounds: Sequence[GroupData]) -> ModelPool:
        """Which client brings which model; the groups of a federation deal out theirs among their own clients."""
        settings = self.models
        if not self.federation:
            pool = self.pool()
            pool.cover(client.id for client in split.clients)
            return pool
        entries: dict[str, Any] = {}
        sizes = [(ground.data, ground.clients) for ground in grounds]
        for group, (_, own) in zip(self.groups, split.by_group(sizes), strict=True):
            dealt = ModelPool(group.models, order=settings.order)
            dealt.cover(own.ids)
            entries |= {id: dealt.entry(place, id, len(own)) for place, id in enumerate(own.ids)}
        return ModelPool(entries, settings.rep_dim, adapter=settings.adapter)


def _alike(one: DataConfig | Dataset, other: DataConfig | Dataset) -> bool:
    """Whether two groups have the same data, prepared the same way."""
    return one is other or (isinstance(one, DataConfig) and one == other)


def _with_blocks(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The same values with `data` and `partition`, which have short forms, as what they mean."""
    values = dict(values)
    if isinstance(values.get("data"), str):
        values["data"] = {"name": values["data"]}
    if isinstance(values.get("partition"), dict):
        kinds: dict[str, type[BaseModel]] = {"file": IndexFile, "sites": Sites}
        kind = next((kinds[key] for key in kinds if key in values["partition"]), PartitionConfig)
        values["partition"] = _block(kind, f"{where}partition", values["partition"])
    if isinstance(values.get("data"), dict):
        values["data"] = _block(DataConfig, f"{where}data", values["data"])
    return values


def _group(place: int, values: Any) -> Any:
    """One group of a federation, from the form a file has."""
    where = f"federation.{place}"
    if not isinstance(values, Mapping):
        return values
    return _block(Group, where, _with_blocks(values, f"{where}."))


def _block(model: type[BaseModel], name: str, values: Mapping[str, Any]) -> BaseModel:
    """Validate one block on its own, so that a wrong value is named by its full path."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, model, name)) from error


def _is_plain(value: Any) -> bool:
    """Whether YAML can say it."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool | None)


def _plain_entries(pool: Any) -> Any:
    """Models as a file names them: one entry, a list, or a mapping from client to entry."""
    if isinstance(pool, Mapping):
        return {str(key): _plain(value) for key, value in pool.items()}
    return [_plain(entry) for entry in pool] if isinstance(pool, list | tuple) else _plain(pool)


def _plain(entry: Any) -> Any:
    if isinstance(entry, str | int | float | bool | None):
        return entry
    if isinstance(entry, Mapping):
        return {str(key): _plain(value) for key, value in entry.items()}
    return f"<{type(entry).__name__ if isinstance(entry, nn.Module) else getattr(entry, '__name__', repr(entry))}>"


def one_sentence(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first thing that is wrong, with its full key and, for an unknown key, the nearest known one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if str(part).isidentifier() or str(part).isdigit()]
    key = ".".join([*([prefix] if prefix else []), *path])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(path[-1], _fields(model, path[:-1]))}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["type"] == "model_type":
        return f"{key.removesuffix('.DataConfig')}: must be a block of keys with values"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    given = first.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    return f"{key}: {message}{shown}" if key else message


def _fields(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the block a path leads to."""
    for part in path:
        field = model.model_fields.get(part)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        model = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model
        )
    return list(model.model_fields)
