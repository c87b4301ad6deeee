"""The blocks of an experiment file: clients and their data, models, training, checkpoints, seeds.

The blocks `method`, `evaluate` and `engine` are defined beside the code they configure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, field_serializer, field_validator

from potluck.core.dataset import Dataset
from potluck.core.settings import ClientOverrides, ClientTraining, Settings, seconds_of
from potluck.data import AnyConfig, DataConfig, Split
from potluck.engine.settings import as_size
from potluck.experiment.plain import is_plain, plain

# --- clients, their data and models ---------------------------------------------------------------------


class IndexFile(Settings):
    """A split read from a file: `partition: {file: split.json}`."""

    file: Path


class Sites(Settings):
    """No split, as every client brings its own data to a federation: `partition: {sites: [north, south]}`."""

    sites: tuple[str, ...] = Field(min_length=1)  # client ids, as they join with them
    # Classes or outputs of the shared task; none: each site has its own.
    classes: int | None = Field(default=None, ge=1)

    @field_validator("sites", mode="before")
    @classmethod
    def _ids_as_text(cls, value: Any) -> Any:
        ids = [str(one) for one in value] if isinstance(value, list | tuple) else value
        if isinstance(ids, list) and len(set(ids)) < len(ids):
            raise ValueError("a client is named twice")
        return ids


AnyData = DataConfig | Dataset
AnyPartition = AnyConfig | IndexFile | Sites | Split


class ModelSettings(Settings):
    """The clients' models: one entry, a list that is dealt out in turn, or a mapping from client to entry.

    An entry is a registered name, a mapping with a name and options, a callable that returns a module, or a module.
    The name of a pool stands for the list of its models.
    """

    pool: Any = None
    rep_dim: int | None = Field(default=None, ge=1)  # one representation width for all models
    adapter: Literal["linear", "pool", "max-pool"] | None = None  # how models reach rep_dim; none: linear
    order: Literal["cycle", "blocks"] = "cycle"
    init: Literal["per_architecture", "per_client"] = "per_architecture"  # who starts from the same weights

    @field_serializer("pool")
    def _as_written(self, pool: Any) -> Any:
        return plain(pool)


class ClientGroup(Settings):
    """Clients that share a data set, and with it a task; `models` is written like `models.pool`."""

    data: AnyData = DataConfig()
    partition: AnyPartition
    models: Any

    @property
    def portable(self) -> bool:
        """Whether a YAML file can express the group."""
        own = isinstance(self.data, Dataset) or isinstance(self.partition, Split)
        return not own and is_plain(self.models)


class PublicSettings(Settings):
    """Unlabelled samples that the server and all clients have: `public: {data: cifar100, samples: 5000}`."""

    data: AnyData
    samples: int | None = Field(default=None, ge=1)  # drawn with the split seed; none: all training samples

    @field_validator("data")
    @classmethod
    def _prepared_by_clients(cls, data: AnyData) -> AnyData:
        default = {key: field.default for key, field in DataConfig.model_fields.items()}
        for key in ("normalize", "augment", "tokenizer"):
            if isinstance(data, DataConfig) and getattr(data, key) != default[key]:
                raise ValueError(f"leave out {key}, as clients prepare public samples like their own")
        return data


# --- the run --------------------------------------------------------------------------------------------


class TrainingSettings(ClientTraining):
    """How long and how the clients train."""

    rounds: int = Field(default=10, ge=1)
    participation: float = Field(default=1.0, gt=0, le=1)  # share of the clients in a round
    quorum: float = Field(default=0.5, gt=0, le=1)  # share of the cohort that must answer
    start_quorum: float = Field(default=1.0, gt=0, le=1)  # of a federation: share that must join at first
    attempts: int = Field(default=2, ge=1)  # tries at a round that misses the quorum
    # How many times the median of its like the norm of what a client sends may be; auto: our bound; none of
    # these: auto where clients are strangers, none in a simulation.
    max_norm: Literal["auto", "none"] | Annotated[float, Field(gt=1)] | None = None
    per_client: dict[str, ClientOverrides] = {}

    @field_validator("per_client", mode="before")
    @classmethod
    def _ids_as_text(cls, value: Any) -> Any:
        """YAML reads the client id 3 as a number."""
        return {str(client): own for client, own in value.items()} if isinstance(value, Mapping) else value

    def for_clients(self) -> ClientTraining:
        """The settings that a client sees."""
        return ClientTraining(**{name: getattr(self, name) for name in ClientTraining.model_fields})


class CheckpointSettings(Settings):
    """How often a run writes a state that it can be resumed from."""

    every: float = Field(default=60.0, ge=0, allow_inf_nan=True)  # seconds; 0: every round; inf: never

    @field_validator("every", mode="before")
    @classmethod
    def _with_unit(cls, value: Any) -> Any:
        """`60s`, `5m`, `1h`, a number of seconds, or `never`: a stopped run then starts over."""
        if value == "never":
            return math.inf
        if not isinstance(value, str):
            return value
        seconds = seconds_of(value if value.strip()[-1:].isalpha() else f"{value}s")
        if seconds is None:
            raise ValueError("give a number of seconds, a text such as 60s, 5m or 1h, or never")
        return seconds

    @field_serializer("every", when_used="json")
    def _as_written(self, every: float) -> float | str:
        return "never" if math.isinf(every) else every


class KeepSettings(Settings):
    """Which trained models stay in the run folder: `keep: last`, or `keep: {models: best, limit: 4GB}`.

    `last` are those after the last round, `best` those after the round with the best mean validation score.
    """

    models: Literal["last", "best", "none"] = "last"
    limit: ByteSize = ByteSize(2**30)  # bytes of all models together; if they take more, none are kept

    @field_validator("limit", mode="before")
    @classmethod
    def _a_size(cls, value: Any) -> Any:
        """`4GB`, `512MiB` or a number of bytes."""
        return as_size(value, "4GB or 512MB, or a number of bytes")


class SeedSettings(Settings):
    """Seeds that stay fixed while the others follow `seed`."""

    split: int | None = None
    init: int | None = None
    cohort: int | None = None
    training: int | None = None
