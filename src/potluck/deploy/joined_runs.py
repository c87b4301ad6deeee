"""The names of all runs that a site has joined, those whose records were removed included.

Removing records does not make room for further runs, and a run whose record is gone is never joined again: it would
draw the same private noise for other messages, and count its attempts from the start.
"""

from __future__ import annotations

from pathlib import Path

from potluck.deploy.record_files import keep_names
from potluck.errors import RunError
from potluck.files import read_checked, write_checked

FILE = "joined.json"


class JoinedRuns:
    """The runs that a site has joined, kept in its home folder; those with records there count in any case."""

    def __init__(self, home: Path) -> None:
        self._file = home / FILE
        self._names = _read(self._file) | {file.stem for file in (home / "runs").glob("*.json")}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, run: object) -> bool:
        return run in self._names

    def add(self, *runs: str) -> None:
        """Count runs; they are on disk when this returns."""
        names = self._names | set(runs)
        if not names <= _read(self._file):
            write_checked(self._file, {"runs": sorted(names)})
        keep_names(self._file.parent)
        self._names = names


def _read(file: Path) -> set[str]:
    if not file.exists() and not file.is_symlink():
        return set()
    names = read_checked(file, "restore it", follow=False).get("runs")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunError(f"{file} cannot be read: it has no list of names; restore it")
    return set(names)
