"""Observers and experiments that several tests use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from potluck import Experiment, Observer
from potluck.runs.api import run
from potluck.runs.loop import Interrupted
from potluck.runs.observers import RoundEnd

# A run of two seconds at most; tests change what they are about.
TINY: dict[str, Any] = {
    "data": {"name": "digits", "samples": 200},
    "partition": {"kind": "iid", "clients": 2},
    "models": ["mlp-small"],
    "method": "fedavg",
    "training": {"rounds": 3, "batch_size": 64},
    "engine": {"device": "cpu"},
}


class StopAfter(Observer):
    """Presses Ctrl-C after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round(self, end: RoundEnd) -> None:
        if end.round == self.rounds:
            raise KeyboardInterrupt


class Listener(Observer):
    """Keeps every notice."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, sentence: str) -> None:
        self.notices.append(sentence)


def changed_experiment(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> Experiment:
    """The experiment of some settings, with values of its blocks changed one by one and other values replaced."""
    blocks = {
        name: {**settings[name], **value}
        if isinstance(value, dict) and isinstance(settings.get(name), dict)
        else value
        for name, value in changes.items()
    }
    return Experiment.make(**{**settings, **blocks})


def stopped_run(experiment: Experiment, out: Path, rounds: int) -> Path:
    """The folder of a run in which Ctrl-C was pressed after some rounds."""
    with pytest.raises(Interrupted):
        run(experiment, out=out, watcher=StopAfter(rounds))
    return out
