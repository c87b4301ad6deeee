"""Removing the records of old runs from a site's home folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from potluck.deploy.durable_record import MANIFEST
from potluck.deploy.evaluations import SUFFIX
from potluck.deploy.exchanges import History
from potluck.deploy.joined_runs import FILE as JOINED
from potluck.deploy.joined_runs import JoinedRuns
from potluck.deploy.kept_welcome import SUFFIX as WELCOME
from potluck.deploy.kept_welcome import KeptWelcome
from potluck.deploy.record_files import NAME, RecordFiles
from potluck.errors import RunError
from potluck.files import clear_unfinished
from potluck.runs.folder import RunFolder

OWN = re.compile(rf"{NAME.pattern}|\.?{re.escape(MANIFEST)}(\..+)?|\.{NAME.pattern}\..+")  # files of a record


@dataclass(frozen=True)
class KeptRun:
    """A run that a site has joined: how far it came, and whether that was its last round.

    One whose files cannot be read is not finished, and `damaged` says why. One that was removed half is finished.
    """

    run: str
    round: int
    finished: bool
    used: float  # when the record last changed, in seconds since 1970
    nbytes: int
    damaged: str = ""


def kept_runs(home: Path) -> list[KeptRun]:
    """The runs of a site, the one used last first."""
    folder = home / "runs"
    if not folder.is_dir() or folder.is_symlink():
        raise RunError(
            f"{home} is no home folder of a site: it has no folder runs; name the folder of join --home"
        )
    if not any((home / name).is_file() for name in (JOINED, "secret")):
        raise RunError(
            f"{home} is no home folder of a site: it has neither {JOINED} nor secret; name that of join --home"
        )
    names = {path.stem for path in folder.iterdir() if path.suffix in ("", WELCOME, SUFFIX)}
    found = [_kept_run(folder / name) for name in names if _files(folder / name)]
    return sorted(found, key=lambda kept: (-kept.used, kept.run))


def prune(home: Path, keep: int = 0, unfinished: bool = False) -> list[KeptRun]:
    """Remove the records of finished runs but the last `keep`, with `unfinished` of others too; returns them.

    The secret stays, and so do the names of all runs that were joined, and everything that is no file of a record.
    Links are removed, not followed.
    """
    kept_runs(home)  # refuses a folder that is none of a site, before a lock is put into it
    with RunFolder(home).locked():
        clear_unfinished(home / "runs")
        found = kept_runs(home)
        gone = [one for place, one in enumerate(found) if place >= keep and (one.finished or unfinished)]
        joined = JoinedRuns(home)
        joined.add(*(one.run for one in gone))
        for one in gone:
            _remove(home / "runs" / one.run)
        for record in [*(home / "runs").iterdir()]:
            if record.name in joined and not _files(record):
                _remove(record)  # what is left of a run whose removal was ended in the middle
        return gone


def _files(record: Path) -> list[Path]:
    """All files and links that are kept of a run, the welcome first."""
    beside = [record.with_name(f"{record.name}{suffix}") for suffix in (WELCOME, SUFFIX)]
    found = [path for path in beside if path.is_symlink() or path.is_file()]
    if record.is_dir() and not record.is_symlink():
        found += [path for path in record.iterdir() if path.is_symlink() or _is_own(path)]
    return found


def _is_own(path: Path) -> bool:
    """Whether something is a file of a record; a folder of such a name is somebody else's."""
    return OWN.fullmatch(path.name) is not None and not path.is_dir()


def _kept_run(record: Path) -> KeptRun:
    welcome, files = record.with_name(f"{record.name}{WELCOME}"), _files(record)
    about = [path.lstat() for path in files]
    used, nbytes = max(one.st_mtime for one in about), sum(one.st_size for one in about)
    try:
        round_ = _round(record)
        finished = welcome not in files or round_ >= KeptWelcome.read(welcome).rounds
    except RunError as error:
        return KeptRun(record.name, 0, False, used, nbytes, str(error))
    return KeptRun(record.name, round_, finished, used, nbytes)


def _round(record: Path) -> int:
    """The newest round that a site has answered in a run."""
    if record.is_symlink() or not (record / MANIFEST).exists():
        return 0
    try:
        history = History.from_json(RecordFiles(record, MANIFEST).read_manifest() or {})
    except (KeyError, ValueError) as error:
        raise RunError(
            f"the record in {record} cannot be read ({error}); bring the folder back from a copy"
        ) from error
    return max([*history.rounds, *(one.round for one in history.done.values())])


def _remove(record: Path) -> None:
    """The welcome first: with it, a site would go on in the run as if it had answered nothing."""
    for path in _files(record):
        path.unlink(missing_ok=True)
    if record.is_symlink():
        record.unlink()
    elif record.is_dir() and not any(record.iterdir()):
        record.rmdir()
