"""The Ray engine on imitated machines: rounds, bytes, kills, many clients, memory, start-up, and the model of it.

    python benchmarks/cluster.py                 everything, some forty minutes on two cores
    python benchmarks/cluster.py --only kills    one part: start, rounds, kills, many, model
    python benchmarks/cluster.py --tiny          to try the script; its figures mean nothing

All machines are processes of this one (`ray.cluster_utils`), which share its cores, memory and loopback network. So
the figures tell what the engine costs, not what more machines gain. FedAvg sends a model down to all and one up
from each client; a state is as large as the model. Seconds of a round are the median over those after the first.
CPU seconds are those of all processes that take part; they matter more where others use the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import potluck.engine.ray.engine as ray_engine
from cluster_model import Cluster as Paper
from cluster_model import Cost
from potluck import Client, client_step
from potluck.core.message import Content, Message
from potluck.core.rng import Rng
from potluck.data import from_arrays
from potluck.engine.numerics import threads
from potluck.engine.protocol import Engine
from potluck.engine.ray import cluster as clusters
from potluck.engine.ray.actor import cpu_seconds
from potluck.engine.ray.commons import Commons
from potluck.engine.ray.engine import RayEngine
from potluck.engine.ray.homes import Homes
from potluck.engine.rounds import Rounds
from potluck.engine.runner import StoringEngine
from potluck.engine.serial import SerialEngine
from potluck.engine.settings import EngineSettings
from potluck.engine.workers import WorkersEngine
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.methods.fedavg import WEIGHTS_UP, FedAvg

SIZES = {"40 kB": 10_000, "2 MB": 500_000, "50 MB": 12_500_000}  # parameters of a client's model
FEATURES, CLASSES, CLIENTS = 32, 10, 8
TRIALS = 20  # moments at which machines are killed


# --- what is played -------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A model with about as many parameters as asked for, nearly all in one layer."""

    def __init__(self, parameters: int, classes: int) -> None:
        super().__init__()
        width = parameters // (FEATURES + classes)
        self.hidden, self.head = nn.Linear(FEATURES, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x).relu())


class Napping(FedAvg):
    """FedAvg whose clients sleep instead of training, as long as somebody else's GPU would take."""

    name = "napping"
    seconds = 0.0

    @client_step(up=WEIGHTS_UP)
    def train(self, client: Client) -> Content:
        time.sleep(self.seconds)
        return {"model": client["model"].state()}


def federation(
    parameters: int,
    clients: int = CLIENTS,
    samples: int = 64,
    cohort: int = CLIENTS,
    method: str = "fedavg",
) -> Federation:
    draw = Rng(0, ("benchmark",)).numpy()
    x = draw.normal(size=(clients * samples, FEATURES)).astype(np.float32)
    return Experiment.make(
        data=from_arrays(x, np.arange(len(x)) % CLASSES, name="made-up"),
        partition={"kind": "iid", "clients": clients},
        models=[lambda classes: Wide(parameters, classes)],
        method=method,
        training={"batch_size": 32, "participation": min(1.0, cohort / clients)},
        engine={"device": "cpu"},
    ).build()


@dataclass
class Played:
    """Rounds that were played: seconds by the clock and of all processors, and the states they led to."""

    seconds: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)

    @property
    def usual(self) -> tuple[float, float]:
        """Of a round after the first."""
        return statistics.median(self.seconds[1:]), statistics.median(self.work[1:])


class Game:
    """A federation on an engine, round by round, so that engines can be played in turn."""

    def __init__(self, engine: Engine, built: Federation, work: Callable[[], float]) -> None:
        self.engine, self.built, self.work = engine, built, work
        self.rounds, self.played = Rounds(built, engine), Played()

    def play_round(self) -> None:
        round_ = len(self.played.seconds) + 1
        with threads(1):
            started, before = time.perf_counter(), self.work()
            self.rounds.play(round_, self.built.population.cohort(round_))
            self.played.seconds.append(time.perf_counter() - started)
            self.played.work.append(self.work() - before)

    def end(self) -> Played:
        assert isinstance(self.engine, StoringEngine)
        ids = self.built.population.ids[:CLIENTS]
        states = {client: dict(self.engine.store.fetch(client) or {}) for client in ids}
        self.played.states = states | {"server": dict(self.rounds.server.snapshot())}
        return self.played


def play(engine: Engine, built: Federation, rounds: int, work: Callable[[], float]) -> Played:
    game = Game(engine, built, work)
    for _ in range(rounds):
        game.play_round()
    return game.end()


def same(one: Played, other: Played) -> bool:
    return all(
        torch.equal(value, other.states[name][key])
        for name, state in one.states.items()
        for key, value in state.items()
    )


# --- the machines ---------------------------------------------------------------------------------------


class Machines:
    """A head without work and some machines, all on this one."""

    def __init__(self, count: int, cores: int) -> None:
        clusters.check_installed()
        os.environ.update(clusters.OWN)
        clusters._stay_alone(True)
        from ray.cluster_utils import Cluster  # noqa: TID251

        started, before = time.perf_counter(), family_seconds()
        self.count, self.cores, self.nodes = count, cores, list[Any]()
        self.imitated = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.mend(wait=False)
        self.connection = clusters.Cluster(self.imitated.address)
        self.started = time.perf_counter() - started, family_seconds() - before

    def kill(self, machine: str) -> None:
        """Kill a machine, by Ray's name of it, with all that runs on it."""
        gone = next(node for node in self.nodes if node.node_id == machine)
        self.nodes.remove(gone)
        self.imitated.remove_node(gone, allow_graceful=False)

    def mend(self, wait: bool = True) -> None:
        """Have all machines again; it takes the head a while to notice that one is gone."""
        while len(self.nodes) < self.count:
            self.nodes.append(self.imitated.add_node(num_cpus=self.cores))
        while wait and len([node for node in self.connection.nodes() if node.cpus]) > self.count:
            time.sleep(0.2)

    def close(self) -> None:
        self.connection.close()
        self.imitated.shutdown()

    @contextlib.contextmanager
    def engine(self, built: Federation, homes: int = 2) -> Iterator[RayEngine]:
        settings = EngineSettings(name="ray", workers=homes, address=self.imitated.address)
        engine = RayEngine(built.clients, settings)
        try:
            yield engine
        finally:
            engine.close()


@contextlib.contextmanager
def machines(count: int = 2, cores: int = 1) -> Iterator[Machines]:
    found = Machines(count, cores)
    try:
        yield found
    finally:
        found.close()


class Family:
    """This process and all that it started, also those that ended or were left by their parents."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def seconds(self) -> float:
        """The CPU seconds of all, as far as they were seen."""
        children: dict[int, list[int]] = {}
        for place in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(place.read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(place.parent.name))
        family = [os.getpid(), *self.known]
        while family:
            one = family.pop()
            family += [child for child in children.get(one, ()) if child not in self.known]
            self.known[one] = max(cpu_seconds(one), self.known.get(one, 0.0))
        return sum(self.known.values())


family_seconds = Family().seconds


def resident(process: int) -> tuple[float, float]:
    """The megabytes that a process has in memory, and how many of them are its own."""
    _, whole, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    return whole * page, (whole - shared) * page


class KillingHomes(Homes):
    """Kills the machines of homes after some replies."""

    place: Machines
    moments: Sequence[int] = ()
    seen = 0

    def replies(self) -> Iterator[Any]:
        for found in super().replies():
            yield found
            KillingHomes.seen += 1
            for _ in range(self.moments.count(self.seen)):
                self.strike()

    def strike(self) -> None:
        there = {node.node_id for node in self.place.nodes}
        struck = [home.machine for home in self.alive if home.machine in there]
        if struck:
            self.place.kill(struck[-1])


class CountedCommons(Commons):
    """Counts the bytes of common downlinks; each travels once to every machine that has a home."""

    bytes = 0

    def place(self, kind: str, message: Message | None) -> int | None:
        before = len(self.refs)
        found = super().place(kind, message)
        if message and len(self.refs) > before:
            CountedCommons.bytes += sum(value.nbytes for value in message.values())
        return found


# --- what is reported -----------------------------------------------------------------------------------


def report_start(rounds: int) -> None:
    built = federation(SIZES["40 kB"])
    with machines() as place:
        print("start: a head and two machines {:.1f} s, {:.1f} CPU s".format(*place.started))
        for attempt in ("first", "second"):
            started, before = time.perf_counter(), family_seconds()
            with place.engine(built) as engine:
                took, work = time.perf_counter() - started, family_seconds() - before
                print(f"start: two homes, {attempt} time: ready after {took:.1f} s, {work:.1f} CPU s")
                play(engine, built, 2, family_seconds)
                memory = [resident(home.process) for home in engine.homes.alive]
        listed = ", ".join(f"{whole:.0f} MB ({own:.0f} MB its own)" for whole, own in memory)
        print(f"start: memory of a home: {listed}", flush=True)


def report_rounds(rounds: int) -> None:
    """A round of each engine in turn, as others use the machine; workers are forked while no Ray is about."""
    built = {name: federation(parameters) for name, parameters in SIZES.items()}
    forked = {name: WorkersEngine(one.clients, workers=2) for name, one in built.items()}
    games = {
        name: [Game(engine, one, family_seconds) for engine in (SerialEngine(one.clients), forked[name])]
        for name, one in built.items()
    }
    for game in itertools.chain.from_iterable(games.values()):
        game.play_round()
    print(
        "state     serial, s (CPU s)   2 workers, s (CPU s)   2 homes, s (CPU s)   sent, MB      common    received"
    )
    ray_engine.Commons = CountedCommons  # type: ignore[misc]
    with machines() as place:
        for name, one in built.items():
            CountedCommons.bytes = 0
            with place.engine(one) as engine, contextlib.closing(forked[name]):
                there = Game(engine, one, family_seconds)
                there.play_round()
                for _ in range(rounds - 1):
                    for game in (*games[name], there):
                        game.play_round()
                found = [game.end() for game in (*games[name], there)]
                traffic = [
                    sum(home[key] for home in engine.remarks()["homes"])
                    for key in ("bytes_sent", "bytes_received")
                ]
                traffic.insert(1, CountedCommons.bytes)
            cells = ["{:9.3f} ({:.3f})".format(*game.usual) for game in found]
            bits = "same" if same(found[0], found[2]) else "OTHER"
            print(
                f"{name:6}"
                + "".join(f"{cell:>21}" for cell in cells)
                + "".join(f"{bytes_ / rounds / 1e6:12.3f}" for bytes_ in traffic),
                f"{bits}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


def report_kills(rounds: int) -> None:
    built = federation(SIZES["2 MB"])
    expected = play(SerialEngine(built.clients), built, rounds, family_seconds)
    trials = TRIALS if rounds > 2 else 2
    last = CLIENTS * (rounds - 1)
    with machines(count=3, cores=2) as place:  # the third has room for both homes
        ray_engine.Homes, KillingHomes.place = KillingHomes, place  # type: ignore[misc]
        quiet = [_struck(place, built, rounds, ()) for _ in range(3)]
        usual = [statistics.median(sum(getattr(one, what)) for one in quiet) for what in ("seconds", "work")]
        print("kills: an undisturbed run of {} rounds: {:.2f} s, {:.2f} CPU s".format(rounds, *usual))
        for pair in (False, True):
            equal, lost, work = 0, list[float](), list[float]()
            for trial in range(trials):
                first = 1 + Rng(0, ("kill", trial)).integer % last
                later = first + Rng(0, ("again", trial)).integer % 5
                played = _struck(place, built, rounds, (first, later) if pair else (first,))
                equal += same(expected, played)
                lost.append(sum(played.seconds) - usual[0])
                work.append(sum(played.work) - usual[1])
            print(
                f"kills {'in pairs' if pair else 'alone'}: {equal} of {trials} bit-equal; seconds lost: median "
                f"{statistics.median(lost):.2f}, least {min(lost):.2f}, most {max(lost):.2f}; CPU seconds: median "
                f"{statistics.median(work):.2f}, most {max(work):.2f}",
                flush=True,
            )
        ray_engine.Homes = Homes  # type: ignore[misc]


def _struck(place: Machines, built: Federation, rounds: int, moments: Sequence[int]) -> Played:
    KillingHomes.seen, KillingHomes.moments = 0, moments
    with place.engine(built) as engine:
        played = play(engine, built, rounds, family_seconds)
        assert sum(home.lost for home in engine.homes.known) >= min(len(moments), 1)
    place.mend()
    return played


def report_many(rounds: int) -> None:
    clients = 10_000 if rounds > 2 else 200
    for cohort, turns in ((100, rounds), (clients, 2)):
        built = federation(SIZES["40 kB"], clients=clients, samples=10, cohort=cohort)
        serial = play(SerialEngine(built.clients), built, turns, family_seconds)
        with machines() as place, place.engine(built) as engine:
            homes = play(engine, built, turns, family_seconds)
            memory = [resident(home.process)[0] for home in engine.homes.alive]
        print(
            f"many: {clients:,} clients, {cohort:,} a round: "
            + "serial {:.2f} s ({:.2f} CPU s), ".format(*serial.usual)
            + "two homes {:.2f} s ({:.2f} CPU s), ".format(*homes.usual)
            + f"{'same' if same(serial, homes) else 'OTHER'} bits, a home has {max(memory):.0f} MB",
            flush=True,
        )


def report_model(rounds: int) -> None:
    """Rounds of clients that sleep, with one to eight homes, beside what the model says of them."""
    sizes = {name: SIZES[name] for name in ("40 kB", "2 MB", "50 MB")}
    with machines(count=2, cores=4) as place:
        points = {name: _costs(place, parameters, rounds) for name, parameters in sizes.items()}
        small, large = points["40 kB"], points["50 MB"]
        costs = [Cost.through((small[0], small[1 + who]), (large[0], large[1 + who])) for who in (0, 1)]
        for who, cost in zip(("driver", "home"), costs, strict=True):
            print(
                f"model: a reply costs a {who} {cost.constant * 1e3:.2f} ms and {cost.per_byte * 1e9:.2f} s per GB"
            )
        middle = points["2 MB"]
        said = [cost.of(middle[0]) * 1e3 for cost in costs]
        print(
            f"model: at 2 MB that makes {said[0]:.2f} and {said[1]:.2f} ms, measured {middle[1] * 1e3:.2f} and "
            f"{middle[2] * 1e3:.2f} ms"
        )
        print("state   naps, s   homes   model, s   measured, s")
        for name, nap in (("40 kB", 0.2), ("2 MB", 0.2), ("2 MB", 0.02), ("50 MB", 0.5)):
            for homes in (1, 2, 4, 8) if rounds > 2 else (1, 2):
                _check_model(place, costs, (name, sizes[name]), nap, homes, rounds)


def _costs(place: Machines, parameters: int, rounds: int) -> tuple[float, float, float]:
    """Bytes back for each client, and the CPU seconds of the driver and of its home for it."""
    built = federation(parameters, method="napping")
    Napping.seconds = 0.0
    with place.engine(built, homes=2) as engine:
        processes = [home.process for home in engine.homes.alive]
        game = Game(engine, built, lambda: 0.0)  # looking at all processes would count as work of the driver
        game.play_round()
        received = engine.remarks()["homes"]
        before = [time.process_time(), *map(cpu_seconds, processes)]
        for _ in range(rounds):
            game.play_round()
        after = [time.process_time(), *map(cpu_seconds, processes)]
        back = sum(home["bytes_received"] for home in engine.remarks()["homes"])
        back -= sum(home["bytes_received"] for home in received)
    replies = CLIENTS * rounds
    driver, *homes = (late - early for early, late in zip(before, after, strict=True))
    return back / replies, driver / replies, sum(homes) / replies


def _check_model(
    place: Machines, costs: Sequence[Cost], state: tuple[str, int], nap: float, homes: int, rounds: int
) -> None:
    name, parameters = state
    cohort = 16 if parameters > 1_000_000 else 64
    built = federation(parameters, clients=cohort, cohort=cohort, samples=8, method="napping")
    Napping.seconds = nap
    cores = float(len(os.sched_getaffinity(0)))
    paper = Paper(homes, costs[0], costs[1], at_once=False, cores=cores)
    with place.engine(built, homes=homes) as engine:
        measured = play(engine, built, max(rounds - 1, 2), family_seconds)
        size = (
            sum(home["bytes_received"] for home in engine.remarks()["homes"]) / cohort / len(measured.seconds)
        )
    said = paper.round_seconds([nap] * cohort, size)
    print(f"{name:6}{nap:9.2f}{homes:8}{said:11.2f}{measured.usual[0]:14.2f}", flush=True)


PARTS: dict[str, Callable[[int], None]] = {
    "start": report_start,
    "rounds": report_rounds,
    "kills": report_kills,
    "many": report_many,
    "model": report_model,
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
        SIZES["50 MB"] = SIZES["2 MB"] + 1000
    for part in options.only or PARTS:
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"-- {part}; load of the machine {load}", flush=True)
        PARTS[part](2 if options.tiny else options.rounds)


if __name__ == "__main__":
    main()
