"""Observers of a run: logs, checkpoints, advice, and whatever a user adds."""

from potluck.runs.observers.base import Observer, Observers, RoundEnd, StopRun
from potluck.runs.observers.stopping import EarlyStopping, TimeLimit
from potluck.runs.observers.trace import RoundTrace

__all__ = [
    "EarlyStopping",
    "Observer",
    "Observers",
    "RoundEnd",
    "RoundTrace",
    "StopRun",
    "TimeLimit",
]
