"""Potluck: federated learning where everyone brings their own model.

The names below are loaded when they are first used, so that `import potluck` and `potluck --help` are quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from potluck.queues import ask_for_queues

if TYPE_CHECKING:
    from potluck.core.card import Card, ClientId
    from potluck.core.client import Client
    from potluck.core.contract import Contract, numbers, state_of, tensor
    from potluck.core.dataset import Dataset
    from potluck.core.message import Content, Message
    from potluck.core.method import Clients, Method, MethodConfig, PrivateModelConfig, client_step
    from potluck.core.metrics import metric
    from potluck.core.model import Model
    from potluck.core.options import option
    from potluck.core.population import Population
    from potluck.core.public import Public
    from potluck.core.replies import Replies
    from potluck.core.rng import Rng
    from potluck.core.server import Server
    from potluck.core.settings import OptimizerSettings, Settings
    from potluck.core.state import Moments, Part, Report
    from potluck.core.streams import Source, Stream, shuffled_batches
    from potluck.core.task import Batch, Task
    from potluck.data import Split, from_arrays, from_datasets, from_files, from_frame, from_index_file
    from potluck.errors import ConfigError, PotluckAdvice, PotluckError
    from potluck.experiment import Experiment
    from potluck.kit.averaging import average
    from potluck.kit.class_means import ClassStats, merge_classes
    from potluck.kit.early_stopping import fit_patiently
    from potluck.kit.nested_small import NestedSmall
    from potluck.kit.public_knowledge import OnPublicData
    from potluck.kit.shared_head import SharedHead
    from potluck.kit.shared_small import SharedSmall
    from potluck.kit.shared_weights import SharedWeights
    from potluck.models import adapt, build
    from potluck.runs.api import resume, run
    from potluck.runs.comparisons.api import compare
    from potluck.runs.comparisons.comparison import Comparison, Sweep
    from potluck.runs.observers import (
        EarlyStopping,
        Observer,
        RoundEnd,
        RoundTrace,
        StopRun,
        TimeLimit,
    )
    from potluck.runs.open import open as open
    from potluck.runs.pictures.api import plot
    from potluck.runs.results.client_result import ClientResult
    from potluck.runs.results.run_result import RunResult
    from potluck.testing.contract import check_method
    from potluck.training.collect import collect
    from potluck.training.fit import Fit, Gradients, fit
    from potluck.training.modes import still_statistics
    from potluck.training.optimizers import Group
    from potluck.version import __version__

ask_for_queues()

_HOMES = {
    "core.card": ("Card", "ClientId"),
    "core.client": ("Client",),
    "core.contract": ("Contract", "numbers", "state_of", "tensor"),
    "core.dataset": ("Dataset",),
    "core.message": ("Content", "Message"),
    "core.method": ("Clients", "Method", "MethodConfig", "PrivateModelConfig", "client_step"),
    "core.metrics": ("metric",),
    "core.model": ("Model",),
    "core.options": ("option",),
    "core.population": ("Population",),
    "core.public": ("Public",),
    "core.replies": ("Replies",),
    "core.rng": ("Rng",),
    "core.server": ("Server",),
    "core.settings": ("OptimizerSettings", "Settings"),
    "core.state": ("Moments", "Part", "Report"),
    "core.streams": ("Source", "Stream", "shuffled_batches"),
    "core.task": ("Batch", "Task"),
    "data": ("Split", "from_arrays", "from_datasets", "from_files", "from_frame", "from_index_file"),
    "errors": ("ConfigError", "PotluckAdvice", "PotluckError"),
    "experiment": ("Experiment",),
    "kit.averaging": ("average",),
    "kit.class_means": ("ClassStats", "merge_classes"),
    "kit.early_stopping": ("fit_patiently",),
    "kit.nested_small": ("NestedSmall",),
    "kit.public_knowledge": ("OnPublicData",),
    "kit.shared_head": ("SharedHead",),
    "kit.shared_small": ("SharedSmall",),
    "kit.shared_weights": ("SharedWeights",),
    "models": ("adapt", "build"),
    "runs.api": ("resume", "run"),
    "runs.results.client_result": ("ClientResult",),
    "runs.comparisons.api": ("compare",),
    "runs.comparisons.comparison": ("Comparison", "Sweep"),
    "runs.observers": (
        "EarlyStopping",
        "Observer",
        "RoundEnd",
        "RoundTrace",
        "StopRun",
        "TimeLimit",
    ),
    "runs.open": ("open",),
    "runs.pictures.api": ("plot",),
    "runs.results.run_result": ("RunResult",),
    "testing.contract": ("check_method",),
    "training.collect": ("collect",),
    "training.fit": ("Fit", "Gradients", "fit"),
    "training.modes": ("still_statistics",),
    "training.optimizers": ("Group",),
    "version": ("__version__",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

# Without `open`, which `from potluck import *` must not put in the place of Python's own.
__all__ = [
    "Batch",
    "Card",
    "ClassStats",
    "Client",
    "ClientId",
    "ClientResult",
    "Clients",
    "Comparison",
    "ConfigError",
    "Content",
    "Contract",
    "Dataset",
    "EarlyStopping",
    "Experiment",
    "Fit",
    "Gradients",
    "Group",
    "Message",
    "Method",
    "MethodConfig",
    "Model",
    "Moments",
    "NestedSmall",
    "Observer",
    "OnPublicData",
    "OptimizerSettings",
    "Part",
    "Population",
    "PotluckAdvice",
    "PotluckError",
    "PrivateModelConfig",
    "Public",
    "Replies",
    "Report",
    "Rng",
    "RoundEnd",
    "RoundTrace",
    "RunResult",
    "Server",
    "Settings",
    "SharedHead",
    "SharedSmall",
    "SharedWeights",
    "Source",
    "Split",
    "StopRun",
    "Stream",
    "Sweep",
    "Task",
    "TimeLimit",
    "__version__",
    "adapt",
    "average",
    "build",
    "check_method",
    "client_step",
    "collect",
    "compare",
    "fit",
    "fit_patiently",
    "from_arrays",
    "from_datasets",
    "from_files",
    "from_frame",
    "from_index_file",
    "merge_classes",
    "metric",
    "numbers",
    "option",
    "plot",
    "resume",
    "run",
    "shuffled_batches",
    "state_of",
    "still_statistics",
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
