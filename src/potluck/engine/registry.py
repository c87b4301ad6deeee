"""Engines by name: `engine.name` of an experiment.

An engine registers itself with `register_engine`. One that lives in a package of its own, or in a lower layer
of this one, is found through the entry points `potluck.engines` of installed packages, without being imported
before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from potluck.errors import ConfigError, nearest

GROUP = "potluck.engines"  # of entry points
LOCAL = "local"  # the engines of this machine; the factory chooses between them
RAY = "ray"  # the machines of a cluster
T = TypeVar("T")


class Player(Protocol):
    """What an engine registers that plays a whole run itself, because its clients keep their own states."""

    def ready(self, experiment: Any) -> Any:
        """The experiment as this engine runs it, or a `ConfigError` if it cannot."""

    def play(self, experiment: Any, folder: Any, federation: Any, watcher: Any, fresh: bool) -> Any:
        """Play a run in a folder that was begun, from its start (`fresh`) or on; returns its result."""


_registered: dict[str, Any] = {}


def register_engine(name: str) -> Callable[[T], T]:
    """Register an engine under a name, as a decorator.

    What is registered is either a `Player`, or a class or function that builds an `Engine` for one device from
    `(clients, settings, store, notice)`, as `potluck.engine.factory` describes.
    """

    def register(found: T) -> T:
        _registered[name] = found
        return found

    return register


def engine_names() -> list[str]:
    """The names of all engines, ours first."""
    return list(dict.fromkeys([LOCAL, RAY, *_registered, *_installed()]))


def find_engine(name: str) -> Any:
    """What is registered under a name."""
    if name not in _registered:
        installed = _installed().get(name)
        if installed is None:
            raise ConfigError(f"engine.name: there is no engine {name!r}; {nearest(name, engine_names())}")
        _registered[name] = installed.load()
    return _registered[name]


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
