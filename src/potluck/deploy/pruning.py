"""Removing the records of old runs from a site's home folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from potluck.core.plain_values import read_json, whole
from potluck.deploy.bounds import MOST_ROUNDS
from potluck.deploy.durable_record import MANIFEST
from potluck.deploy.evaluations import SUFFIX
from potluck.deploy.exchanges import History
from potluck.deploy.record_files import NAME, RecordFiles, read_own
from potluck.errors import RunError
from potluck.runs.folder import RunFolder

OWN = re.compile(rf"{NAME.pattern}|\.?{re.escape(MANIFEST)}(\..+)?|\.{NAME.pattern}\..+")  # files of a record


@dataclass(frozen=True)
class KeptRun:
    """A run that a site has joined: how far it came, and whether that was its last round."""

    run: str
    round: int
    finished: bool
    used: float  # when the record last changed, in seconds since 1970
    nbytes: int


def kept_runs(home: Path) -> list[KeptRun]:
    """The runs of a site, the one used last first."""
    folder = home / "runs"
    if not folder.is_dir() or folder.is_symlink():
        raise RunError(f"{home} is no home folder of a site: it has no folder runs")
    files = [file for file in folder.glob("*.json") if not file.is_symlink()]
    return sorted(map(_kept_run, files), key=lambda kept: kept.used, reverse=True)


def prune(home: Path, keep: int = 0, unfinished: bool = False) -> list[KeptRun]:
    """Remove the records of finished runs but the last `keep`, with `unfinished` of others too; returns them.

    The secret stays, and so does everything that is no file of a record. Links are removed, not followed.
    """
    kept_runs(home)  # refuses a folder that is none of a site, before a lock is put into it
    with RunFolder(home).locked():
        found = kept_runs(home)
        gone = [one for place, one in enumerate(found) if place >= keep and (one.finished or unfinished)]
        for one in gone:
            _remove(home / "runs" / one.run)
        return gone


def _kept_run(file: Path) -> KeptRun:
    record, round_ = file.with_suffix(""), 0
    there = record.iterdir() if record.is_dir() and not record.is_symlink() else ()
    files = [one for one in there if not one.is_symlink()]
    if (record / MANIFEST) in files:
        history = History.from_json(RecordFiles(record, MANIFEST).read_manifest() or {})
        round_ = max([*history.rounds, *(one.round for one in history.done.values())])
    try:
        told = read_json(read_own(file))["welcome"]["experiment"]["training"]["rounds"]
        rounds = whole(told, 0, MOST_ROUNDS, "a number of rounds")
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    used = max(one.stat().st_mtime for one in (file, *files))
    return KeptRun(file.stem, round_, round_ >= rounds, used, sum(one.stat().st_size for one in files))


def _remove(record: Path) -> None:
    """The record first, its welcome last: a run that was removed half is still known, and can be removed again."""
    if record.is_symlink():
        record.unlink()
    elif record.is_dir():
        for path in record.iterdir():
            if path.is_symlink() or OWN.fullmatch(path.name):
                path.unlink()
        if not any(record.iterdir()):
            record.rmdir()
    record.with_suffix(SUFFIX).unlink(missing_ok=True)
    record.with_suffix(".json").unlink(missing_ok=True)
