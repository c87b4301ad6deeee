"""Observers of a run: logs, checkpoints, advice, and whatever a user adds."""

from potluck.runs.observers.base import Observer, Observers, RoundEnd, StopRun, Watcher

__all__ = ["Observer", "Observers", "RoundEnd", "StopRun", "Watcher"]
