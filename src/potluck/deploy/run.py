"""A run of a real federation, as the server plays it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from potluck.core.card import ClientId
from potluck.deploy.engine import Courier, FlowerEngine
from potluck.deploy.enrolled import _sites, enrolled_federation
from potluck.deploy.keyring import KeyRegister
from potluck.deploy.site import welcome
from potluck.errors import ConfigError, RunError
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import read_json, write_json
from potluck.methods.registry import find_method
from potluck.runs.api import write_start
from potluck.runs.environment import check_version
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Run, chosen_modes
from potluck.runs.observers import Watcher
from potluck.runs.result import RunResult

FILE = "federation.json"


class FederatedRun(Run):
    """A run whose clients outlive it: no client hears of a round's end before the checkpoint of it is on disk."""

    @classmethod
    def over(
        cls,
        engine: FlowerEngine,
        experiment: Experiment,
        folder: RunFolder,
        federation: Federation,
        watcher: Watcher,
        run: str,
        incarnation: int,
        fresh: bool,
    ) -> Self:
        """A run that is ready to play: from its start, or from its last checkpoint."""
        going = cls(experiment, folder, federation, watcher, engine)
        going.rounds.name, going.rounds.incarnation = run, incarnation
        engine.largest = going.rounds.largest_reply
        if not fresh:
            going.restore(going.checkpoints.load())
        return going

    def _advise(self) -> None:
        """The server knows too little of the sites' models and samples."""

    def _checkpoint(self) -> None:
        super()._checkpoint()
        self.checkpoints.wait()

    def _tell(self, round_: int, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
        super()._tell(round_, lines, seconds)
        engine = self.engine
        assert isinstance(engine, FlowerEngine)
        there = set(engine.courier.nodes())
        present = [client for client, node in engine.homes.items() if node in there]
        self.watcher.notice(
            f"round {round_}: {len(present)} of {len(engine.ids)} clients are here ({', '.join(present)}); so far "
            f"{engine.sent:,} bytes sent, {engine.received:,} received"
        )


def play(
    experiment: Experiment,
    courier: Courier,
    folder: RunFolder,
    watcher: Watcher | None = None,
    keys: Mapping[ClientId, str] | None = None,
) -> RunResult:
    """Run a federation in a folder: from the start, or on from where an earlier server ended.

    With `keys` every client id belongs to one node key: the one named there, else the first it comes with.
    """
    watcher = watcher or Watcher()
    experiment = prepared(experiment)
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
        chosen_modes(experiment, federation.method.modes)
        if federation.method.open_option(federation.population) is not None:
            raise ConfigError(
                "an option left open (auto) is chosen by trial runs; choose it before a federation"
            )
        if fresh:
            write_start(folder, experiment, federation)
        return FederatedRun.over(
            engine, experiment, folder, federation, watcher, run, incarnation, fresh
        ).play()


def prepared(experiment: Experiment) -> Experiment:
    """The experiment as a federation runs it: a checkpoint after every round, own test data only."""
    _sites(experiment)
    if experiment.evaluate.on == "global":
        raise ConfigError(
            "evaluate.on: the clients of a federation have only test data of their own; use own"
        )
    return experiment.variant(checkpoint={"every": 0})


def open_folder(path: Path) -> RunFolder:
    """The run folder, made if it is not there."""
    return RunFolder(path) if path.is_dir() else RunFolder.create(path, exact=True)


def _check_same(folder: RunFolder, experiment: Experiment) -> None:
    check_version(folder.path, read_json(folder / "environment.json"))
    if (folder / "config.yaml").read_text() != experiment.to_yaml():
        raise RunError(
            f"{folder.path} was begun with other settings; go on with those, or choose another --out"
        )
    if not (folder / FILE).exists():
        raise RunError(f"{folder.path} is no run of a federation; choose another --out")


def begin(folder: RunFolder) -> tuple[str, int]:
    """The name of the run among all others, and how often it was started, this time included."""
    about: dict[str, Any] = {"run": secrets.token_hex(8), "starts": 0}
    if (folder / FILE).exists():
        about = read_json(folder / FILE)
    about["starts"] += 1
    write_json(folder / FILE, about)
    return str(about["run"]), int(about["starts"])


def key_register(folder: RunFolder, given: Mapping[ClientId, str]) -> KeyRegister:
    """The register of a run's keys, kept beside its name; a key that is given by hand counts before a kept one."""

    def keep(keys: Mapping[ClientId, str]) -> None:
        write_json(folder / FILE, read_json(folder / FILE) | {"keys": dict(keys)})

    return KeyRegister({**read_json(folder / FILE).get("keys", {}), **given}, keep)
