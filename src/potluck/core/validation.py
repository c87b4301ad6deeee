"""Validation errors as one sentence that names the key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from potluck.core.options import Option, find_option
from potluck.errors import ALIKE, ConfigError, RunError, nearest

M = TypeVar("M", bound=BaseModel)
KINDS = ("int", "float", "str", "bool")  # how pydantic names the branches of a value of several kinds
INPUT = "Input should be "
PLAIN = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "a text",
}
_SHOWN = 200  # characters of a wrong value


def validated(
    model: type[M], values: Mapping[str, Any], key: str = "", whole: type[BaseModel] | None = None
) -> M:
    """Validate a block on its own, so that an error names the full path of the wrong value.

    An unknown key is also looked for in the `whole` that the block is a part of.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(one_sentence(error, model, key, whole)) from error


def checked(form: type[BaseModel], found: Any, path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The content of a file as it is, if it has the form."""
    try:
        form.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ").partition(" or instance of")[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(f"{path} is not {what}: {place + ': ' if place else ''}{message}; {remedy}") from error
    known: dict[str, Any] = found
    return known


def one_sentence(
    error: ValidationError, model: type[BaseModel], prefix: str = "", whole: type[BaseModel] | None = None
) -> str:
    """The first error: its full key, what the option means, and for an unknown key the nearest known one."""
    errors = error.errors()
    first = errors[0]
    path = [str(part) for part in first["loc"] if str(part).isidentifier() or str(part).isdigit()]
    above = [prefix] if prefix else []
    if first["type"] == "extra_forbidden":
        last = str(first["loc"][-1])
        path = path if path and path[-1] == last else [*path, last]
        return f"unknown key {'.'.join([*above, *path])!r}; {_instead(model, path, above, whole or model)}"
    if first["type"] == "missing":
        return f"the key {'.'.join([*above, *path])!r} is missing"
    if path and path[-1] in KINDS and len(path) > 1:
        path.pop()
    key = ".".join([*above, *path])
    if first["type"] == "model_type":
        return _about_block(model, path, key, first.get("input"))
    option = _named(model, path)
    meant = f"; {option.summary()}" if option is not None else ""
    told = f"{_told(errors)}{_shown(first.get('input'))}"
    return f"{key}: {told}{meant}" if key else told


def _told(errors: Sequence[ErrorDetails]) -> str:
    """What is wrong with a value; where it could be of several kinds, all of them."""
    first = errors[0]
    if first["type"] == "string_pattern_mismatch":
        return "write letters, digits and . _ -, with a letter or digit first"
    if first["type"] == "path_type":
        return "give the path of a file"
    message = first["msg"].removeprefix("Value error, ").partition(", unable to")[0]
    if first["loc"] and _is_kind(str(first["loc"][-1])) and message.startswith(INPUT):
        same = [one["msg"] for one in errors if one["loc"][:-1] == first["loc"][:-1]]
        kinds = [one.removeprefix(INPUT).partition(", unable")[0] for one in same if one.startswith(INPUT)]
        message = INPUT + " or ".join(dict.fromkeys(kinds)).replace("a valid tuple", "a list of them")
    message = f"must be {message.removeprefix(INPUT)}" if message.startswith(INPUT) else message
    for words, plain in PLAIN.items():
        message = message.replace(words, plain)
    return message[:1].lower() + message[1:]


def _is_kind(part: str) -> bool:
    """Whether a part of a path is no key but a branch of a value of several kinds."""
    return part in KINDS or "[" in part


def _shown(given: Any) -> str:
    if isinstance(given, list | tuple) and len(given) <= 3:
        plain = all(isinstance(one, str | int | float | bool) for one in given)
        return f" (given: {list(given)!r})" if plain else ""
    return f" (given: {_short(given)})" if isinstance(given, str | int | float | bool) else ""


def _short(given: Any) -> str:
    """A value as it is shown; a long one by its beginning, as a file may hold anything."""
    try:
        text = repr(given)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a very large number"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _about_block(model: type[BaseModel], path: Sequence[str], key: str, given: Any) -> str:
    """What to write where a block is expected and something else is given."""
    if path and path[-1] == "DataConfig":
        return (
            f"{key.removesuffix('.DataConfig')}: give the name of a data set, a block such as {{name: digits}}, or "
            "a data set made of your own by potluck.from_arrays(x, y), from_frame(frame, target=…), "
            "from_files(path, target=…) or from_datasets(…)"
        )
    keys = _keys_at(model, path)
    named = _short(given).strip("'\"") if keys[:1] == ["name"] and isinstance(given, str) else "…"
    such = f", such as {{{keys[0]}: {named}}}" if keys else ""
    start = f"{key}: " if key else ""
    return f"{start}must be a block of keys with values{such}"


def _instead(
    model: type[BaseModel], path: Sequence[str], above: Sequence[str], whole: type[BaseModel]
) -> str:
    """The key that may be meant, and what it means, or all keys there are.

    First the same key in a block inside this one (`rounds`: `training.rounds`), unless the whole has it further
    out, then one that begins with it, then the same key anywhere in the whole, there also in the plural, then one
    that is spelled alike.
    """
    *before, last = path
    keys = _keys_at(model, before)
    inside = _elsewhere(_block_at(model, before), last)
    other = _elsewhere(whole, last) or _elsewhere(whole, f"{last}s")
    if inside is not None and not (other and len(other) < len([*above, *before, *inside])):
        return f"did you mean {'.'.join([*above, *before, *inside])!r}?{_meaning(model, (*before, *inside))}"
    longer = [key for key in keys if key.startswith(f"{last}_")]
    if len(longer) == 1:
        return f"did you mean {longer[0]!r}?{_meaning(model, (*before, *longer))}"
    close = difflib.get_close_matches(last, keys, n=1, cutoff=0.8)
    if other is not None and list(other) == [*above, *path]:  # another kind of this block has the key
        whole_block = ".".join([*above, *before])
        return (
            f"it does not go with the other keys of {whole_block}, which then has {', '.join(keys)}; give the "
            f"block anew, {whole_block}={{…}} after a command"
        )
    if other is not None and not close:
        return f"did you mean {'.'.join(other)!r}?{_meaning(whole, other)}"
    close = close or difflib.get_close_matches(last, keys, n=1, cutoff=ALIKE)
    return f"{nearest(last, keys)}{_meaning(model, (*before, *close)) if close else ''}"


def _meaning(model: type[BaseModel], path: tuple[str, ...]) -> str:
    option = find_option(model, path)
    return f" {option.summary()}" if option is not None else ""


def _elsewhere(model: type[BaseModel], key: str) -> tuple[str, ...] | None:
    """Where a block, or a block inside it, has a key; the outermost place of all."""
    level: list[tuple[tuple[str, ...], type[BaseModel]]] = [((), model)]
    while level and key != "name":
        found = next((path for path, block in level if key in block.model_fields), None)
        if found is not None:
            return (*found, key)
        level = [
            ((*path, name), inner)
            for path, block in level
            for name, field in block.model_fields.items()
            for inner in _blocks_in(field.annotation)
            if name != "federation"
        ]
    return None


def _blocks_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    union = get_origin(annotation) in (Union, UnionType)
    return [block for one in get_args(annotation) for block in _blocks_in(one)] if union else []


def _named(model: type[BaseModel], path: Sequence[str]) -> Option | None:
    """The option that an error is about; it may be about an item of its value."""
    ends = range(len(path), 0, -1)
    return next((found for end in ends if (found := find_option(model, tuple(path[:end])))), None)


def _keys_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys of the block that a path leads to."""
    return list(_block_at(model, path).model_fields)


def _block_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel]:
    """The block that a path leads to."""
    for part in path:
        field = model.model_fields.get(part)
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        model = next(
            (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model
        )
    return model
