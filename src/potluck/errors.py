"""What can go wrong, each as one sentence that names the culprit and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PotluckError(Exception):
    """Bad input or a failed run; the command line prints the sentence and leaves with code 2."""


class ConfigError(PotluckError):
    """The experiment asks for something that does not exist or does not fit together."""


class DataError(PotluckError):
    """A data set is missing, broken, or cannot be split as asked."""


class ModelError(PotluckError):
    """A model does not keep the contract: features, head, shapes."""


class MessageError(PotluckError):
    """A message breaks the wire contract: an undeclared name, a wrong shape, a value that is not finite."""


class PinError(PotluckError):
    """The server asks a site for something else than the site has agreed to."""


class StepFailed(PotluckError):
    """A client could not do a step; the round goes on without it."""


class RoundFailed(PotluckError):
    """Fewer clients answered than the quorum asks for; the round is tried again with the same cohort."""


class RunError(PotluckError):
    """A run folder cannot be written, read or resumed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
