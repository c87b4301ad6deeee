"""Potluck: federated learning where everyone brings their own model.

The names below are loaded when they are first used, so that `import potluck` and `potluck --help` are quick.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("potluck")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.1.0"

if TYPE_CHECKING:
    from potluck.averaging import average
    from potluck.client import Client
    from potluck.data import Dataset, Split, from_arrays, from_datasets, from_index_file
    from potluck.errors import PotluckError
    from potluck.experiment import Experiment
    from potluck.message import Message, numbers, state_of, tensor
    from potluck.method import Clients, Method, MethodConfig, client_step
    from potluck.models import Model, adapt, build
    from potluck.runs import RunResult, Watcher, resume, run
    from potluck.server import Server
    from potluck.state import Moments
    from potluck.statistics import ClassStats
    from potluck.streams import Stream
    from potluck.task import Batch, Task
    from potluck.training import Group, collect, fit

_HOMES = {
    "averaging": ("average",),
    "client": ("Client",),
    "data": ("Dataset", "Split", "from_arrays", "from_datasets", "from_index_file"),
    "errors": ("PotluckError",),
    "experiment": ("Experiment",),
    "message": ("Message", "numbers", "state_of", "tensor"),
    "method": ("Clients", "Method", "MethodConfig", "client_step"),
    "models": ("Model", "adapt", "build"),
    "runs": ("RunResult", "Watcher", "resume", "run"),
    "server": ("Server",),
    "state": ("Moments",),
    "statistics": ("ClassStats",),
    "streams": ("Stream",),
    "task": ("Batch", "Task"),
    "training": ("Group", "collect", "fit"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "ClassStats",
    "Client",
    "Clients",
    "Dataset",
    "Experiment",
    "Group",
    "Message",
    "Method",
    "MethodConfig",
    "Model",
    "Moments",
    "PotluckError",
    "RunResult",
    "Server",
    "Split",
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
    return sorted(__all__)
