"""Advice before the first round of a run."""

from __future__ import annotations

from collections.abc import Callable

from potluck.federation.federation import Federation
from potluck.runs.advice import advice
from potluck.runs.observers.base import Observer


class Advisor(Observer):
    """Tells the other observers what the user should know about a run that is about to start."""

    def __init__(self, federation: Federation, tell: Callable[[str], None]) -> None:
        self.federation, self.tell = federation, tell

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Give advice, unless the run only goes on."""
        if done == 0:
            for sentence in advice(self.federation):
                self.tell(sentence)
