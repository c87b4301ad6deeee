"""Choose and build the engine of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Protocol

from potluck.engine.multi_gpu import SpreadEngine, SpreadStore, homes
from potluck.engine.protocol import Engine
from potluck.engine.serial import LocalEngine
from potluck.engine.store.budget import Budget
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.state_files import StateFiles
from potluck.engine.workers import WorkersEngine, worker_count
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.builder import ClientBuilder


class Player(Protocol):
    """Plays whole runs on an engine of its own, such as Flower's simulation."""

    def ready(self, experiment: Any) -> Any:
        """The experiment as this engine plays it; refused if it cannot."""

    def play(self, experiment: Any, folder: Any, federation: Any, watcher: Any, fresh: bool) -> Any:
        """Play a run whose folder is begun, from its start (`fresh`) or from its last checkpoint."""


_players: dict[str, Player] = {}


def player(name: str) -> Player | None:
    """Who plays the runs of an engine, by the entry points `potluck.engines`; None: `make_engine` builds it."""
    if name == "local":
        return None
    if name not in _players:
        found = list(entry_points(group="potluck.engines", name=name))
        if not found:
            raise ConfigError(f"engine.name: no package that is installed has the engine {name!r}")
        _players[name] = found[0].load()
    return _players[name]


def make_engine(
    clients: ClientBuilder, experiment: Experiment, files: StateFiles, notice: Callable[[str], None]
) -> tuple[Engine, ClientStore | SpreadStore]:
    """The engine for the devices of an experiment, and its store."""
    devices = experiment.engine.torch_devices()
    share, total = 1 / len(devices), experiment.engine.memory_bytes()
    stores = [ClientStore(Budget.of(total, device, share), files, device) for device in devices]
    if len(devices) == 1:
        return engine_on_one(clients, experiment, stores[0], notice), stores[0]
    home = homes(clients.population.ids, len(devices))
    builders = [clients, *(clients.on(device) for device in devices[1:])]
    pairs = zip(builders, stores, strict=True)
    engines = [engine_on_one(place, experiment, store, notice) for place, store in pairs]
    return SpreadEngine(engines, home), SpreadStore(stores, home)


def engine_on_one(
    clients: ClientBuilder, experiment: Experiment, store: ClientStore, notice: Callable[[str], None]
) -> LocalEngine:
    """The engine for one device. On a CPU the numbers are the same with any number of workers."""
    settings = experiment.engine
    if clients.device.type == "cuda":
        from potluck.engine.cuda.engine import STREAMS, CudaEngine

        streams = settings.streams if settings.streams != "auto" else STREAMS
        return CudaEngine(clients, store, streams=streams, notice=notice)
    cohort = clients.population.cohort_size
    workers = settings.workers
    if workers == "auto":
        workers = worker_count(clients, cohort, settings.threads)
    if workers > 1:
        return WorkersEngine(clients, store, workers, settings.threads)
    return LocalEngine(clients, store)
