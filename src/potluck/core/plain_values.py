"""Values from JSON that a stranger wrote: checked for type and bounds before anything is done with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from potluck.errors import harmless as harmless

LONGEST_NAME = 500  # characters
LONGEST = 1000  # characters of a sentence
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")  # of terminals


def whole(value: Any, low: int, high: int, what: str) -> int:
    """A whole number from `low` to `high`; a `ValueError` for anything else, also for 3.0, "3" and true.

    >>> whole(3, 0, 10, "a number of clients")
    3
    """
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what} must be a whole number from {low:,} to {high:,}, not {shown(value)}")
    return value


def wholes(value: Any, low: int, high: int, most: int, what: str) -> tuple[int, ...]:
    """At most `most` whole numbers from `low` to `high`."""
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(f"{what} must be a list of at most {most:,} numbers, not {shown(value)}")
    return tuple(whole(one, low, high, what) for one in value)


def short_name(value: Any, what: str) -> str:
    """A short text that can be printed."""
    if not isinstance(value, str) or len(value) > LONGEST_NAME or not value.isprintable():
        raise ValueError(
            f"{what} must be a text of at most {LONGEST_NAME} printable letters, not {shown(value)}"
        )
    return value


def mapping(value: Any, most: int, what: str) -> Mapping[str, Any]:
    """A mapping with at most `most` entries, under printable names."""
    if not isinstance(value, Mapping) or len(value) > most:
        raise ValueError(f"{what} must be a mapping of at most {most:,} entries, not {shown(value)}")
    for key in value:
        short_name(key, f"a name in {what}")
    return value


def shown(value: Any) -> str:
    """A stranger's value in a sentence: short, and without letters that a terminal would obey."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def printable(text: str, most: int = LONGEST) -> str:
    """A stranger's text, made safe to print on a terminal: one line of at most so many letters, without escapes.

    >>> printable("red: \\x1b[31mno\\x1b[0m\\nbell: \\x07")
    'red: no bell: ?'
    """
    words = " ".join(ESCAPES.sub("", text[: 20 * most]).split())[:most]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def read_json(text: str | bytes) -> Any:
    """JSON in which no key stands twice; Python's reader would keep the last value without a word.

    A `ValueError` for everything that cannot be read, also where it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found
