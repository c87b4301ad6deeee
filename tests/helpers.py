"""Observers that several tests use."""

from __future__ import annotations

from potluck import Observer
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
