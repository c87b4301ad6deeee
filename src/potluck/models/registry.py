"""Registered models: their names, the inputs they take, and named pools of several models."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from potluck.core.origin import home, module_of, same_home
from potluck.core.task import Task
from potluck.errors import ModelError, nearest

InputKind = Literal[
    "image", "vector", "window", "tokens", "pixels", "pair"
]  # pixels: images with a class per pixel; window: channels × time
Builder = Callable[..., nn.Module]
_Builder = TypeVar("_Builder", bound=Builder)


@dataclass(frozen=True)
class Registered:
    """A named builder. Without `takes` every task is tried; `smallest` is the least height and width of images."""

    name: str
    builder: Builder
    takes: tuple[InputKind, ...] = ()
    smallest: int = 1

    def fits(self, task: Task) -> bool:
        """Whether the model takes samples of this task's kind and size."""
        kind = input_kind(task)
        if self.takes and kind not in self.takes:
            return False
        return kind not in ("image", "pixels") or min(task.input[1:], default=0) >= self.smallest

    def require(self, task: Task) -> None:
        """Refuse a task that the model does not fit."""
        if not self.fits(task):
            others = ", ".join(sorted(r.name for r in _registry.values() if r.takes and r.fits(task)))
            raise ModelError(
                f"{self.name} takes {self._wanted()}, the task's samples have shape {task.input}; "
                f"models that fit: {others or 'none'}"
            )

    def _wanted(self) -> str:
        size = f" of {self.smallest}×{self.smallest} or larger" if self.smallest > 1 else ""
        words = {
            "image": f"images{size}",
            "vector": "vectors",
            "window": "windows of channels × time",
            "tokens": "token ids",
            "pixels": f"images{size} to segment",
            "pair": "images with captions",
        }
        return " or ".join(words[kind] for kind in self.takes) or words["image"]


_registry: dict[str, Registered] = {}

POOLS: dict[str, tuple[str, ...]] = {
    "cnn": ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5"),  # FedMRL's
    "resnet": ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26"),  # FedIN's
    "scalefl": ("scalefl1", "scalefl2", "scalefl3", "scalefl4"),
    "htm10": (  # FedRE's
        "fedavg-cnn",
        "googlenet",
        "mobilenet-v2",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "vit-b16",
        "vit-b32",
    ),
}


def input_kind(task: Task) -> InputKind | None:
    """What kind of input a sample is, from the task's kind and the number of its axes."""
    by_task: dict[str, InputKind] = {
        "text-classification": "tokens",
        "segmentation": "pixels",
        "retrieval": "pair",
    }
    if task.kind in by_task:
        return by_task[task.kind]
    kinds: dict[int, InputKind] = {1: "vector", 2: "window", 3: "image"}
    return kinds.get(len(task.input))


def register(
    name: str, *, takes: tuple[InputKind, ...] = (), smallest: int = 1
) -> Callable[[_Builder], _Builder]:
    """Give a builder a name an experiment can use.

    The builder is called with as many of task=, input=, classes= and rep_dim= as it has parameters for; its
    other parameters are the model's options. It must return a fresh module each time. The same function may
    be registered again (a notebook cell that is run twice); another function under a taken name is refused.
    """

    def keep(builder: _Builder) -> _Builder:
        taken = _registry.get(name)
        if taken and not _is_again(taken.builder, builder):
            raise ModelError(
                f"a model named {name!r} is already registered ({home(taken.builder)}); choose another name"
            )
        _registry[name] = Registered(name, builder, takes, smallest)
        return builder

    return keep


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_registry)


def lookup(name: str) -> Registered:
    """The builder behind a name."""
    if name in _registry:
        return _registry[name]
    if name in POOLS:
        raise ModelError(f"{name!r} is a pool, one model is needed here: {', '.join(POOLS[name])}")
    close = difflib.get_close_matches(name, _registry, n=1, cutoff=0.5)  # "cnn6" is not a misspelt "cnn"
    raise ModelError(f"unknown model {name!r}; {nearest(name, close or [*_registry, *POOLS])}")


def origin(name: str) -> str:
    """The Python module that registered a model."""
    return module_of(_registry[name].builder) if name in _registry else ""


def _is_again(taken: Any, builder: Any) -> bool:
    """Whether a builder is the one that has the name, defined anew by a cell or file that is run twice."""
    one, other = (getattr(function, "__qualname__", function) for function in (taken, builder))
    return bool(one == other) and same_home(taken, builder)
