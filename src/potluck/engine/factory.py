"""Build the engine that the `engine` block of an experiment asks for."""

from __future__ import annotations

from potluck.engine.multi_gpu import MultiGpuEngine, MultiGpuStore, homes
from potluck.engine.protocol import Engine
from potluck.engine.registry import RAY, Player, find_engine, register_engine
from potluck.engine.settings import EngineSettings
from potluck.engine.store.budget import Budget
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.state_files import StateFiles
from potluck.engine.this_machine import Notice
from potluck.federation.builder import ClientBuilder


def player(name: str) -> Player | None:
    """What plays the runs of an engine that does so itself, None for an engine that `make_engine` builds."""
    found = find_engine(name)
    return found if hasattr(found, "play") else None


def check_engine(settings: EngineSettings) -> None:
    """Refuse an engine that is not installed, or a cluster that is not there, before anything is made."""
    find_engine(settings.name)
    if settings.name == RAY:
        from potluck.engine.ray.cluster import check_installed
        from potluck.engine.ray.door import check_address

        check_installed()
        if settings.address is not None:
            check_address(settings.address)


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


@register_engine(RAY)
def ray_engine(
    clients: ClientBuilder, settings: EngineSettings, store: ClientStore, notice: Notice
) -> Engine:
    """The engine of a Ray cluster."""
    check_engine(settings)
    from potluck.engine.ray.engine import RayEngine

    return RayEngine(clients, settings, store, notice)
