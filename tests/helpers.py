"""Observers and experiments that several tests use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from potluck import Experiment, Observer
from potluck.runs.observers import RoundEnd


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
