"""`engine.name: flower-simulation`: a run on Flower's simulation, which spreads clients over Ray's processes.

Server and clients are those of a federation: orders and replies are bytes, and every client has a record on disk,
in the run's folder. Any process may work for any client, so a client is built anew for every order.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import torch

from potluck.data import Split
from potluck.deploy.engine import FlowerEngine
from potluck.deploy.federated_run import federated_run
from potluck.deploy.flower.processes import START, Process, environment, installed
from potluck.deploy.flower.relay import Relay
from potluck.deploy.orders import Orders
from potluck.deploy.register import Register
from potluck.deploy.resident import Resident
from potluck.deploy.run import refuse_predictions
from potluck.deploy.site_status import OrderNotes
from potluck.deploy.wire import Enrolment, Order
from potluck.engine import frames
from potluck.engine.protocol import Outcome
from potluck.engine.registry import register_engine
from potluck.errors import ConfigError, RunError, StepFailed
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import read_json, write_json
from potluck.runs.folder import RunFolder
from potluck.runs.observers import Observer
from potluck.runs.results.run_result import RunResult
from potluck.version import __version__

CLIENTS = "clients"  # folder of the clients' records, in the run's folder
LOOK = 0.5  # seconds between looks whether a process that has not connected yet is alive
ENDING = 2.0  # seconds to wait for the exit of a process that has closed its connection
PROGRAM = (
    "from potluck.deploy.flower.actors import main; main()"  # not -m: Ray looks the module up by its name
)
ABOUT = "simulation.json"  # in that folder: what Ray's workers need to know of the run


def other_ray() -> str | None:
    """The version of Ray that Flower's simulation asks for, where another one is installed."""
    pinned = (one.partition(";")[0].strip() for one in requires("flwr") or () if one.startswith("ray=="))
    wanted = next(pinned, "").removeprefix("ray==")
    return wanted if wanted and installed("ray") and version("ray") != wanted else None


def ready(experiment: Experiment) -> Experiment:
    """The experiment as a simulation runs it; refused where packages are missing or it cannot be simulated."""
    if not (installed("flwr") and installed("ray")):
        raise ConfigError(
            "engine.name: flower-simulation needs Flower and Ray; install them with: "
            "pip install 'potluck[simulation]'"
        )
    if (wanted := other_ray()) is not None:
        raise ConfigError(
            f"engine.name: flower-simulation needs ray {wanted}, as Flower asks for it, and this is ray "
            f"{version('ray')}; install it with: pip install 'potluck[simulation]', or use engine.name: ray"
        )
    if not experiment.portable:
        raise ConfigError(
            "engine.name: flower-simulation cannot hand models and data that are Python objects to its processes; "
            "name them in an experiment file, or leave out engine.name"
        )
    if experiment.engine.device not in ("auto", "cpu"):
        raise ConfigError("engine.device: flower-simulation computes on the CPU; use cpu")
    refuse_predictions(experiment)
    return experiment.variant(engine=experiment.engine.on_cpu())


# --- the server's side ----------------------------------------------------------------------------------


def simulate(
    experiment: Experiment, folder: RunFolder, federation: Federation, watcher: Observer, fresh: bool = True
) -> RunResult:
    """Play a run, or continue it; its folder exists already."""
    experiment = experiment.variant(checkpoint={"every": 0})
    register = Register(folder)
    run, incarnation = register.values.run, register.start()
    home = (folder / CLIENTS).resolve()
    home.mkdir(exist_ok=True)
    write_json(home / ABOUT, {"run": run, "config": str((folder / "config.yaml").resolve())})
    fields = federation.population.card(federation.population.ids[0]).extra
    welcome = {"potluck": __version__, "run": run}
    with simulating(
        experiment, len(federation.population.ids), (folder / "flower").resolve(), home
    ) as courier:
        engine = FlowerEngine(
            courier, federation.population.ids, experiment.engine, fields, welcome, notice_of(watcher)
        )
        engine.gather()
        going = federated_run(
            engine, experiment, folder, federation, watcher, run, incarnation, fresh, strangers=False
        )
        return going.play()


@register_engine("flower-simulation")
class Simulation:
    """The player of this engine; the project's entry point `potluck.engines` names it."""

    ready = staticmethod(ready)
    play = staticmethod(simulate)


def notice_of(watcher: Observer) -> Callable[[str], None]:
    """Pass on failures only: in a simulation it is no news that a client is here."""
    return lambda sentence: None if sentence.endswith(("is here", "is back")) else watcher.notice(sentence)


@contextlib.contextmanager
def simulating(experiment: Experiment, clients: int, home: Path, records: Path) -> Iterator[Relay]:
    """Start the simulation as a process and give a courier to its nodes."""
    settings = experiment.engine
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(frames.meeting_folder())
        door = stack.enter_context(frames.listening(folder / "serve"))
        words = [sys.executable, "-P", "-c", PROGRAM, str(folder / "serve"), str(records)]
        words += [str(clients), str(settings.threads)]
        words += [] if settings.workers == "auto" else [str(settings.workers)]
        process = Process(words, home / "simulation.log", environment(home) | _own_ray())
        stack.callback(process.end)
        stack.callback(process.wait)
        channel = _connected(door, process)
        stack.callback(channel.close)
        try:
            yield Relay(channel)
        except RunError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(ENDING)
            if process.alive:
                raise
            raise RunError(f"Flower's simulation has ended: {process.tail()}; see {process.log}") from error


def _own_ray() -> dict[str, str]:
    """A quiet Ray that joins no cluster, listens on the loopback address alone and wants a token of its own."""
    return {
        "RAY_ADDRESS": "local",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }


def _connected(door: socket.socket, process: Process) -> socket.socket:
    """The connection to the simulation's process; one that has ended is not waited for."""
    end = time.monotonic() + START
    door.settimeout(LOOK)
    while True:
        alive = process.alive  # asked first: what it did before its end counts
        try:
            return door.accept()[0]
        except OSError as error:
            if not alive or time.monotonic() > end:
                raise RunError(
                    f"Flower's simulation does not start: {process.tail()}; see {process.log}"
                ) from error


# --- in Ray's workers -----------------------------------------------------------------------------------


class SimulatedClients:
    """The clients of a run in one worker process: the federation is built once, a client for every order."""

    def __init__(self, folder: Path) -> None:
        self.folder, about = folder, read_json(folder / ABOUT)
        self.run = str(about["run"])
        experiment = Experiment.load(about["config"])
        torch.set_num_threads(experiment.engine.threads)
        split = Split.load(Path(about["config"]).with_name("split.json"))
        self.federation = experiment.build(split=split)

    def answer(self, place: int, order: bytes) -> bytes:
        """Carry out an order as the client with this number."""
        return SimulatedSite(self, place).answer(order)


class SimulatedSite(Orders):
    """One client for the duration of an order; its secret comes from the seed."""

    device = "cpu"

    def __init__(self, clients: SimulatedClients, place: int) -> None:
        self.clients, self.client = clients, clients.federation.population.ids[place]
        self.home, self.notes = clients.folder / str(place), OrderNotes()

    def obey(self, order: Order) -> Outcome | Enrolment:
        """Carry out an order under a lock: another process may still work on a late one."""
        self.home.mkdir(exist_ok=True)
        with RunFolder(self.home).locked():
            return super().obey(order)

    def enrol(self, offer: Mapping[str, Any]) -> Enrolment:
        """Join the run that this simulation plays."""
        return self.at(str(offer["run"])).enrolment()

    def at(self, run: str) -> Resident:
        """The client with the state of its record."""
        if run != self.clients.run:
            raise StepFailed(f"run {run} is not the one of {self.clients.folder}; start the simulation again")
        return Resident(self.clients.federation, self.client, self.home / "record", fresh=False)
