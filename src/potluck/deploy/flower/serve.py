"""`potluck serve`: a run whose clients join over Flower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from potluck.core.card import ClientId
from potluck.deploy.fingerprints import client_keys
from potluck.deploy.flower.connections import Security, is_open, split_address
from potluck.deploy.flower.processes import require_files, require_flower
from potluck.deploy.flower.relay import relaying
from potluck.deploy.flower.resume import to_keep
from potluck.deploy.run import open_folder, play, prepared
from potluck.errors import ConfigError
from potluck.experiment.blocks import Sites
from potluck.experiment.schema import Experiment
from potluck.runs.observers import Watcher
from potluck.runs.results.run_result import RunResult


def serve(
    experiment: Experiment,
    folder: Path,
    address: str,
    security: Security,
    watcher: Watcher,
    exclude: Sequence[ClientId] = (),
    include: Sequence[ClientId] = (),
) -> RunResult:
    """Run an experiment over the SuperLink at an address. Flower's logs are in `flower/` in the run's folder."""
    require_flower()
    split_address(address)
    security.check(address, ("ca", "certificate", "key"))
    require_files(security.ca, security.certificate, security.key)
    experiment = prepared(experiment)
    keys = chosen_keys(experiment, security, address)
    home = open_folder(folder)
    place, patience = (home / "flower").resolve(), experiment.engine.patience
    with relaying(address, security, place, patience, watcher.notice) as courier:
        watcher.notice(f"waiting at {address} for the clients of {experiment.name}")
        told = to_keep(folder, experiment, address, security)
        return play(experiment, courier, home, watcher, keys, exclude=exclude, include=include, told=told)


def chosen_keys(experiment: Experiment, security: Security, address: str) -> dict[str, str] | None:
    """The keys of the clients that are known from the start; none where clients are not tied to keys.

    Flower makes every node sign with its key, registered or not, so a node does own the key it shows.
    """
    if security.client_keys is None and security.node_keys and not is_open(address):
        raise ConfigError(
            "node keys are asked for, and a SuperLink that is started now knows none: give --client-keys, or "
            "start one and register them, or --no-node-keys to take in whoever comes"
        )
    if security.client_keys is None:
        return {} if security.node_keys else None
    assert isinstance(experiment.partition, Sites)
    return client_keys(security.client_keys, experiment.partition.sites)
