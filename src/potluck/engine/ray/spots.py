"""Where homes can be on a cluster: a GPU each, or as many CPU cores as a client may use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from potluck.engine.ray.cluster import Node
from potluck.engine.settings import EngineSettings
from potluck.errors import ConfigError

ROUNDING = 1e-3  # Ray counts a GPU in ten thousandths: three thirds of one are a little less than the whole


@dataclass(frozen=True)
class Spot:
    """A place for one home: a machine, what the home takes of it, and its share of the machine's memory."""

    node: str
    cpus: int
    gpus: float
    share: float

    def options(self, anywhere: bool = False) -> dict[str, Any]:
        """How Ray is told; a home that replaces another may be anywhere."""
        strategy = "DEFAULT" if anywhere else at_machine(self.node, soft=True)
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}


def at_machine(node: str, soft: bool = False) -> Any:
    """How Ray is told to start something on a machine; `soft`: elsewhere if it is gone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=soft)


def home_settings(settings: EngineSettings, nodes: Sequence[Node]) -> EngineSettings:
    """The `engine` block of a home: an engine of one device and one process."""
    if not isinstance(settings.device, str):
        raise ConfigError("engine.device: a home of a Ray cluster has one device; use auto, cpu or cuda")
    kind = settings.device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if any(node.gpus for node in nodes) else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: there is no device {settings.device!r}; use auto, cpu or cuda")
    one = {"name": "local", "device": kind, "workers": 1, "address": None}
    return (settings.on_cpu() if kind == "cpu" else settings).model_copy(update=one)


def choose_spots(settings: EngineSettings, device: str, nodes: Sequence[Node], most: int) -> list[Spot]:
    """A spot for every home, over all machines in turn; `most` is how many can have work."""
    found = _gpu_spots(settings, nodes) if device == "cuda" else _cpu_spots(settings, nodes)
    if settings.workers == "auto":
        return _with_shares(found[:most])
    if settings.workers > len(found):
        raise ConfigError(
            f"engine.workers: {settings.workers} homes of {settings.threads} cores are asked for, the cluster "
            f"has room for {len(found)}: {_listed(nodes)}"
        )
    return _with_shares(found[: settings.workers])


def fitting(spots: Sequence[Spot], free: Mapping[str, tuple[float, float]]) -> list[Spot]:
    """The spots that there is room for now, when `free` cores and GPUs are left on each machine."""
    left, found = dict(free), list[Spot]()
    for spot in spots:
        cpus, gpus = left.get(spot.node, (0.0, 0.0))
        if cpus >= spot.cpus and gpus >= spot.gpus - ROUNDING:
            left[spot.node] = cpus - spot.cpus, gpus - spot.gpus
            found.append(spot)
    return found


def _cpu_spots(settings: EngineSettings, nodes: Sequence[Node]) -> list[Spot]:
    rows = [[Spot(node.id, settings.threads, 0, 1)] * (node.cpus // settings.threads) for node in nodes]
    found = list(_in_turn(rows))
    if not found:
        raise ConfigError(
            f"engine.threads: no machine of the cluster has {settings.threads} cores: {_listed(nodes)}"
        )
    return found


def _gpu_spots(settings: EngineSettings, nodes: Sequence[Node]) -> list[Spot]:
    """A GPU for each home; where more homes are asked for than there are GPUs, they share them."""
    total = sum(node.gpus for node in nodes)
    if not total:
        raise ConfigError(f"engine.device: no machine of the cluster has a GPU: {_listed(nodes)}; use cpu")
    each = 1 if settings.workers == "auto" else -(-settings.workers // total)
    return list(_in_turn([[Spot(node.id, 0, 1 / each, 1)] * (node.gpus * each) for node in nodes]))


def _in_turn(rows: Sequence[Sequence[Spot]]) -> Iterator[Spot]:
    """The first of every machine, then the second, and so on."""
    for level in itertools.zip_longest(*rows):
        yield from (spot for spot in level if spot is not None)


def _with_shares(spots: Sequence[Spot]) -> list[Spot]:
    count = {spot.node: sum(other.node == spot.node for other in spots) for spot in spots}
    return [replace(spot, share=1 / count[spot.node]) for spot in spots]


def _listed(nodes: Sequence[Node]) -> str:
    """The machines, for a sentence."""
    return ", ".join(f"{node.name} with {node.cpus} cores and {node.gpus} GPUs" for node in nodes) or "none"
