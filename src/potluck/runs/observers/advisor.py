"""Advice before the first round of a run."""

from __future__ import annotations

from collections.abc import Callable

from potluck.federation.federation import Federation
from potluck.runs.advice import advice
from potluck.runs.observers.base import Observer


class Advisor(Observer):
    """Tells the other observers what the user should know about a run that is about to start, and keeps it."""

    def __init__(self, federation: Federation, tell: Callable[[str], None], elsewhere: bool = False) -> None:
        self.federation, self.tell, self.elsewhere = federation, tell, elsewhere
        self.sentences: list[str] = []

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Gather advice, and give it unless the run only goes on."""
        self.sentences = list(advice(self.federation, self.elsewhere))
        for sentence in self.sentences if done == 0 else ():
            self.tell(sentence)
