"""How far the logs of a run reach at a checkpoint: their length and SHA-256, kept up as they grow."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from potluck.errors import RunError
from potluck.files import opened, sha256, size_of

Marks = Mapping[str, Mapping[str, Any]]  # log → {"bytes": its length, "sha256": its checksum}
_PIECE = 1 << 20


class LogMarks:
    """Follows the logs in a folder: each byte is read once, however many checkpoints there are."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self._seen = {name: (0, hashlib.sha256()) for name in names}

    def now(self) -> dict[str, dict[str, Any]]:
        """The marks of the logs as they are; one that has become shorter is refused."""
        for name, (seen, content) in self._seen.items():
            length = _length(self.folder / name)
            if length < seen:
                raise RunError(
                    f"{self.folder / name} became shorter while the run went on; "
                    "let nobody else write there, and resume the run"
                )
            if length > seen:
                _hash_part(self.folder / name, content, seen, length)
                self._seen[name] = length, content
        return {name: _mark(seen, content) for name, (seen, content) in self._seen.items()}

    def restart(self) -> None:
        """The logs were cut or written anew: look at all of them again."""
        self._seen = {name: (0, hashlib.sha256()) for name in self._seen}

    def sync(self) -> None:
        """Make sure that the logs are on the disk."""
        for name in self._seen:
            if (self.folder / name).exists():
                with opened(self.folder / name, os.O_RDONLY) as handle:
                    os.fsync(handle)


def mark_of(content: bytes) -> dict[str, Any]:
    """The mark of a log with this content."""
    return _mark(len(content), hashlib.sha256(content))


def is_marked(path: Path, marks: Any, name: str) -> bool:
    """Whether a file is what marks say of a log; one of another length is not read."""
    mark = marks.get(name) if isinstance(marks, Mapping) else None
    return (
        isinstance(mark, Mapping)
        and path.lstat().st_size == mark.get("bytes")
        and sha256(path) == mark.get("sha256")
    )


def check_marks(folder: Path, marks: Any, names: Iterable[str], whole: bool = False) -> None:
    """Refuse logs that are not what they were at a checkpoint; later lines do not count, unless it was `whole`."""
    for name in names:
        path, mark = folder / name, marks.get(name) if isinstance(marks, Mapping) else None
        if not isinstance(mark, Mapping) or not isinstance(mark.get("bytes"), int) or mark["bytes"] < 0:
            raise RunError(f"the checkpoint does not say how long {path} was")
        found, length = hashlib.sha256(), _length(path)
        if length < mark["bytes"]:
            what = "is shorter than at the last checkpoint: lines of it are lost"
            raise RunError(
                f"{path} {what if path.exists() else 'is missing, and the last checkpoint knows it'}"
            )
        if whole and length > mark["bytes"]:
            raise RunError(f"{path} is damaged: it is longer than it was at the end of the run")
        if mark["bytes"]:
            _check_room(path)
        _hash_part(path, found, 0, mark["bytes"])
        if found.hexdigest() != mark.get("sha256"):
            raise RunError(f"{path} is damaged: its lines are not those of the last checkpoint")


def _length(path: Path) -> int:
    return path.lstat().st_size if path.exists() else 0


def _check_room(path: Path) -> None:
    try:
        size_of(path)
    except OSError as error:
        raise RunError(f"{path} is damaged: {error.strerror or error}") from error


def _hash_part(path: Path, content: Any, start: int, end: int) -> None:
    """Add a part of a file to a checksum."""
    if start == end:
        return
    with opened(path, os.O_RDONLY) as handle:
        os.lseek(handle, start, os.SEEK_SET)
        while start < end and (piece := os.read(handle, min(_PIECE, end - start))):
            content.update(piece)
            start += len(piece)


def _mark(length: int, content: Any) -> dict[str, Any]:
    return {"bytes": length, "sha256": content.hexdigest()}
