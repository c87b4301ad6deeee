"""A trained model as its author wrote it: what `adapt` took apart is put together again."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from potluck.core.trial import duplicate
from potluck.models.adapted import Adapted, replace_layer


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
    if not isinstance(copy, Adapted):
        return copy
    layers = OrderedDict(flatten=nn.Flatten(1), adapter=copy.resize, head=copy.head)
    head = copy.head if copy.adapter is None else nn.Sequential(layers)
    return replace_layer(copy.trunk, copy.head_path, head)
