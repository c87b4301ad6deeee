"""Parameters by prefix: `"model"` names a part of the state, `"model/head"` a module inside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from potluck.core.state import Holder
from potluck.errors import ConfigError, nearest


def is_below(name: str, prefix: str) -> bool:
    """Whether the prefix names this parameter or module, or one that contains it."""
    return name == prefix or name.startswith((f"{prefix}/", f"{prefix}."))


def closest_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    """The longest prefix that matches a name, None if none does."""
    return max((prefix for prefix in prefixes if is_below(name, prefix)), key=len, default=None)


def check_prefixes(holder: Holder, prefixes: Iterable[str]) -> None:
    """Refuse a prefix without parameters: the wrong things would be trained."""
    names = [
        f"{name}/{key}" for name, module in holder.modules().items() for key, _ in module.named_parameters()
    ]
    for prefix in prefixes:
        if not any(is_below(name, prefix) for name in names):
            raise ConfigError(f"fit() finds no parameters under {prefix!r}; {nearest(prefix, holder.parts)}")


def trained_parameters(holder: Holder, train: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to train, by their full names."""
    everything = {
        f"{name}/{key}": value
        for name, part in holder.parts.items()
        for key, value in part.trainable().items()
    }
    if train is None and everything:
        return everything
    if not everything:
        raise ConfigError("nothing to train: no parameter requires a gradient; set requires_grad on some")
    train = train or ()
    chosen = {name: value for name, value in everything.items() if closest_prefix(name, train) is not None}
    if not chosen:
        raise ConfigError(f"nothing to train under {', '.join(train)}; there is {', '.join(holder.parts)}")
    return chosen
