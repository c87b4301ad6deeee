"""The engines of this machine for one device, of which the settings choose one."""

from __future__ import annotations

from collections.abc import Callable

from potluck.engine.protocol import Engine
from potluck.engine.registry import LOCAL, register_engine
from potluck.engine.serial import SerialEngine
from potluck.engine.settings import EngineSettings
from potluck.engine.store.client_store import ClientStore
from potluck.engine.workers import WorkersEngine, worker_count
from potluck.federation.builder import ClientBuilder

Notice = Callable[[str], None]


@register_engine(LOCAL)
def local_engine(
    clients: ClientBuilder, settings: EngineSettings, store: ClientStore, notice: Notice
) -> Engine:
    """The engine of this machine for one device. On a CPU the number of workers does not change the numbers."""
    if clients.device.type == "cuda":
        from potluck.engine.cuda.engine import STREAMS, CudaEngine

        streams = settings.streams if settings.streams != "auto" else STREAMS
        return CudaEngine(clients, store, streams=streams, notice=notice, compiles=settings.compile == "on")
    workers = settings.workers
    if workers == "auto":
        workers = worker_count(clients, clients.population.cohort_size, settings.threads)
    if workers > 1:
        return WorkersEngine(clients, store, workers, settings.threads)
    return SerialEngine(clients, store)
