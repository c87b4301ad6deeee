"""The names of all runs that a site has joined: removing records of runs does not make room for further ones."""

from __future__ import annotations

import json
from pathlib import Path

from potluck.deploy.record_files import read_own
from potluck.errors import RunError
from potluck.files import write_json

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

    def add(self, run: str) -> None:
        """Count a run; it is on disk when this returns."""
        if run not in self._names or not self._file.exists():
            self._names.add(run)
            write_json(self._file, sorted(self._names))


def _read(file: Path) -> set[str]:
    if not file.exists() and not file.is_symlink():
        return set()
    try:
        names = json.loads(read_own(file))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it is no list of names")
        return set(names)
    except ValueError as error:
        raise RunError(f"{file} cannot be read: {error}; restore it") from error
