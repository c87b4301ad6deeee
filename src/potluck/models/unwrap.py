"""A trained model as its author wrote it: what `adapt` took apart is put together again."""

from __future__ import annotations

from collections import OrderedDict
from copy import copy as shallow_copy

from torch import nn

from potluck.core.trial import duplicate
from potluck.models.adapted import Adapted, AdaptedMaps, replace_layer


def own_name(model: object, name: str) -> str:
    """What the author of a model calls one of its tensors."""
    if not isinstance(model, Adapted):
        return name
    part, _, rest = name.partition(".")
    return {"trunk": rest, "head": f"{model.head_path}.{rest}"}.get(part, name)


def own_module(model: nn.Module) -> nn.Module:
    """A copy of a model, with the names its author gave: the head of an adapted module is back in its place.

    Where a layer was added to reach another width, that place holds both, as `fc.adapter` and `fc.head`.
    """
    copy = duplicate(model)
    return replace_layer(copy.trunk, copy.head_path, _own_head(copy)) if isinstance(copy, Adapted) else copy


def own_view(model: nn.Module) -> nn.Module:
    """As `own_module`, but made of the same layers and tensors: what changes in one changes in the other."""
    return _twin(model.trunk, model.head_path, _own_head(model)) if isinstance(model, Adapted) else model


def _own_head(model: Adapted) -> nn.Module:
    if model.adapter is None or isinstance(model, AdaptedMaps):
        return model.head
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(1), adapter=model.resize, head=model.head))


def _twin(module: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """A module with another layer at a dotted path, which shares everything else with the given one."""
    if not path:
        return layer
    name, _, rest = path.partition(".")
    twin = shallow_copy(module)
    twin._modules = {**module._modules, name: _twin(module.get_submodule(name), rest, layer)}
    return twin
