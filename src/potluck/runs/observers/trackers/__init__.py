"""Trackers: TensorBoard, Weights & Biases and MLflow, told how a run goes. One file each."""

from __future__ import annotations

from importlib.util import find_spec

from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.experiment.track import TrackSettings
from potluck.runs.folder import RunFolder
from potluck.runs.observers.base import Observer
from potluck.runs.observers.trackers.mlflow import MlflowTracker
from potluck.runs.observers.trackers.tensorboard import TensorBoardTracker
from potluck.runs.observers.trackers.tracker import Tracker
from potluck.runs.observers.trackers.wandb import WandbTracker
from potluck.version import install_command

TRACKERS: tuple[type[Tracker], ...] = (TensorBoardTracker, WandbTracker, MlflowTracker)


def make_trackers(experiment: Experiment, folder: RunFolder, told: Observer) -> list[Tracker]:
    """The trackers that an experiment asks for; `told` hears of one that fails."""
    check_trackers(experiment.track)
    return [kind(experiment, folder, told) for kind in _asked(experiment.track)]


def check_trackers(track: TrackSettings) -> None:
    """Refuse a tracker that is not installed, before anything is trained."""
    for kind in _asked(track):
        if find_spec(kind.name) is None:
            raise ConfigError(f"track: {kind.name} is not installed; {install_command('track')} brings it")


def _asked(track: TrackSettings) -> list[type[Tracker]]:
    return [kind for kind in TRACKERS if getattr(track, kind.name) is not None]
