"""Room on a cluster that others may use, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from potluck.engine.ray.cluster import Cluster, Node
from potluck.engine.ray.spots import Spot, fitting
from potluck.errors import ConfigError

START = 25.0  # seconds to wait for room on the cluster; with room there is no haste: machines may be slow
LOOK = 0.2  # seconds between looks


def spots_with_room(
    spots: Sequence[Spot], cluster: Cluster, nodes: Sequence[Node], notice: Callable[[str], None]
) -> list[Spot]:
    """The spots that nobody else has taken. Ray takes a moment to notice that one was given back."""
    until = time.monotonic() + START
    while len(found := fitting(spots, cluster.free())) < len(spots) and time.monotonic() < until:
        time.sleep(LOOK)
    if not found:
        raise ConfigError(
            f"engine.name: no home could be started on the Ray cluster within {START:g} s: others have taken all "
            f"room on {machines(spots, nodes)}"
        )
    if len(found) < len(spots):
        full = [spot for spot in spots if spot not in found] or spots
        notice(
            f"no room for a home on {machines(full, nodes)}; the run goes on with {len(found)} of {len(spots)}"
        )
    return found


def machines(spots: Sequence[Spot], nodes: Sequence[Node]) -> str:
    """The names of the machines of spots, for a sentence."""
    names = {node.id: node.name for node in nodes}
    return ", ".join(dict.fromkeys(names[spot.node] for spot in spots))
