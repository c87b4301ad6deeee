"""Where the names in an experiment come from: this library, plugins that a file can name, or this process alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from potluck.data import DataConfig
from potluck.data import registry as data
from potluck.experiment.blocks import ClientGroup
from potluck.methods.registry import find_method, method_names
from potluck.models import registry as models


def registered_here(method: str, groups: Sequence[ClientGroup], plugins: Sequence[str]) -> list[str]:
    """The methods, data sets and models that the running program registered: another would not know them.

    Where an experiment has plugins, they are taken to register all it needs.
    """
    found = homes(method, groups).items()
    return [] if plugins else [name for name, home in found if is_foreign(home)]


def homes(method: str, groups: Sequence[ClientGroup]) -> dict[str, str]:
    """The Python module of the method, and those that registered the data sets and models of groups."""
    found = {f"method {method}": find_method(method).__module__}
    for group in groups:
        if isinstance(group.data, DataConfig):
            found[f"data {group.data.name}"] = data.origin(group.data.name)
        found |= {f"model {name}": models.origin(name) for name in model_names(group.models)}
    return found


def first_unknown(registered: Sequence[str]) -> str | None:
    """The first of these that this process does not know."""
    known: dict[str, Sequence[str]] = {
        "method": method_names(),
        "data": data.names(),
        "model": models.names(),
    }
    for one in registered:
        kind, _, name = one.partition(" ")
        if name not in known.get(kind, ()):
            return one
    return None


def is_foreign(home: str) -> bool:
    """Whether a module is none of this library."""
    return bool(home) and home.partition(".")[0] != "potluck"


def model_names(value: Any) -> Iterator[str]:
    """Every text in a value: those that name a model are registered under it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from model_names(inner)
