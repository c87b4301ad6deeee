"""Trying again: how often, and after what waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

GROWING = (5.0, 10.0, 20.0, 40.0, 60.0)  # seconds before the second, third, … try; the last one from then on


@dataclass(frozen=True)
class Clock:
    """The time and a way to let it pass; tests have one of their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Waits:
    """The waits of a run. Without a schedule there are none, as in a simulation: nobody comes back by waiting."""

    schedule: tuple[float, ...] = ()
    patience: float = 0.0  # seconds that the waits for lost clients of one round may take in sum
    clock: Clock = field(default_factory=Clock)

    def before(self, attempt: int) -> float:
        """The seconds to wait before an attempt; the first one is 1."""
        return self.schedule[min(attempt - 2, len(self.schedule) - 1)] if self.schedule else 0.0


class Tries:
    """Counts the attempts at one thing. One that failed because somebody was lost is followed by a wait.

    After `attempts` tries it is over, unless only a wait is needed and `patience` has some left.
    """

    def __init__(self, attempts: int, waits: Waits, patience: float = 0.0) -> None:
        self.attempts, self.waits, self.left = attempts, waits, patience
        self.made = 1

    def next_wait(self, lost: bool) -> float | None:
        """The seconds to wait before the next try; None where there is none."""
        wait = self.waits.before(self.made + 1) if lost else 0.0
        if self.made < self.attempts or 0.0 < wait <= self.left:
            return wait
        return None

    def again(self, wait: float) -> None:
        """Wait and count the next try."""
        if wait:
            self.waits.clock.sleep(wait)
        self.left -= wait
        self.made += 1
