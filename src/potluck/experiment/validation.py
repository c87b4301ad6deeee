"""Validation errors as one sentence that names the key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from potluck.core.options import Option, find_option
from potluck.errors import ConfigError, nearest

M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], values: Mapping[str, Any], key: str = "") -> M:
    """Validate a block on its own, so that an error names the full path of the wrong value."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(one_sentence(error, model, key)) from error


def one_sentence(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first error: its full key, what the option means, and for an unknown key the nearest known one."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if str(part).isidentifier() or str(part).isdigit()]
    key = ".".join([*([prefix] if prefix else []), *path])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_instead(model, path)}"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    if first["type"] == "model_type":
        return f"{key.removesuffix('.DataConfig')}: must be a block of keys with values"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    given = first.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    option = _named(model, path)
    meant = f"; {option.summary()}" if option is not None else ""
    return f"{key}: {message}{shown}{meant}" if key else message


def _instead(model: type[BaseModel], path: Sequence[str]) -> str:
    """The nearest known key and what it means, or all of them."""
    *before, last = path
    keys = _keys_at(model, before)
    close = difflib.get_close_matches(last, keys, n=1, cutoff=0.5)
    option = find_option(model, (*before, *close)) if close else None
    meaning = f" {option.summary()}" if option is not None else ""
    return f"{nearest(last, keys)}{meaning}"


def _named(model: type[BaseModel], path: Sequence[str]) -> Option | None:
    """The option that an error is about; it may be about an item of its value."""
    ends = range(len(path), 0, -1)
    return next((found for end in ends if (found := find_option(model, tuple(path[:end])))), None)


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the block that a path leads to."""
    for part in path:
        field = model.model_fields.get(part)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        model = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model
        )
    return list(model.model_fields)
