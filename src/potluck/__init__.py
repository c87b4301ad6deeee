"""Potluck: federated learning where everyone brings their own model."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("potluck")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.1.0"

from potluck.client import Client
from potluck.data import from_arrays, from_datasets, from_index_file
from potluck.errors import PotluckError
from potluck.experiment import Experiment
from potluck.message import Message
from potluck.method import Method, MethodConfig, client_step
from potluck.models import Model, adapt
from potluck.run import RunResult, resume, run
from potluck.server import Server

__all__ = [
    "Client",
    "Experiment",
    "Message",
    "Method",
    "MethodConfig",
    "Model",
    "PotluckError",
    "RunResult",
    "Server",
    "__version__",
    "adapt",
    "client_step",
    "from_arrays",
    "from_datasets",
    "from_index_file",
    "resume",
    "run",
]
