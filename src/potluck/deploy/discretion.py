"""What of an error at a site a server may hear: where it may tell of files, data or the model, its kind alone."""

from __future__ import annotations

import re

from potluck.core.own_metrics import TrialFailed
from potluck.errors import DataError, ModelError, PotluckError, RunError

PRIVATE = (DataError, ModelError, RunError, TrialFailed)  # may tell of the site's files, model, data and code
ASIDE = " at the site; the log of its worker says more"
_PATH = re.compile(r"(?<![\w.)\]])[.~]{0,2}/[^\s/]")  # how a path in a sentence begins


def names_path(sentence: str) -> bool:
    """Whether a sentence names a path that is not relative to something known.

    >>> names_path("there is no file '/srv/x.csv'"), names_path("tensor 'small/fc.weight' is not finite")
    (True, False)
    """
    return _PATH.search(sentence) is not None


def in_public(error: BaseException) -> str:
    """What a server hears of an error."""
    if isinstance(error, PotluckError) and not isinstance(error, PRIVATE) and not names_path(str(error)):
        return str(error)
    return f"{type(error).__name__}{ASIDE}"
