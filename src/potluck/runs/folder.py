"""The folder of a run: made once, locked while a process works in it, with logs that grow line by line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from potluck.errors import RunError

FORMAT = 1  # version of the layout; a folder with another one is not resumed
LOGS = ("metrics.jsonl", "ledger.jsonl", "timing.jsonl", "observations.jsonl")


class RunFolder:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, wanted: Path, exact: bool) -> RunFolder:
        """Make a new folder: the wanted one, or (unless `exact`) the next free `-2`, `-3`, …"""
        number = 1
        while True:
            path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError as error:
                if exact:
                    raise RunError(
                        f"{path} exists; choose another folder, or go on with it: potluck resume {path}"
                    ) from error
                number += 1
            except OSError as error:
                raise RunError(f"cannot make the folder {path}: {error.strerror or error}") from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, so that no other process works in it at the same time."""
        with (self / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"another process is at work in {self.path}; wait for it or end it") from error
            yield

    def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to a log, which is made if it does not exist."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            with (self / name).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RunError(f"cannot write {self / name}: {error.strerror or error}") from error

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a log, none if it does not exist."""
        if (self / name).exists():
            with (self / name).open(encoding="utf-8") as file:
                yield from map(json.loads, file)

    def offsets(self) -> dict[str, int]:
        """The length of every log in bytes, as a checkpoint notes it."""
        return {name: (self / name).stat().st_size if (self / name).exists() else 0 for name in LOGS}

    def cut(self, offsets: Mapping[str, int]) -> None:
        """Cut every log back to its length at a checkpoint; a log without one becomes empty."""
        for name in LOGS:
            if (self / name).exists():
                os.truncate(self / name, offsets.get(name, 0))
