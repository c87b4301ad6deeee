"""`potluck serve`: a run over Flower."""

from __future__ import annotations

from pathlib import Path

from potluck.engine.flower.processes import Security, relaying, require_files, require_flower, split_address
from potluck.engine.flower.server import open_folder, play, prepared
from potluck.experiment import Experiment
from potluck.runs import RunResult, Watcher


def serve(
    experiment: Experiment, folder: Path, address: str, security: Security, watcher: Watcher
) -> RunResult:
    """Run an experiment over the SuperLink at an address; Flower's logs lie beside the run's."""
    require_flower()
    split_address(address)
    security.check(address, ("ca", "certificate", "key"))
    require_files(security.ca, security.certificate, security.key)
    experiment = prepared(experiment)
    home = open_folder(folder)
    with relaying(address, security, (home / "flower").resolve(), watcher.notice) as courier:
        watcher.notice(f"waiting at {address} for the clients of {experiment.name}")
        return play(experiment, courier, home, watcher)
