"""The representation model: everything of a client's model but its head."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from potluck.core.model import Model
from potluck.errors import ModelError


def representation_model(model: Model) -> list[str]:
    """What `fit(train=…)` takes to train a client's model without its head."""
    prefixes = [f"model/{name}" for name in _outside(model, {id(value) for value in model.head.parameters()})]
    if not prefixes:
        raise ModelError(f"{type(model).__name__} has nothing to train before its head")
    return prefixes


def _outside(module: nn.Module, head: set[int], path: str = "") -> Iterator[str]:
    """The largest modules (and single parameters) that share nothing with the head."""
    for name, value in module.named_parameters(recurse=False):
        if id(value) not in head:
            yield path + name
    for name, child in module.named_children():
        found = {id(value) for value in child.parameters()}
        if found and not found & head:
            yield path + name
        elif found - head:
            yield from _outside(child, head, f"{path}{name}.")
