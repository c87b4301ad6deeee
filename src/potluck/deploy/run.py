"""A run of a real federation, as the server plays it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from potluck.core.card import ClientId
from potluck.deploy.engine import Courier, FlowerEngine
from potluck.deploy.enrolled import _sites, enrolled_federation
from potluck.deploy.keyring import KeyRegister
from potluck.deploy.site import welcome
from potluck.engine.evaluate import check_evaluation
from potluck.engine.norms import largest_ratio
from potluck.errors import ConfigError, RunError
from potluck.experiment.differences import first_difference
from potluck.experiment.export import to_values
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import read_json, write_json
from potluck.methods.registry import find_method
from potluck.runs.api import write_start
from potluck.runs.environment import check_version
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Run
from potluck.runs.observers import Observer, Observers, RoundEnd
from potluck.runs.results.run_result import RunResult

FILE = "federation.json"


class Presence(Observer):
    """Says after every round which clients are connected and how many bytes have crossed."""

    def __init__(self, engine: FlowerEngine, tell: Callable[[str], None]) -> None:
        self.engine, self.tell = engine, tell

    def round(self, end: RoundEnd) -> None:
        """Count who is there."""
        engine = self.engine
        there = set(engine.courier.nodes())
        present = [client for client, node in engine.homes.items() if node in there]
        self.tell(
            f"round {end.round}: {len(present)} of {len(engine.ids)} clients are here ({', '.join(present)}); "
            f"so far {engine.sent:,} bytes sent, {engine.received:,} received"
        )


def federated_run(
    engine: FlowerEngine,
    experiment: Experiment,
    folder: RunFolder,
    federation: Federation,
    watcher: Observer,
    run: str,
    incarnation: int,
    fresh: bool,
) -> Run:
    """A run over the clients of a federation, ready to play from its start or from its last checkpoint."""
    going = Run(experiment, folder, federation, Observers(watcher, Presence(engine, watcher.notice)), engine)
    going.rounds.name, going.rounds.incarnation = run, incarnation
    engine.largest, engine.facts = going.rounds.largest_reply, going.examiner.facts
    going.rounds.acceptance.largest_ratio = largest_ratio(experiment.training.max_norm, strangers=True)
    if not fresh:
        going.restore()
    return going


def play(
    experiment: Experiment,
    courier: Courier,
    folder: RunFolder,
    watcher: Observer | None = None,
    keys: Mapping[ClientId, str] | None = None,
) -> RunResult:
    """Run a federation in a folder: from the start, or from where an earlier server ended.

    `experiment` is one that `prepared` gave. With `keys` every client id belongs to one node key: the one named
    there, else the first it comes with.
    """
    watcher = watcher or Observer()
    with folder.locked():
        fresh = not (folder / "config.yaml").exists()
        if not fresh:
            _check_same(folder, experiment)
        if (folder / "summary.json").exists():
            raise RunError(f"the run in {folder.path} is finished; choose another --out")
        run, incarnation = begin(folder)
        register = None if keys is None else key_register(folder, keys)
        fields = find_method(experiment.method.name).told()
        told = welcome(experiment, run)
        engine = FlowerEngine(
            courier, _sites(experiment).sites, experiment.engine, fields, told, watcher.notice, register
        )
        federation = enrolled_federation(experiment, engine.gather())
        check_evaluation(experiment.evaluate, federation)
        if federation.method.open_option(federation.population) is not None:
            raise ConfigError(
                "an option left open (auto) is chosen by trial runs; choose it before a federation"
            )
        if fresh:
            write_start(folder, experiment, federation)
        return federated_run(engine, experiment, folder, federation, watcher, run, incarnation, fresh).play()


def prepared(experiment: Experiment) -> Experiment:
    """The experiment as a federation runs it: a checkpoint after every round, own test data only."""
    _sites(experiment)
    if experiment.evaluate.on == "global":
        raise ConfigError(
            "evaluate.on: the clients of a federation have only test data of their own; use own"
        )
    refuse_predictions(experiment)
    return experiment.variant(checkpoint={"every": 0})


def refuse_predictions(experiment: Experiment) -> None:
    """Predictions tell of single samples; a federation's clients send none."""
    if experiment.evaluate.predictions != "none":
        raise ConfigError("evaluate.predictions: those of a federation stay with its clients; leave it out")


def open_folder(path: Path) -> RunFolder:
    """The run folder, made if it does not exist."""
    return RunFolder(path) if path.is_dir() else RunFolder.create(path, exact=True)


def _check_same(folder: RunFolder, experiment: Experiment) -> None:
    about = folder.about()
    check_version(folder.path, about)
    key = first_difference(about.get("settings"), to_values(experiment))
    if key is not None:
        raise RunError(
            f"{folder.path} was begun with other settings ({key}); go on with those, or choose another --out"
        )
    if not (folder / FILE).exists():
        raise RunError(f"{folder.path} is no run of a federation; choose another --out")


def begin(folder: RunFolder) -> tuple[str, int]:
    """A name for the run that no other has, and how often it was started, this time included."""
    about: dict[str, Any] = {"run": secrets.token_hex(8), "starts": 0}
    if (folder / FILE).exists():
        about = read_json(folder / FILE)
    about["starts"] += 1
    write_json(folder / FILE, about)
    return str(about["run"]), int(about["starts"])


def key_register(folder: RunFolder, given: Mapping[ClientId, str]) -> KeyRegister:
    """The register of a run's node keys, kept in its folder; a key given by hand replaces a kept one."""

    def keep(keys: Mapping[ClientId, str]) -> None:
        write_json(folder / FILE, read_json(folder / FILE) | {"keys": dict(keys)})

    return KeyRegister({**read_json(folder / FILE).get("keys", {}), **given}, keep)
