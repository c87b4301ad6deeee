"""The folder of a run: made once, locked while a process works in it, with logs that grow line by line."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from potluck.core.validation import checked
from potluck.errors import RunError
from potluck.files import (
    WRITING,
    check_name,
    check_writable,
    clear_unfinished,
    make_folders,
    opened,
    read_json,
    refuse_links,
    write_whole,
)
from potluck.report.again import to_go_on, typed
from potluck.report.log import start_remedy
from potluck.report.reading import log_lines, reading
from potluck.runs.log_marks import LogMarks, Marks, check_marks, is_marked, mark_of

LOCK_MODE = 0o640  # of .lock: whoever may read it can hold it, so others than owner and group may not
FORMAT = 2  # version of the layout; a folder with another one is not resumed
LOCK = ".lock"  # the first file of a run, and of a comparison
START = ("environment.json", "split.json", "config.yaml")  # written before the first round, in this order
BEFORE = (
    "contract.json",
    "tuning.json",
    "pilots",
    "federation.json",
    "status.json",
    ".status.json",
    LOCK,
)  # may be there earlier than START
COMPARED = ("experiment.yaml", "comparison.json", "sweep.json")  # only in the folder of a comparison
LOGS = ("metrics.jsonl", "ledger.jsonl", "timing.jsonl", "observations.jsonl")
FILES = (
    *START,
    *LOGS,
    "contract.json",
    "tuning.json",
    "tracking.json",
    "summary.json",
    "report.html",
    "status.json",
    LOCK,
)
FOLDERS = ("checkpoints", "models", "predictions", "tensorboard", "pilots")


class _Environment(BaseModel):
    """The form of `environment.json`: whatever is there of this is of these types."""

    settings: dict[str, Any] = {}
    code: dict[str, str] = {}
    fetched: dict[str, str] = {}
    registered: list[str] = []
    seal: str | None = None
    split: str | None = None
    views: str | None = None
    contract: str | None = None
    data: list[str] = []
    public: str | None = None
    origins: dict[str, str] = {}
    metrics: dict[str, dict[str, Any]] = {}
    modes: list[str] = []
    changes: list[dict[str, Any]] = []
    models: dict[str, str] = {}
    started: str | None = None
    command: str | None = None


class RunFolder:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        check_name(path)
        self.path = path
        self._marks = LogMarks(path, LOGS)

    @classmethod
    def create(cls, wanted: Path, exact: bool) -> RunFolder:
        """Make a new folder: the wanted one, or (unless `exact`) the next free `-2`, `-3`, …"""
        check_name(wanted)
        number = 1
        while True:
            path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
            try:
                make_folders(path)
                return cls(path)
            except FileExistsError as error:
                if exact:
                    return cls.taken_over(path, error)
                number += 1
            except OSError as error:
                raise RunError(
                    f"cannot make the folder {path}: {error.strerror or error}; choose another one"
                ) from error

    @classmethod
    def taken_over(cls, path: Path, error: OSError | None = None) -> RunFolder:
        """A folder that is there: one that is empty, or whose run never got to its first round, is begun again.

        Anything else is refused, and so is one with pilot runs that were killed: there is more to lose.
        """
        if not path.is_dir():
            raise RunError(f"{path} is a file; choose another folder") from error
        folder = cls(path)
        if folder.is_shell():
            if (folder / "pilots").exists():
                raise RunError(f"{path}{folder._half_made()}") from error
            refuse_links(path)
            return folder
        if (folder / "config.yaml").exists():
            onward = to_go_on(path, folder._is_portable())
            raise RunError(f"{path} exists; choose another folder, or go on with it: {onward}") from error
        raise RunError(f"{path} has something other than a run; choose another folder") from error

    @classmethod
    def begun(cls, path: Path) -> RunFolder:
        """The folder of a run that has begun; anything else is refused."""
        if not path.is_dir():
            raise RunError(f"there is no run folder {path}; check the path")
        with reading(path):
            refuse_links(path)
        if any((path / name).exists() for name in COMPARED):
            raise RunError(
                f"{path} is a comparison, and resume takes a run; call compare again to go on with all of it, with "
                "a higher training.rounds for more rounds"
            )
        folder = cls(path)
        folder._check_kinds()
        missing = next((name for name in START if not (folder / name).exists()), None)
        if missing is not None:
            raise RunError(f"{path} cannot be resumed, as it has no {missing}{folder._half_made()}")
        for home in ("", *(name for name in FOLDERS if (folder / name).is_dir())):
            check_writable(
                path / home / LOGS[0], "copy the folder to a place where you may write, and go on there"
            )
        return folder

    def _half_made(self) -> str:
        """What to do with a folder that is not whole: an empty shell can go, anything else is not potluck's."""
        if not any(self.path.iterdir()):
            return ": it is empty; name the folder of a run"
        if self.is_shell():
            remedy = f"remove it (rm -r {typed(self.path)}) and run it again"
            return f": its run was stopped before the first round; {remedy}"
        return ", so it is not a run folder, or files of it are missing; put them back, or start a new one"

    def is_shell(self) -> bool:
        """Whether the folder holds nothing but what a run writes before its first round, and not all of that."""
        names = {path.name for path in self.path.iterdir() if not _is_unfinished(path.name)}
        return self.is_ours() and names <= {*START, *BEFORE} and "config.yaml" not in names

    def is_ours(self) -> bool:
        """Whether the folder is empty or a run was begun in it: `.lock` is the first file of one.

        A site may keep the contract that it pinned in a folder under the name that a run has for its own.
        """
        names = {path.name for path in self.path.iterdir() if not _is_unfinished(path.name)}
        return not names or bool({LOCK, "config.yaml"} & names)

    def _check_kinds(self) -> None:
        """Refuse a file where a run writes a folder, and the reverse, before it trains for hours."""
        for name in (*FILES, *FOLDERS):
            path, wanted = self / name, "folder" if name in FOLDERS else "file"
            if path.exists() and path.is_dir() is (wanted == "file"):
                raise RunError(
                    f"{path} is not a {wanted}, and a run writes one there; move it out of the way"
                )

    def about(self, remedy: str | None = None) -> dict[str, Any]:
        """What `environment.json` says; `remedy` is what to do if it is damaged, where it is not the usual one."""
        path, remedy = self / "environment.json", remedy or self.remedy
        about = read_json(path, remedy)
        if not isinstance(about, dict):
            raise RunError(f"{path} was not written by potluck: it is not a mapping; {remedy}")
        for key in ("format", "potluck"):
            if key not in about:
                raise RunError(f"{path} says nothing of {key!r}: it is not whole; {remedy}")
        if about["format"] != FORMAT:
            return about  # whoever needs more of it refuses another version
        return checked(_Environment, about, path, "what potluck says of a run", remedy)

    def _is_portable(self) -> bool:
        """Whether a file can say the experiment of the run; so it is taken to be where that cannot be read."""
        with contextlib.suppress(RunError):
            return bool(self.about().get("portable", True))
        return True

    @property
    def remedy(self) -> str:
        """What to do about a damaged file that only the start of a run can write."""
        return start_remedy(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, so that no other process works in it at the same time; clear what a killed one left."""
        try:
            with self._lock_file() as handle:
                self._lock(handle)
                self._check_lock(handle)
                for place in (self.path.resolve(), self / "predictions"):
                    clear_unfinished(place)
                yield
        except OSError as error:
            if error.filename != str(self / LOCK):
                raise
            raise RunError(
                f"cannot lock {self.path}: .lock: {error.strerror or error}; check its rights"
            ) from error

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        """The file to lock, open for writing as NFS wants it; for reading where it is that of another user."""
        with contextlib.ExitStack() as stack:
            try:
                handle = stack.enter_context(opened(self / LOCK, os.O_RDWR | os.O_CREAT, mode=LOCK_MODE))
            except PermissionError:
                handle = stack.enter_context(opened(self / LOCK, os.O_RDONLY))
            yield handle

    def _lock(self, handle: int) -> None:
        """Lock an open file."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is at work in {self.path}; wait for it or end it") from error
        except OSError as error:
            raise RunError(
                f"cannot lock {self.path}: {error.strerror or error}; choose a folder on a file system with locks"
            ) from error

    def _check_lock(self, handle: int) -> None:
        """Refuse a lock on a file that is gone: whoever made the folder anew locks another one."""
        here = (self / LOCK).lstat() if (self / LOCK).exists() else None
        if here is None or not os.path.samestat(here, os.fstat(handle)):
            raise RunError(f"{self.path} was removed or replaced by another process just now; try again")

    def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to a log, which is made if it does not exist: all of them or none."""
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            with opened(self / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as handle:
                length = os.fstat(handle).st_size
                try:
                    _write(handle, text)
                except OSError:
                    os.ftruncate(handle, length)
                    raise
        except OSError as error:
            raise RunError(f"cannot write {self / name}: {error.strerror or error}; {WRITING}") from error

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a log, none if it does not exist."""
        if (self / name).exists():
            with reading(self / name):
                yield from map(json.loads, log_lines(self / name))

    # --- logs at a checkpoint ---

    def marks(self) -> dict[str, dict[str, Any]]:
        """Length and checksum of every log, as a checkpoint notes them."""
        return self._marks.now()

    def sync_logs(self) -> None:
        """Make sure that the logs are on the disk."""
        self._marks.sync()

    def check_logs(self, marks: Marks, names: Iterable[str] = LOGS, *, whole: bool = False) -> None:
        """Refuse logs that have lost or changed lines since a checkpoint; none of them can be made again.

        `whole`: nothing came after that checkpoint, so logs with further lines are refused too.
        """
        found = [name for name in names if not self._is_prepared(name, marks)]
        check_marks(self.path, marks, found, whole)

    def rounds_logged(self, marks: Marks | None = None) -> int:
        """How many rounds were played, or were up to a checkpoint: `timing.jsonl` has a line of each."""
        path = self / "timing.jsonl"
        ends = itertools.accumulate(map(len, log_lines(path))) if path.exists() else ()
        last = math.inf if marks is None else marks[path.name]["bytes"]
        return sum(1 for _ in itertools.takewhile(lambda end: end <= last, ends))

    def cut(self, marks: Marks) -> None:
        """Take every log back to what it was at a checkpoint; a log without a mark becomes empty."""
        for name in LOGS:
            if self._is_prepared(name, marks):
                self._prepared(name).replace(self / name)
            self._prepared(name).unlink(missing_ok=True)
            if (self / name).exists():
                self._shorten(name, marks[name]["bytes"] if name in marks else 0)
        self._marks.restart()

    def prepare_without(self, round_: int, marks: Marks) -> Marks:
        """Write logs without the evaluation of a round beside the real ones: their marks, none if there is none.

        `cut` puts them in place once a checkpoint has their marks, so that a run that is killed in between has
        either all of that evaluation or nothing of it.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in ("metrics.jsonl", "ledger.jsonl"):
            lines = [*log_lines(self / name)] if (self / name).exists() else []
            with reading(self / name):
                kept = [line for line in lines if not _is_evaluation(json.loads(line), round_)]
            if len(kept) < len(lines):
                write_whole(self._prepared(name), b"".join(kept))
                found[name] = mark_of(b"".join(kept))
        return {**marks, **found} if found else {}

    def _prepared(self, name: str) -> Path:
        return self / f".{name}.next"

    def _is_prepared(self, name: str, marks: Marks) -> bool:
        return self._prepared(name).is_file() and is_marked(self._prepared(name), marks, name)

    def _shorten(self, name: str, length: int) -> None:
        try:
            with opened(self / name, os.O_WRONLY) as handle:
                if os.fstat(handle).st_size > length:
                    os.ftruncate(handle, length)
        except OSError as error:
            raise RunError(f"cannot write {self / name}: {error.strerror or error}; {WRITING}") from error


def _is_unfinished(name: str) -> bool:
    """Whether a file was left by a process that ended while it wrote one of the first files of a run."""
    return name.startswith(tuple(f".{first}." for first in (*START, *BEFORE)))


def _write(handle: int, content: bytes) -> None:
    """Write all of it."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _is_evaluation(line: Mapping[str, Any], round_: int) -> bool:
    """Whether a line of a log says what clients measured in a round, or what was sent to them for that."""
    return bool(line["round"] == round_ and line.get("purpose", "evaluate") == "evaluate")
