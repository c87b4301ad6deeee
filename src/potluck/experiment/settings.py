"""All settings of an experiment, validated together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from potluck.core.dataset import Dataset
from potluck.core.method import Method, MethodConfig
from potluck.core.own_metrics import MetricSettings
from potluck.core.rng import Seeds
from potluck.core.settings import Settings
from potluck.core.validation import validated
from potluck.data import DataConfig, NaturalConfig
from potluck.engine.evaluation.settings import EvaluateSettings
from potluck.engine.settings import EngineSettings
from potluck.errors import ConfigError
from potluck.experiment.blocks import (
    AnyData,
    AnyPartition,
    CheckpointSettings,
    ClientGroup,
    KeepSettings,
    ModelSettings,
    PublicSettings,
    SeedSettings,
    TrainingSettings,
)
from potluck.experiment.partitions import partition_kind
from potluck.experiment.plain import is_plain
from potluck.experiment.track import TrackSettings
from potluck.front_door import front_door
from potluck.methods.registry import find_method

EXAMPLES = {
    "partition": "partition: {kind: dirichlet, alpha: 0.3, clients: 6}",
    "models": "models: [mlp-small, conv-small]",
}


class ExperimentSettings(Settings):
    """Everything that decides a run's numbers, as values; what is built from them is in `build`."""

    name: str = Field(default="experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    data: AnyData = DataConfig()
    partition: AnyPartition | None = None
    models: ModelSettings = ModelSettings()
    federation: tuple[ClientGroup, ...] = ()  # in place of data, partition and models.pool
    public: PublicSettings | None = None
    method: SerializeAsAny[MethodConfig]
    training: TrainingSettings = TrainingSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    metrics: tuple[MetricSettings, ...] = ()  # beside those of the task
    engine: EngineSettings = EngineSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    keep: KeepSettings = KeepSettings()
    seed: int = Field(default=0, ge=0)
    seeds: SeedSettings = SeedSettings()
    track: TrackSettings = TrackSettings()  # trackers that are told how the run goes
    plugins: tuple[str, ...] = ()  # files or modules that register methods, data sets or models

    _folder: Path = PrivateAttr(default_factory=Path)

    @property
    def folder(self) -> Path:
        """The folder of the experiment file; relative paths start here."""
        return self._folder

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """`data: cifar10`, `models: [cnn1, cnn2]`, `method: fedavg`."""
        if not isinstance(values, dict):
            return values
        values = _with_blocks(values)
        if isinstance(values.get("metrics"), str) or callable(values.get("metrics")):
            values["metrics"] = [values["metrics"]]
        values = values if values.get("federation") else _with_natural_split(values)
        models = values.get("models")
        if isinstance(values.get("keep"), str):
            values["keep"] = {"models": values["keep"]}
        if not isinstance(values.get("federation") or (), list | tuple):
            raise ValueError("federation is a list of groups, [{data: …, partition: …, models: …}, …]")
        if isinstance(values.get("federation"), list | tuple):
            values["federation"] = [_group(place, one) for place, one in enumerate(values["federation"])]
        elif models is not None and not isinstance(models, ModelSettings):
            values["models"] = _models_block(models)
        if isinstance(values.get("public"), str | Mapping):
            public = {"data": values["public"]} if isinstance(values["public"], str) else values["public"]
            values["public"] = validated(PublicSettings, _with_blocks(public, "public."), "public")
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
                raise ValueError(f"the key {key!r} is missing; write for example {EXAMPLES[key]}")
            if self.federation and value not in (None, False):
                raise ValueError(
                    f"{key} cannot be used beside federation; each of its groups has its own {key}"
                )
        return self

    @field_validator("method", mode="before")
    @classmethod
    def _find_method(cls, value: Any) -> Any:
        if isinstance(value, MethodConfig):
            return value
        if not isinstance(value, str | Mapping):
            name = value.name if isinstance(value, type) and issubclass(value, Method) else ""
            meant = f", {name!r}" if name else ""
            raise ValueError(f"give the name of a method{meant}, or a block with a name and its options")
        options = {"name": value} if isinstance(value, str) else dict(value)
        if "name" not in options:
            raise ValueError("the block has no name; write for example method: {name: fedmrl, d1: 16}")
        return validated(find_method(str(options["name"])).Config, options, "method", cls)

    @classmethod
    def make(cls, **values: Any) -> Self:
        """An experiment from Python values; a wrong one raises a `ConfigError` of one sentence."""
        return validated(cls, values)

    @front_door()
    def variant(self, **changes: Any) -> Self:
        """The same experiment with other top-level values."""
        values = {name: getattr(self, name) for name in self.model_fields_set} | changes
        experiment = validated(type(self), values)
        experiment._folder = self._folder
        return experiment

    @property
    def groups(self) -> tuple[ClientGroup, ...]:
        """The groups of the federation; without one, all clients are one group."""
        if self.federation:
            return self.federation
        assert self.partition is not None  # checked above
        return (ClientGroup(data=self.data, partition=self.partition, models=self.models.pool),)

    @property
    def portable(self) -> bool:
        """Whether a YAML file can express it all: no data, split, model or callable given as a Python object."""
        own = self.public is not None and isinstance(self.public.data, Dataset)
        own = own or any(not isinstance(metric.name, str) for metric in self.metrics)
        return not own and is_plain(self.method.model_dump()) and all(one.portable for one in self.groups)

    def all_seeds(self) -> Seeds:
        """The four seeds: `seed`, except where `seeds` fixes one."""
        chosen = self.seeds.model_dump(exclude_none=True)
        return Seeds(**{name: chosen.get(name, self.seed) for name in SeedSettings.model_fields})


def _models_block(models: Any) -> Any:
    """`models` with its entries under `pool`; a setting beside entries that are not under it is refused."""
    if isinstance(models, Mapping) and "pool" in models:
        return models
    apart = [key for key in ModelSettings.model_fields if isinstance(models, Mapping) and key in models]
    if apart and not {"name", "model"} & set(models):
        others = ", ".join(repr(key) for key in models if key not in ModelSettings.model_fields)
        beside = f" but {others}" if others else ""
        value = f"{apart[0]}: {models[apart[0]]}"
        python = f"{{'pool': […], '{apart[0]}': {models[apart[0]]!r}}}"
        raise ValueError(
            f"models has {apart[0]} and no 'pool'{beside}; write models: {{pool: […], {value}}}, in Python "
            f"models={python}"
        )
    return {"pool": models}


def _with_blocks(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The same values with `data` and `partition` validated as blocks, from their short or long form."""
    values = dict(values)
    if isinstance(values.get("data"), str):
        values["data"] = {"name": values["data"]}
    if isinstance(values.get("partition"), dict):
        kind = partition_kind(values["partition"])
        values["partition"] = validated(kind, values["partition"], f"{where}partition", ExperimentSettings)
    if isinstance(values.get("data"), dict):
        _refuse_raw(values["data"], where)
        values["data"] = validated(DataConfig, values["data"], f"{where}data", ExperimentSettings)
    return values


def _refuse_raw(data: Mapping[str, Any], where: str) -> None:
    """Refuse clients with their data that were not made a data set; the keys of a block have plain values."""
    raw = next(
        (name for name, value in data.items() if isinstance(value, tuple) or hasattr(value, "__array__")),
        None,
    )
    if raw is not None and raw not in DataConfig.model_fields:
        raise ConfigError(
            f"{where}data: {raw!r} has data, not settings; make a data set of all clients first: "
            "data=potluck.from_datasets({'north': (x, y), …}), or from_frame({'north': frame, …}, target=…)"
        )


def _with_natural_split(values: dict[str, Any]) -> dict[str, Any]:
    """Data that come client by client need no partition."""
    data = values.get("data")
    clients = data.owners is not None if isinstance(data, Dataset) else getattr(data, "by_client", False)
    natural = clients and values.get("partition") is None
    return values | {"partition": NaturalConfig()} if natural else values


def _group(place: int, values: Any) -> Any:
    """One group of a federation as a file writes it."""
    if not isinstance(values, Mapping):
        return values
    where = f"federation.{place}"
    return validated(ClientGroup, _with_natural_split(_with_blocks(values, f"{where}.")), where)
