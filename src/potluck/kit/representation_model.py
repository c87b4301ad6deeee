"""The representation model: all of a client's model except its head."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from potluck.core.model import Model
from potluck.errors import ModelError


def representation_model(model: Model) -> list[str]:
    """The parts to name in `fit(train=…)` so that a client's model is trained without its head."""
    if model not in _known:
        _known[model] = _parts(model)
    return list(_known[model])


# Walking a module is slow, and a client may ask in every exchange.
_known: weakref.WeakKeyDictionary[Model, list[str]] = weakref.WeakKeyDictionary()


def _parts(model: Model) -> list[str]:
    parts = [f"model/{name}" for name in _without(model, {id(value) for value in model.head.parameters()})]
    if not parts:
        raise ModelError(f"{type(model).__name__} has nothing to train before its head")
    return parts


def _without(module: nn.Module, head: set[int], path: str = "") -> Iterator[str]:
    """The largest modules, and single parameters, that share nothing with the head."""
    for name, value in module.named_parameters(recurse=False):
        if id(value) not in head:
            yield path + name
    for name, child in module.named_children():
        found = {id(value) for value in child.parameters()}
        if found and not found & head:
            yield path + name
        elif found - head:
            yield from _without(child, head, f"{path}{name}.")
