"""Potluck: federated learning where everyone brings their own model.

The names below are loaded when they are first used, so that `import potluck` and `potluck --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from potluck.version import __version__

if TYPE_CHECKING:
    from potluck.core.client import Client
    from potluck.core.contract import numbers, state_of, tensor
    from potluck.core.dataset import Dataset
    from potluck.core.message import Message
    from potluck.core.method import Clients, Method, MethodConfig, client_step
    from potluck.core.model import Model
    from potluck.core.server import Server
    from potluck.core.state import Moments
    from potluck.core.streams import Stream
    from potluck.core.task import Batch, Task
    from potluck.data import Split, from_arrays, from_datasets, from_index_file
    from potluck.errors import PotluckError
    from potluck.experiment import Experiment
    from potluck.kit.averaging import average
    from potluck.kit.class_means import ClassStats
    from potluck.models import adapt, build
    from potluck.runs.api import resume, run
    from potluck.runs.client_result import ClientResult
    from potluck.runs.observers import Observer, StopRun, Watcher
    from potluck.runs.opened import open as open
    from potluck.runs.result import RunResult
    from potluck.training.collect import collect
    from potluck.training.fit import fit
    from potluck.training.optimizers import Group

_HOMES = {
    "core.client": ("Client",),
    "core.contract": ("numbers", "state_of", "tensor"),
    "core.dataset": ("Dataset",),
    "core.message": ("Message",),
    "core.method": ("Clients", "Method", "MethodConfig", "client_step"),
    "core.model": ("Model",),
    "core.server": ("Server",),
    "core.state": ("Moments",),
    "core.streams": ("Stream",),
    "core.task": ("Batch", "Task"),
    "data": ("Split", "from_arrays", "from_datasets", "from_index_file"),
    "errors": ("PotluckError",),
    "experiment": ("Experiment",),
    "kit.averaging": ("average",),
    "kit.class_means": ("ClassStats",),
    "models": ("adapt", "build"),
    "runs.api": ("resume", "run"),
    "runs.client_result": ("ClientResult",),
    "runs.observers": ("Observer", "StopRun", "Watcher"),
    "runs.opened": ("open",),
    "runs.result": ("RunResult",),
    "training.collect": ("collect",),
    "training.fit": ("fit",),
    "training.optimizers": ("Group",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

# Without `open`, which `from potluck import *` must not put in the place of Python's own.
__all__ = [
    "Batch",
    "ClassStats",
    "Client",
    "ClientResult",
    "Clients",
    "Dataset",
    "Experiment",
    "Group",
    "Message",
    "Method",
    "MethodConfig",
    "Model",
    "Moments",
    "Observer",
    "PotluckError",
    "RunResult",
    "Server",
    "Split",
    "StopRun",
    "Stream",
    "Task",
    "Watcher",
    "__version__",
    "adapt",
    "average",
    "build",
    "client_step",
    "collect",
    "fit",
    "from_arrays",
    "from_datasets",
    "from_index_file",
    "numbers",
    "resume",
    "run",
    "state_of",
    "tensor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"potluck.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
