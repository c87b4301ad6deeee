"""Options: what each one means, which values it takes, and where it comes from."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

_KINDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "none",
}
_BOUNDS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}


def option(*, source: str, description: str, **keywords: Any) -> Any:
    """A field of a method's `Config` that says what it means and where it comes from.

    `source` names a paper's equation, table or section, the released code, or "ours".
    """
    return Field(description=description, json_schema_extra={"source": source}, **keywords)


@dataclass(frozen=True)
class Option:
    """What is to know about one option."""

    name: str  # with the block it is in: tune.rounds
    type: str
    default: Any
    allowed: str  # in words; empty where every value of the type will do
    meaning: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """For programs; a default that JSON cannot express is text."""
        return asdict(self) | {"default": _plain(self.default)}

    def summary(self) -> str:
        """Meaning, allowed values and default in one clause, for an error about it."""
        takes = self.allowed or self.type
        return f"{self.name}: {self.meaning} (allowed: {takes}; default: {as_written(self.default)})"


def options_of(
    block: type[BaseModel], path: str = "", source: str = "", defaults: BaseModel | None = None
) -> list[Option]:
    """Every option of a block, those of the blocks inside it after their own; `name` chooses and is left out."""
    found = []
    for name, field in block.model_fields.items():
        if not path and name == "name":
            continue
        default = (
            field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        )
        one = _described(f"{path}{name}", field, default, source)
        found.append(one)
        if (inner := _block(field.annotation)) is not None:
            start = default if isinstance(default, inner) else None
            found += [each for each in options_of(inner, f"{path}{name}.", one.source, start) if each.meaning]
    return found


def find_option(block: type[BaseModel], path: tuple[str, ...]) -> Option | None:
    """The option that a path of keys leads to, none where there is no such key or it has no description."""
    for part in path[:-1]:
        field = block.model_fields.get(part)
        inner = _block(field.annotation) if field else None
        if inner is None:
            return None
        block = inner
    named = block.model_fields.get(path[-1]) if path else None
    if named is None or not named.description:
        return None
    return _described(path[-1], named, named.get_default(call_default_factory=True), "")


def as_written(value: Any) -> str:
    """A value as an experiment file has it.

    >>> as_written(False), as_written(None), as_written((64, 8, 8)), as_written(0.0)
    ('false', 'none', '[64, 8, 8]', '0')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, BaseModel):
        return as_written(value.model_dump())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_written, value)) + "]"
    return str(value)


def _described(name: str, field: FieldInfo, default: Any, source: str) -> Option:
    extra = field.json_schema_extra
    own = extra.get("source") if isinstance(extra, dict) else None
    plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
    return Option(
        name=name,
        type=_type(field.annotation),
        default=list(plain) if isinstance(plain, tuple) else plain,
        allowed=_allowed(field),
        meaning=field.description or "",
        source=str(own or source or ""),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return value if value is None or isinstance(value, bool | int | float | str) else as_written(value)


def _block(annotation: Any) -> type[BaseModel] | None:
    """The block of settings behind an annotation, if it is one."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _type(annotation: Any) -> str:
    """A type in the words of an experiment file."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation in _KINDS:
        return _KINDS[annotation]
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return "word"
    if origin in (Union, types.UnionType):
        kinds = (as_written(get_args(one)[0]) if get_origin(one) is Literal else _type(one) for one in inside)
        return " or ".join(dict.fromkeys(kinds))
    if origin in (tuple, list):
        return "list" if (kind := _type(inside[0])) == "any" else f"list of {kind}s"
    if _block(annotation) is not None or origin is dict:
        return "block of keys"
    return "any" if origin is None else "function"


def _allowed(field: FieldInfo) -> str:
    """The words or the range that an option takes."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(as_written, get_args(field.annotation)))
    bounds = " and ".join(f"{sign} {as_written(getattr(one, key))}" for one, sign, key in _bounds(field))
    none = " or none" if bounds and type(None) in get_args(field.annotation) else ""
    return bounds + none


def _bounds(field: FieldInfo) -> Iterator[tuple[Any, str, str]]:
    for one in field.metadata:
        for kind, (sign, key) in _BOUNDS.items():
            if isinstance(one, kind):
                yield one, sign, key
