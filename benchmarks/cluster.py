"""The Ray engine on imitated machines: rounds, bytes, kills, many clients, memory and start-up.

    python benchmarks/cluster.py                 everything, some ten minutes on two cores
    python benchmarks/cluster.py --only kills    one part: start, rounds, kills, many
    python benchmarks/cluster.py --tiny          to try the script; its figures mean nothing

All machines are processes of this one (`ray.cluster_utils`), which share its cores, memory and loopback network. So
the figures tell what the engine costs, not what more machines gain. Seconds of a round are the median over those
after the first. FedAvg sends a model down to all and one up from each client; a state is as large as the model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import potluck.engine.ray.engine as ray_engine
from potluck.core.rng import Rng
from potluck.data import from_arrays
from potluck.engine.numerics import threads
from potluck.engine.protocol import Engine
from potluck.engine.ray import cluster as clusters
from potluck.engine.ray.engine import RayEngine
from potluck.engine.ray.homes import Homes
from potluck.engine.rounds import Rounds
from potluck.engine.runner import StoringEngine
from potluck.engine.serial import SerialEngine
from potluck.engine.settings import EngineSettings
from potluck.engine.workers import WorkersEngine
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation

SIZES = {"40 kB": 10_000, "2 MB": 500_000, "50 MB": 12_500_000}  # parameters of a client's model
FEATURES, CLASSES, CLIENTS = 32, 10, 8


class Wide(nn.Module):
    """A model with about as many parameters as asked for, nearly all in one layer."""

    def __init__(self, parameters: int, classes: int) -> None:
        super().__init__()
        width = parameters // (FEATURES + classes)
        self.hidden, self.head = nn.Linear(FEATURES, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x).relu())


def federation(parameters: int, clients: int = CLIENTS, samples: int = 64) -> Federation:
    draw = Rng(0, ("benchmark",)).numpy()
    x = draw.normal(size=(clients * samples, FEATURES)).astype(np.float32)
    return Experiment.make(
        data=from_arrays(x, np.arange(len(x)) % CLASSES, name="made-up"),
        partition={"kind": "iid", "clients": clients},
        models=[lambda classes: Wide(parameters, classes)],
        method="fedavg",
        training={"batch_size": 32, "participation": min(1.0, CLIENTS / clients)},
        engine={"device": "cpu"},
    ).build()


class KillingHomes(Homes):
    """Kills a home after some replies."""

    after = 0
    seen = 0

    def replies(self) -> Iterator[Any]:
        for found in super().replies():
            yield found
            KillingHomes.seen += 1
            if self.seen == self.after:
                os.kill(self.alive[-1].process, signal.SIGKILL)


def play(engine: Engine, built: Federation, rounds: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of every round, and the states at the end."""
    playing, taken = Rounds(built, engine), list[float]()
    with threads(1):
        for round_ in range(1, rounds + 1):
            started = time.perf_counter()
            playing.play(round_, built.population.cohort(round_))
            taken.append(time.perf_counter() - started)
    assert isinstance(engine, StoringEngine)
    states = {client: dict(engine.store.fetch(client) or {}) for client in built.population.ids[:CLIENTS]}
    return taken, states | {"server": dict(playing.server.snapshot())}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, other[name][key]) for name, state in one.items() for key, value in state.items()
    )


@contextlib.contextmanager
def on_ray(address: str, built: Federation) -> Iterator[RayEngine]:
    engine = RayEngine(built.clients, EngineSettings(name="ray", workers=2, address=address))
    try:
        yield engine
    finally:
        engine.close()


def resident(process: int) -> float:
    """The megabytes that a process has in memory, and those that are its own."""
    pages = Path(f"/proc/{process}/statm").read_text().split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def report_start(address: str, rounds: int) -> None:
    built = federation(SIZES["40 kB"])
    started = time.perf_counter()
    with on_ray(address, built) as engine:
        print(f"start: two homes ready after {time.perf_counter() - started:.1f} s")
        play(engine, built, 1)
        memory = [resident(home.process) for home in engine.homes.alive]
        print(f"start: memory of a home {', '.join(f'{one:.0f} MB' for one in memory)}")


def report_rounds(address: str, rounds: int) -> None:
    print("state    serial, s  2 workers, s  2 homes, s  sent, MB  received, MB  same bits")
    for name, parameters in SIZES.items():
        built = federation(parameters)
        serial, expected = play(SerialEngine(built.clients), built, rounds)
        workers = WorkersEngine(built.clients, workers=2)
        with contextlib.closing(workers):
            forked, _ = play(workers, built, rounds)
        with on_ray(address, built) as engine:
            homes, found = play(engine, built, rounds)
            sent, received = (
                sum(one[key] for one in engine.remarks()["homes"]) / 1e6
                for key in ("bytes_sent", "bytes_received")
            )
        times = [statistics.median(one[1:]) for one in (serial, forked, homes)]
        bits = same(expected, found)
        print(
            f"{name:6}{times[0]:12.3f}{times[1]:14.3f}{times[2]:12.3f}{sent:10.2f}{received:14.2f}  {bits}",
            flush=True,
        )


def report_kills(address: str, rounds: int) -> None:
    built = federation(SIZES["2 MB"])
    _, expected = play(SerialEngine(built.clients), built, rounds)
    ray_engine.Homes = KillingHomes  # type: ignore[misc]
    equal, slow = 0, list[float]()
    moments = [1 + Rng(0, ("kill", number)).integer % (CLIENTS * (rounds - 1)) for number in range(20)]
    for moment in moments if rounds > 2 else moments[:2]:
        KillingHomes.seen, KillingHomes.after = 0, moment
        with on_ray(address, built) as engine:
            taken, found = play(engine, built, rounds)
        struck = (moment - 1) // CLIENTS
        others = [seconds for number, seconds in enumerate(taken) if number not in (0, struck, struck + 1)]
        slow.append(sum(taken[struck : struck + 2]) - 2 * statistics.median(others or taken))
        equal += same(expected, found)
    ray_engine.Homes = Homes  # type: ignore[misc]
    print(
        f"kills: {equal} of {len(slow)} bit-equal; a kill costs {statistics.median(slow):.2f} s (median), "
        f"{max(slow):.2f} s at most"
    )


def report_many(address: str, rounds: int) -> None:
    built = federation(SIZES["40 kB"], clients=10_000, samples=10)
    serial, expected = play(SerialEngine(built.clients), built, rounds)
    with on_ray(address, built) as engine:
        homes, found = play(engine, built, rounds)
    alone, spread = (statistics.median(one[1:]) for one in (serial, homes))
    print(
        f"many: 10,000 clients, {CLIENTS} a round: serial {alone:.3f} s, two homes {spread:.3f} s, same bits "
        f"{same(expected, found)}"
    )


PARTS: dict[str, Callable[[str, int], None]] = {
    "start": report_start,
    "rounds": report_rounds,
    "kills": report_kills,
    "many": report_many,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to measure; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement")
    parser.add_argument("--tiny", action="store_true", help="two rounds of small models")
    options = parser.parse_args()
    if options.tiny:
        SIZES["50 MB"] = SIZES["2 MB"]
    clusters.check_installed()
    os.environ.update(clusters.OWN)
    clusters._stay_alone(True)
    from ray.cluster_utils import Cluster  # noqa: TID251

    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        imitated = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        stack.callback(imitated.shutdown)
        for _ in range(2):
            imitated.add_node(num_cpus=1)
        print(f"a head and two machines started in {time.perf_counter() - started:.1f} s", flush=True)
        stack.callback(clusters.Cluster(imitated.address).close)
        for part in options.only or PARTS:
            PARTS[part](imitated.address, 2 if options.tiny else options.rounds)


if __name__ == "__main__":
    main()
