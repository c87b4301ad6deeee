"""Advice as warnings of Python, for runs without a progress display."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from itertools import takewhile
from pathlib import Path

from potluck.core.plain_values import harmless
from potluck.errors import PotluckAdvice
from potluck.runs.observers.base import Observer

HOME = str(Path(__file__).parents[2]) + os.sep  # the package; the user's line is the first one outside


class Warner(Observer):
    """Turns advice into a `PotluckAdvice` at the user's line, once for all runs that share `advised`."""

    def __init__(self, advised: set[str] | None = None) -> None:
        self.advised = set[str]() if advised is None else advised

    def advise(self, sentence: str) -> None:
        """Warn, unless another run gave the same advice."""
        if sentence not in self.advised:
            self.advised.add(sentence)
            warnings.warn(harmless(sentence), PotluckAdvice, stacklevel=_levels_inside() + 1)


def _levels_inside() -> int:
    """How many calls, from the one that asks outwards, are inside the package."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return sum(1 for _ in takewhile(lambda file: file.startswith(HOME), files))
