"""Build the engine that the `engine` block of an experiment asks for."""

from __future__ import annotations

from collections.abc import Callable

from potluck.engine.multi_gpu import MultiGpuEngine, MultiGpuStore, homes
from potluck.engine.protocol import Engine
from potluck.engine.registry import LOCAL, Player, find_engine, register_engine
from potluck.engine.serial import SerialEngine
from potluck.engine.settings import EngineSettings
from potluck.engine.store.budget import Budget
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.state_files import StateFiles
from potluck.engine.workers import WorkersEngine, worker_count
from potluck.federation.builder import ClientBuilder

Notice = Callable[[str], None]


def player(name: str) -> Player | None:
    """What plays the runs of an engine that does so itself, None for an engine that `make_engine` builds."""
    found = find_engine(name)
    return found if hasattr(found, "play") else None


def make_engine(
    clients: ClientBuilder, settings: EngineSettings, files: StateFiles, notice: Notice
) -> tuple[Engine, ClientStore | MultiGpuStore]:
    """The engine for the devices in `settings`, and its store; with several devices, one engine for each."""
    build = find_engine(settings.name)
    devices = settings.torch_devices()
    share, total = 1 / len(devices), settings.memory_bytes()
    stores = [ClientStore(Budget.of(total, device, share), files, device) for device in devices]
    if len(devices) == 1:
        return build(clients, settings, stores[0], notice), stores[0]
    home = homes(clients.population.ids, len(devices))
    places = [clients, *(clients.on(device) for device in devices[1:])]
    engines = [build(place, settings, store, notice) for place, store in zip(places, stores, strict=True)]
    return MultiGpuEngine(engines, devices, home), MultiGpuStore(stores, home)


@register_engine(LOCAL)
def local_engine(
    clients: ClientBuilder, settings: EngineSettings, store: ClientStore, notice: Notice
) -> Engine:
    """The engine of this machine for one device. On a CPU the number of workers does not change the numbers."""
    if clients.device.type == "cuda":
        from potluck.engine.cuda.engine import STREAMS, CudaEngine

        streams = settings.streams if settings.streams != "auto" else STREAMS
        return CudaEngine(clients, store, streams=streams, notice=notice)
    workers = settings.workers
    if workers == "auto":
        workers = worker_count(clients, clients.population.cohort_size, settings.threads)
    if workers > 1:
        return WorkersEngine(clients, store, workers, settings.threads)
    return SerialEngine(clients, store)
