"""The fields a card may have: one line each in one table.

A line says what the field means, how a client reads it off itself, how a server reads it from JSON (refusing
what is no such value), and which symbol of shape formulas it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from potluck.core.card import Card
from potluck.core.client import Client
from potluck.core.contract import Shapes, shapes_of
from potluck.core.model import Model
from potluck.core.state import BufferPolicy, Part
from potluck.core.task import Task
from potluck.core.trial import stem_shape
from potluck.errors import ConfigError, nearest


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


@dataclass(frozen=True)
class CardField:
    """One field: its meaning, how it is read and parsed, and the symbol it gives to shape formulas."""

    meaning: str
    read: Callable[[Own], Any]
    parse: Callable[[Any, Task], Any]
    symbol: str = ""
    number: Callable[[Any], int] = int  # the symbol's value


def _sizes(value: Any, task: Task) -> tuple[int, ...]:
    sizes = tuple(map(int, value))
    if any(size < 1 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return sizes


def _size(value: Any, task: Task) -> int:
    return _sizes([value], task)[0]


def _classes(value: Any, task: Task) -> tuple[int, ...]:
    held = tuple(map(int, value))
    if any(not 0 <= label < task.classes for label in held):
        raise ValueError(f"a class that is none of {task.classes}")
    return held


def _shapes(value: Any, task: Task) -> dict[str, tuple[int, ...]]:
    return {str(name): _sizes(shape, task) for name, shape in value.items()}


def _texts(value: Any, task: Task) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()}


def _stem(own: Own) -> tuple[int, ...]:
    return stem_shape(own.model, own.task) if own.model.has_stem else ()


FIELDS: Mapping[str, CardField] = {
    "width": CardField("width of the representation", lambda own: int(own.model.rep_dim), _size, "d"),
    "stem": CardField("shape of a sample after the first part of the model", _stem, _sizes),
    "classes_held": CardField(
        "which classes the client has samples of", lambda own: own.classes_held, _classes, "C_k", len
    ),
    "names": CardField("names and shapes of the model's tensors", lambda own: own.names, _shapes),
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
    unknown = next((name for name in told if name not in FIELDS), None)
    if unknown is not None:
        raise ValueError(f"a card has no field {unknown!r}")
    return {str(name): FIELDS[name].parse(value, task) for name, value in told.items()}


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
