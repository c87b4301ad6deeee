"""All exceptions of potluck. Each message is one sentence that names the culprit and, if possible, what to do."""

from __future__ import annotations

import difflib
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

H = TypeVar("H", bound=Hashable)


class PotluckError(Exception):
    """Base class: bad input or a failed run. The command line prints the sentence and exits with code 2.

    A sentence may quote somebody else's file, so control characters are taken out of it.
    """

    def __str__(self) -> str:
        return harmless(super().__str__())


def harmless(text: str) -> str:
    """The same text without letters that a terminal would obey; its lines and spaces stay.

    >>> harmless("a  b\\n\\x1b[2Jc")
    'a  b\\n?[2Jc'
    """
    if text.isprintable():
        return text
    kept = (letter.isprintable() or letter == "\n" or unicodedata.category(letter) == "Zs" for letter in text)
    return "".join(letter if keep else "?" for letter, keep in zip(text, kept, strict=True))


class StoppedComplete(KeyboardInterrupt):
    """A run was stopped by hand after all of it was played and written: there is nothing to continue."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"stopped; the run is complete, see {folder}")


class ConfigError(PotluckError):
    """The experiment asks for something that does not exist or does not fit together."""


class Misfits(ConfigError):
    """Some clients cannot take part, each for a reason of its own; the others can."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


class DataError(PotluckError):
    """A data set is missing, broken, or cannot be split as asked."""


class PublicDataError(ConfigError, DataError):
    """Public data do not fit what is asked of them, or a client's own data; the sentence may tell of either."""


class ModelError(PotluckError):
    """A model breaks its contract on features, head or shapes."""


class HeadError(ModelError):
    """A head has another number of outputs than the task has classes."""


class MessageError(PotluckError):
    """A message breaks the wire contract: an undeclared name, a wrong shape, a value that is not finite."""


class PinError(PotluckError):
    """The server asks a site for something that the site has not agreed to."""


class StepFailed(PotluckError):
    """A client could not do a step; the round goes on without it."""


class RoundFailed(PotluckError):
    """Fewer clients answered than the quorum requires; the round is tried again with the same cohort.

    `failures` has the reason of each client that dropped out, `lost` those of them from which no answer came. Where
    it is `spoiled`, enough clients answered, and what the server made of it is not finite.
    """

    def __init__(
        self,
        sentence: str,
        failures: Mapping[str, str] | None = None,
        lost: Iterable[str] = (),
        spoiled: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.failures, self.lost, self.spoiled = dict(failures or {}), frozenset(lost), spoiled


class RunError(PotluckError):
    """A run folder cannot be written, read or resumed."""


class PotluckAdvice(UserWarning):
    """Advice on a run that is about to start, where no progress display shows it."""


ALIKE = 0.6  # from 0 to 1: names less alike than this are no help as a guess
MOST_KNOWN = 100  # names in a sentence; a table may have columns without end


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a sentence about an unknown name: the nearest known name, or the known ones."""
    known = sorted(known)
    if not known:
        return "there is none"
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=ALIKE)
    return f"did you mean {close[0]!r}?" if close else f"known: {some(known, MOST_KNOWN)}"


def some(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{', '.join(listed[:most])}{more}"


def check_path(argument: str, given: Any, error: type[PotluckError] = ConfigError) -> None:
    """Refuse an argument that is no path."""
    if not isinstance(given, str | Path):
        raise error(f"{argument}: give a path, not a {type(given).__name__}")


def check_whole_number(argument: str, given: Any) -> None:
    """Refuse an argument that is no whole number."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise ConfigError(f"{argument}: give a whole number, not {given!r}")


def first_twice(names: Iterable[H]) -> H | None:
    """The first of some names that comes again, None if all are different; there may be very many."""
    counts = Counter(names)
    return next((one for one, times in counts.items() if times > 1), None)


def kind_and_message(error: BaseException) -> str:
    """An exception as Python shows it: `KeyError: 'x'`, or only its type where it says nothing."""
    kind, message = type(error).__name__, str(error)
    return f"{kind}: {message}" if message else kind


def of_a_warning(warning: Warning) -> str:
    """What to do about a warning that Python raises as an error."""
    return (
        f"{kind_and_message(warning)}; a library warns of something, and Python was told to stop at warnings: "
        "leave out PYTHONWARNINGS=error or -W error"
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
