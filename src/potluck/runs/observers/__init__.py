"""Observers of a run: logs, checkpoints, advice, and whatever a user adds."""

from potluck.runs.observers.base import Observer, Observers, RoundEnd, StopRun, Watcher
from potluck.runs.observers.stopping import EarlyStopping, TimeLimit

__all__ = ["EarlyStopping", "Observer", "Observers", "RoundEnd", "StopRun", "TimeLimit", "Watcher"]
