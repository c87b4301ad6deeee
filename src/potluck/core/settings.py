"""Settings blocks of an experiment: their base class, optimiser and training settings, and values per client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from potluck.core.validation import one_sentence
from potluck.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

T = TypeVar("T")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(?:\d+(?:\.\d*)?\s*[smhd]\s*)+")


def seconds_of(text: str) -> float | None:
    """A duration in seconds; None where the text is none.

    >>> seconds_of("1h30m"), seconds_of("2 h"), seconds_of("soon")
    (5400.0, 7200.0, None)
    """
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)\s*([smhd])", text))


class _OneSentence(ModelMetaclass):
    """Makes a block from Python values: a wrong one is a `ConfigError` of one sentence.

    Blocks inside it are made by pydantic itself, so the sentence names the whole path of the wrong value.
    """

    def __call__(cls, *args: Any, **values: Any) -> Any:
        if args:
            raise ConfigError(f"{cls.__name__}() takes its values by name: {cls.__name__}(**values)")
        try:
            return super().__call__(**values)
        except ValidationError as error:
            raise ConfigError(one_sentence(error, cls)) from error  # type: ignore[arg-type]


def _is_no_truth_value(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse true and false where a number is asked for: they would count as 1 and 0."""
    if not isinstance(value, bool):
        return value
    asked = cls.model_fields[str(info.field_name)].annotation
    kinds = [asked, *get_args(asked)]
    if bool not in kinds and (int in kinds or float in kinds):
        raise ValueError("must be a number")
    return value


class Strict(BaseModel):
    """A block of values in which no truth value counts as a number."""

    _numbers = field_validator("*", mode="before")(classmethod(_is_no_truth_value))


class Settings(BaseModel, metaclass=_OneSentence):
    """A block of settings: frozen, without unknown keys or infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    _numbers = field_validator("*", mode="before")(classmethod(_is_no_truth_value))


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """The optimiser of a client or the server.

    `name` is sgd, adam or adamw. `lr` is the learning rate. sgd has `momentum` and `nesterov`, adam and adamw have
    `betas`, and all have `weight_decay`.
    """

    name: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="the optimiser")
    lr: float = Field(default=0.01, gt=0, description="learning rate")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(
        default=0.0, ge=0, description="weight decay: added to the gradient, decoupled in adamw"
    )
    nesterov: bool = Field(default=False, description="Nesterov momentum, for sgd")
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.999), description="decay of the two moments of adam and adamw, per step"
    )

    @model_validator(mode="after")
    def _has_no_idle_option(self) -> OptimizerSettings:
        for key in ("betas",) if self.name == "sgd" else ("momentum", "nesterov"):
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                raise ValueError(
                    f"{key} has no meaning for {self.name}; leave it out (on the command line, "
                    f"'training.optimizer={{name: {self.name}, lr: {self.lr:g}}}' replaces the whole block)"
                )
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


LastBatch = Literal["keep", "drop", "wrap"]


class ClientTraining(Settings):
    """How one client trains in one round, with its own overrides applied."""

    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)
    last_batch: LastBatch = "keep"  # a single sample is dropped if the model has batch norm
    optimizer: OptimizerSettings = OptimizerSettings()
    lr_decay: float = Field(default=1.0, gt=0)  # the learning rate is multiplied by this after every round
    clip: float | None = Field(default=None, gt=0)  # largest norm of the gradient, per parameter group


class ClientOverrides(Settings):
    """Values that differ for one client: `training.per_client: {"3": {lr: 0.001}}`."""

    epochs: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    lr: float | None = Field(default=None, gt=0)

    def apply(self, training: ClientTraining) -> ClientTraining:
        """The common settings with this client's values in place."""
        changes: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"lr"})
        if self.lr is not None:
            changes["optimizer"] = training.optimizer.model_copy(update={"lr": self.lr})
        return training.model_copy(update=changes)


def per_client(value: T | Sequence[T] | Mapping[str, T], ids: Sequence[str], key: str) -> dict[str, T]:
    """A setting for every client: one value for all, a list dealt out in turn, or a mapping of all clients.

    >>> per_client([8, 4], ["a", "b", "c"], "method.d1")
    {'a': 8, 'b': 4, 'c': 8}
    """
    if isinstance(value, Mapping):
        known = set(ids)
        unknown = next((client for client in value if client not in known), None)
        missing = next((client for client in ids if client not in value), None)
        if unknown is not None:
            hint = nearest(unknown, ids) if len(ids) <= 10 else f"there are {len(ids)} clients"
            raise ConfigError(f"{key} names client {unknown!r}, which does not exist; {hint}")
        if missing is not None:
            raise ConfigError(f"{key} leaves out client {missing!r}; give a value for each client")
        return {client: value[client] for client in ids}
    dealt: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
    return {client: dealt[number % len(dealt)] for number, client in enumerate(ids)}
