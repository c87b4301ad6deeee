"""Data sets by name.

A new data set is one function:

    @register("my_set")
    def my_set(dir: Path | None) -> Dataset:
        return from_arrays(x, y, name="my_set")
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from torch import Tensor

from potluck.core.dataset import Dataset
from potluck.core.origin import home, module_of, same_home
from potluck.core.rng import Rng
from potluck.errors import DataError, nearest
from potluck.files import in_home

Loader = Callable[..., Dataset]
LoaderType = TypeVar("LoaderType", bound=Loader)
_LOADERS: dict[str, Loader] = {}


def register(name: str) -> Callable[[LoaderType], LoaderType]:
    """Register a loader: `load(name)` calls it with the folder and the data set's options."""

    def add(loader: LoaderType) -> LoaderType:
        taken = _LOADERS.get(name)
        if taken is not None and not _is_again(taken, loader):
            raise DataError(
                f"a data set called {name!r} is already registered ({home(taken)}): choose another name"
            )
        _LOADERS[name] = loader
        return loader

    return add


def _is_again(taken: Loader, loader: Loader) -> bool:
    """Whether a loader is the one that has the name, defined anew by a file that is loaded twice."""
    one, other = (getattr(function, "__qualname__", function) for function in (taken, loader))
    return one == other and same_home(taken, loader)


def names() -> tuple[str, ...]:
    """The names of all registered data sets."""
    return tuple(sorted(_LOADERS))


def find_loader(name: str) -> Loader:
    """The function that is registered under a name."""
    return _LOADERS[name]


def origin(name: str) -> str:
    """The Python module that registered a data set."""
    return module_of(_LOADERS[name]) if name in _LOADERS else ""


def _file_hint(name: str) -> str:
    """How to read a file that is given in the place of a name; nothing where it is none."""
    if Path(name).suffix.lower() not in (".csv", ".parquet"):
        return ""
    return (
        f"read a file with potluck.from_files({name!r}, target=…), or in an experiment file with "
        f"data: {{name: files, path: {name}, target: …}}"
    )


def load(name: str, dir: Path | str | None = None, *, labels_only: bool = False, **options: Any) -> Dataset:
    """A data set by name, from `dir`, else from the folder in POTLUCK_DATA, else from the hub.

    `dir` is the folder that contains `<name>/`, or that folder itself. With `labels_only` the inputs may be
    zeros that take no time or memory: enough to make a split.
    """
    if name not in _LOADERS:
        raise DataError(f"there is no data set {name!r}: {_file_hint(name) or nearest(name, _LOADERS)}")
    loader = _LOADERS[name]
    accepted = _parameters(loader)
    check_options(name, options)
    missing = [option for option in needed(name) if option not in options]
    if missing:
        raise DataError(
            f"data set {name!r} needs the option {missing[0]!r}: data: {{name: {name}, {missing[0]}: …}}"
        )
    if labels_only and "labels_only" in accepted:
        options["labels_only"] = True
    return loader(None if dir is None else in_home(dir), **options)


def needed(name: str) -> list[str]:
    """The options without which a registered data set cannot be loaded."""
    options = (one for one in _parameters(_LOADERS[name]).values() if one.kind is one.KEYWORD_ONLY)
    return [one.name for one in options if one.default is one.empty]


def check_options(name: str, options: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    """Refuse options that a registered data set does not have; `also` are keys beside them, for the sentence."""
    accepted = _parameters(_LOADERS[name])
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    known = [
        key for key, value in accepted.items() if value.kind is value.KEYWORD_ONLY and key != "labels_only"
    ]
    for option in options:
        if option not in known:
            takes = f"it takes {', '.join([*known, *also])}" if known or also else "it takes none"
            raise DataError(f"data set {name!r} has no option {option!r}: {takes}")
        kind = accepted[option].annotation
        if not _fits(options[option], kind):
            raise DataError(
                f"data set {name!r}: option {option!r} is {options[option]!r}, expected {_in_words(kind)}"
            )


def _parameters(loader: Loader) -> Mapping[str, inspect.Parameter]:
    """The parameters of a loader, with their types where they can be resolved."""
    try:
        return inspect.signature(loader, eval_str=True).parameters
    except (NameError, AttributeError, TypeError):  # a type that only a type checker can resolve
        return inspect.signature(loader).parameters


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type; a type that cannot be checked accepts any value."""
    if kind is inspect.Parameter.empty or isinstance(kind, str):
        return True
    try:
        check = TypeAdapter(kind)
    except PydanticUserError:
        return True
    value = value.item() if isinstance(value, np.generic) else value
    for form in (
        check.validate_python,
        lambda value, strict: check.validate_json(json.dumps(value), strict=strict),
    ):
        with contextlib.suppress(ValidationError, TypeError, ValueError):
            form(value, strict=True)
            return True
    return False


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return " or ".join(map(_in_words, get_args(kind)))
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        NoneType: "nothing",
    }
    return words.get(kind) or (kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind))


def fewer(data: Dataset, samples: int) -> Dataset:
    """A subset of `samples` training rows and at most as many validation and test rows, the same for all seeds."""
    if samples > data.train_rows:
        raise DataError(f"data set {data.name!r} has {data.train_rows} training samples, not {samples}")
    draw, starts = Rng(0).child("fewer", data.name).numpy(), (0, data.train_rows, data.test_start, len(data))
    sizes = [min(samples, end - start) for start, end in pairwise(starts)]
    chosen = [np.arange(0)] * 3
    for part in (0, 2, 1):  # the validation part is drawn last, as most data sets have none
        there = starts[part + 1] - starts[part]
        chosen[part] = starts[part] + np.sort(draw.choice(there, sizes[part], replace=False))
    return chosen_rows(data, np.concatenate(chosen), *sizes[:2])


def chosen_rows(data: Dataset, chosen: np.ndarray, train_rows: int, validation_rows: int) -> Dataset:
    """The data set with these rows alone, those for training first, then those for validation."""
    rows = torch.from_numpy(chosen)
    owners = data.owners
    return replace(
        data,
        x=data.x[rows],
        y=data.y[rows],
        train_rows=train_rows,
        validation_rows=validation_rows,
        strata=None if data.strata is None else data.strata[rows],
        images=None if data.images is None else data.images[rows],
        texts=None if data.texts is None else tuple(data.texts[row] for row in rows.tolist()),
        owners=None if owners is None else replace(owners, rows=owners.rows[rows]),
        own_rows=_numbered(data)[rows],
    )


def _numbered(data: Dataset) -> Tensor:
    """The number of each row in what it comes from: a file, an array, or the training, validation or test part."""
    if data.own_rows is not None:
        return data.own_rows
    sizes = (data.train_rows, data.validation_rows, len(data) - data.test_start)
    return torch.cat([torch.arange(size) for size in sizes])
