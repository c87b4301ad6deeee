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
from potluck.files import read_json, write_whole

FORMAT = 2  # version of the layout; a folder with another one is not resumed
START = ("environment.json", "split.json", "config.yaml")  # written before the first round, in this order
COMPARED = ("experiment.yaml", "comparison.json", "sweep.json")  # only in the folder of a comparison
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

    @classmethod
    def begun(cls, path: Path) -> RunFolder:
        """The folder of a run that has begun; anything else is refused."""
        if not path.is_dir():
            raise RunError(f"there is no run folder {path}")
        if any((path / name).exists() for name in COMPARED):
            raise RunError(
                f"{path} is a comparison, and resume takes a run; call compare again to go on with all of it, with "
                "a higher training.rounds to play more rounds"
            )
        folder = cls(path)
        missing = next((name for name in START if not (folder / name).is_file()), None)
        if missing is not None:
            raise RunError(
                f"{path} cannot be resumed: it has no {missing}, so it is no run folder, or its run was stopped "
                "before the first round; start the run anew"
            )
        inside = (*LOGS, ".lock", "checkpoints")  # written into, or cleared of what is not needed
        link = next((name for name in inside if (folder / name).is_symlink()), None)
        if link is not None:
            raise RunError(
                f"{path}: {link} is a link to another place, which is not written into; put it here instead"
            )
        return folder

    def about(self) -> dict[str, Any]:
        """What `environment.json` says."""
        about = read_json(self / "environment.json")
        if not isinstance(about, dict):
            raise RunError(f"{self / 'environment.json'} was not written by potluck: it is no mapping")
        return about

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, so that no other process works in it at the same time."""
        try:
            opened = (self / ".lock").open("w")
        except OSError as error:
            raise RunError(f"cannot write into {self.path}: {error.strerror or error}") from error
        with opened as file:
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

    def check_lengths(self, offsets: Mapping[str, int]) -> None:
        """Refuse a log that has lost lines since a checkpoint."""
        for name, size in self.offsets().items():
            if size < offsets.get(name, 0):
                raise RunError(f"{self / name} is shorter than at the last checkpoint: lines of it are lost")

    def cut(self, offsets: Mapping[str, int]) -> None:
        """Cut every log back to its length at a checkpoint; a log without one becomes empty."""
        for name, size in self.offsets().items():
            length = offsets.get(name, 0)
            if size > length:
                os.truncate(self / name, length)

    def drop_evaluations(self, round_: int) -> bool:
        """Take the evaluation of a round out of the logs; whether there was one."""
        dropped = False
        for name in ("metrics.jsonl", "ledger.jsonl"):
            lines = (self / name).read_bytes().splitlines(keepends=True) if (self / name).exists() else []
            kept = [line for line in lines if not _is_evaluation(json.loads(line), round_)]
            if len(kept) < len(lines):
                write_whole(self / name, b"".join(kept))
                dropped = True
        return dropped


def _is_evaluation(line: Mapping[str, Any], round_: int) -> bool:
    """Whether a line of a log says what clients measured in a round, or what was sent to them for that."""
    return bool(line["round"] == round_ and line.get("purpose", "evaluate") == "evaluate")
