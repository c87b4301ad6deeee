"""What a site's worker has to say to the people there: it keeps a few lines, and `potluck join` shows each once."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from potluck.core.plain_values import printable, read_json
from potluck.files import read_bounded
from potluck.live.status_file import write_small

FILE = "said.json"
KEPT = 50  # lines; `join` looks every second
FACTS = ("run", "round", "rounds", "order", "steps", "seconds", "sent", "received")  # beside a sentence


class Announcements:
    """The lines of a worker in a file of its home; without a home they are dropped.

    A worker that starts again goes on after the lines that are there: they may not have been shown yet, and its own
    come later, whatever the clock says now.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.path = None if home is None else home / FILE
        found = [] if self.path is None else _read(self.path)
        self._lines = [{**facts, "number": number, "sentence": said} for number, said, facts in found][-KEPT:]

    def __call__(self, sentence: str, **facts: Any) -> None:
        """Say a sentence, with facts that a log in JSON has as fields; a full disk does not disturb the work."""
        if self.path is None:
            return
        last = self._lines[-1]["number"] if self._lines else 0
        number = max(last + 1, int(1e6 * time.time()))  # it grows, also from one worker to the next
        known = {name: value for name, value in facts.items() if value is not None}
        self._lines = [*self._lines, {**known, "number": number, "sentence": printable(sentence)}][-KEPT:]
        with contextlib.suppress(OSError):
            write_small(self.path, {"lines": self._lines})


class Listener:
    """Reads the lines that a worker says from now on."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE
        self._last = max([number for number, _, _ in _read(self.path)], default=0)

    def new(self) -> list[tuple[str, dict[str, Any]]]:
        """The lines since the last call, each with its facts, safe to print."""
        found = [line for line in _read(self.path) if line[0] > self._last]
        self._last = max([self._last, *(number for number, _, _ in found)])
        return [(sentence, facts) for _, sentence, facts in found]


def _read(path: Path) -> list[tuple[int, str, dict[str, Any]]]:
    """All lines of a file; none where it cannot be read: it is no record."""
    try:
        lines = read_json(read_bounded(path, follow=False))["lines"]
        return [(int(line["number"]), printable(str(line["sentence"])), _facts(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return []


def _facts(line: dict[str, Any]) -> dict[str, Any]:
    found = {name: line[name] for name in FACTS if isinstance(line.get(name), str | int | float)}
    return {name: printable(value) if isinstance(value, str) else value for name, value in found.items()}
