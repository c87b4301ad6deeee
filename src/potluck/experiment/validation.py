"""Validation errors as one sentence that names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from potluck.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], values: Mapping[str, Any], key: str = "") -> M:
    """Validate a block on its own, so that an error names the full path of the wrong value."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, model, key)) from error


def one_sentence(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first error, with its full key and, for an unknown key, the nearest known one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if str(part).isidentifier() or str(part).isdigit()]
    key = ".".join([*([prefix] if prefix else []), *path])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(path[-1], _keys_at(model, path[:-1]))}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["type"] == "model_type":
        return f"{key.removesuffix('.DataConfig')}: must be a block of keys with values"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    given = first.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    return f"{key}: {message}{shown}" if key else message


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the block that a path leads to."""
    for part in path:
        field = model.model_fields.get(part)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        model = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model
        )
    return list(model.model_fields)
