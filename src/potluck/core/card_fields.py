"""The fields a card may have: one line each in one table.

A line says what the field means, how a client reads it off itself, how a server reads it from JSON (refusing
what is no such value), and which symbol of shape formulas it gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from potluck.core.card import Card
from potluck.core.client import Client
from potluck.core.contract import Shapes, shapes_of
from potluck.core.model import Model
from potluck.core.plain_values import mapping, short_name, shown, whole, wholes
from potluck.core.state import BufferPolicy, Part
from potluck.core.task import Task, sample_shape
from potluck.core.trial import stem_shape
from potluck.errors import ConfigError, nearest

MOST_WIDE = 1 << 20  # of a representation
MOST_TENSORS = 20_000  # of a model
MOST_SCALARS = 1 << 34  # of a model
MOST_AXES = 8  # of a tensor
MOST_TEXTS = 16
MODEL_FIELDS = ("width", "stem", "names", "parameter_names")  # those that tell of the model


class Own:
    """What a client knows of itself: all that a card can tell. A model is built only where a field needs one."""

    def __init__(
        self,
        task: Task,
        build_model: Callable[[], Model],
        buffers: BufferPolicy = "average",
        classes_held: tuple[int, ...] = (),
        public: Mapping[str, str] | None = None,
    ) -> None:
        self.task, self.classes_held, self.public = task, classes_held, public
        self._build_model, self._buffers = build_model, buffers

    @cached_property
    def model(self) -> Model:
        """The client's model, or one like it."""
        return self._build_model()

    @cached_property
    def names(self) -> Shapes:
        """The model's tensors that may cross, with their shapes."""
        return shapes_of(Part(self.model, self._buffers).wire())

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Those of the model's tensors that are parameters, not buffers."""
        return tuple(name for name, _ in self.model.named_parameters())


@dataclass(frozen=True)
class CardField:
    """One field: its meaning, how it is read and parsed, and the symbol it gives to shape formulas."""

    meaning: str
    read: Callable[[Own], Any]
    parse: Callable[[Any, Task], Any]
    symbol: str = ""
    number: Callable[[Any], int] = int  # the symbol's value


def _stem_sizes(value: Any, task: Task) -> tuple[int, ...]:
    return sample_shape(value, "the shape after the stem")


def _width(value: Any, task: Task) -> int:
    return whole(value, 1, MOST_WIDE, "the width of a representation")


def _classes(value: Any, task: Task) -> tuple[int, ...]:
    held = wholes(value, 0, task.classes - 1, task.classes, "the classes held")
    if len(set(held)) < len(held):
        raise ValueError("a class that is held twice")
    return held


def _shapes(value: Any, task: Task) -> dict[str, tuple[int, ...]]:
    named = mapping(value, MOST_TENSORS, "the names of a model's tensors")
    if not named:
        raise ValueError("a model without tensors has nothing to share")
    shapes = {
        key: wholes(shape, 1, MOST_SCALARS, MOST_AXES, "the shape of a tensor")
        for key, shape in named.items()
    }
    if sum(map(math.prod, shapes.values())) > MOST_SCALARS:
        raise ValueError(f"a model of more than {MOST_SCALARS:,} numbers")
    return shapes


def _parameter_names(value: Any, task: Task) -> tuple[str, ...]:
    what = "the names of a model's parameters"
    if not isinstance(value, list | tuple) or len(value) > MOST_TENSORS:
        raise ValueError(f"{what} must be a list of at most {MOST_TENSORS:,} names, not {shown(value)}")
    return tuple(short_name(one, what) for one in value)


def _texts(value: Any, task: Task) -> dict[str, str]:
    told = mapping(value, MOST_TEXTS, "what is told of public samples")
    return {key: short_name(text, "what is told of public samples") for key, text in told.items()}


def _stem(own: Own) -> tuple[int, ...]:
    return stem_shape(own.model, own.task) if own.model.has_stem else ()


FIELDS: Mapping[str, CardField] = {
    "width": CardField("width of the representation", lambda own: int(own.model.rep_dim), _width, "d"),
    "stem": CardField("shape of a sample after the first part of the model", _stem, _stem_sizes),
    "classes_held": CardField(
        "which classes the client has samples of", lambda own: own.classes_held, _classes, "C_k", len
    ),
    "names": CardField("names and shapes of the model's tensors", lambda own: own.names, _shapes),
    "parameter_names": CardField(
        "which of the model's tensors are parameters, not buffers",
        lambda own: own.parameter_names,
        _parameter_names,
    ),
    "public": CardField(
        "which public samples the client means, as hashes of their ids, images and texts",
        lambda own: own.public,
        _texts,
    ),
}


def find_field(name: str) -> CardField:
    """A line of the table, or a sentence that suggests the nearest name."""
    if name not in FIELDS:
        raise ConfigError(f"a card has no field {name!r}; {nearest(name, FIELDS)}")
    return FIELDS[name]


def parse_fields(told: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The further fields of a card from JSON; a `ValueError` where one is no such value."""
    for field in mapping(told, len(FIELDS), "the further fields of a card"):
        if field not in FIELDS:
            raise ValueError(f"a card has no field {shown(field)}")
    return {field: FIELDS[field].parse(value, task) for field, value in told.items()}


def symbols_of(card: Card) -> dict[str, int]:
    """The symbols of shape formulas that a card gives."""
    known = {"C": card.task.classes, "n": card.samples}
    for name, entry in FIELDS.items():
        if entry.symbol and name in card.extra:
            known[entry.symbol] = entry.number(card.extra[name])
    return known


def own_card(client: Client, fields: Iterable[str]) -> Card:
    """A live client's view of its card: what symbols come from, and those of `fields` that its model tells."""
    model = client["model"].module if "model" in client else None
    wanted = {name for name, entry in FIELDS.items() if entry.symbol} | {*fields}
    if not isinstance(model, Model):
        wanted = {"classes_held"}
    own = Own(client.task, lambda: cast(Model, model), classes_held=client.classes_held)
    extra = {name: entry.read(own) for name, entry in FIELDS.items() if name in wanted}
    return Card(client.id, client.samples, client.task, extra)
