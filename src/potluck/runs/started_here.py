"""Which run folders you started on this machine: a seal over what they reach, made with a key of your own.

A folder can come from anywhere and say anything of itself. What it cannot have is a seal by a key that never leaves
your home. Only what reaches beyond the folder is sealed: the code it names, the places its trackers write to, the
files and repositories that its weights and tokenizers come from, and the address of its cluster.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from potluck.experiment.track import TrackSettings

KEY = "seal.key"
Reach = Mapping[str, str | None]  # what is reached → its content where that is known


def tracker_places(settings: Mapping[str, Any]) -> dict[str, str]:
    """Where trackers write or send to: what settings say, else the place that the tracker chooses itself.

    TensorBoard alone then stays in the run folder.
    """
    try:
        track = TrackSettings.model_validate(settings.get("track") or {})
    except ValidationError as error:
        return {"track": str(error)}  # whoever makes an experiment of it refuses it
    given = {
        "track.tensorboard.folder": track.tensorboard and track.tensorboard.folder,
        "track.mlflow.uri": track.mlflow and track.mlflow.uri,
        "track.wandb.entity": track.wandb and track.wandb.entity,
    }
    found = {key: str(place) for key, place in given.items() if place is not None}
    chosen = {"track.mlflow": track.mlflow, "track.wandb": track.wandb}
    return found | {key: "its own choice" for key, one in chosen.items() if one is not None}


def seal(reach: Reach) -> str | None:
    """The seal of what a run of yours reaches; None if it reaches nothing, or if no key can be kept."""
    key = _key(make=True) if reach else None
    return None if key is None else _sealed(key, reach)


def is_sealed(reach: Reach, found: object) -> bool:
    """Whether a seal is yours, and of this."""
    key = _key(make=False)
    if key is None or not isinstance(found, str):
        return False
    return hmac.compare_digest(_sealed(key, reach).encode(), found.encode(errors="replace"))


def _sealed(key: bytes, reach: Reach) -> str:
    return hmac.new(key, json.dumps(reach, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    """Your key, which only you can read; made when it is first needed, and anew if others could write it."""
    try:
        path = _state_home() / "potluck" / KEY
        if make:
            _make_folder(path.parent)
        if make and path.exists() and not _is_mine(path):
            path.unlink()
        if not _is_mine(path.parent):
            return None
        if make and not path.exists():
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(new, path)  # unlike a rename, it never replaces the key of another process
            finally:
                new.unlink()
        found = path.read_bytes() if _is_mine(path) else b""
    except FileExistsError:
        found = path.read_bytes()
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    return found if len(found) == 32 else None


def _state_home() -> Path:
    """Where programs keep their state; a relative path would be another one in each folder, and does not count."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return given if given.is_absolute() else Path("~/.local/state").expanduser()


def _make_folder(folder: Path) -> None:
    """Make the folder of your key and those above it for you alone, whatever your umask allows to others.

    One of yours that others could write into is closed to them; a key that they may have put there goes.
    """
    for one in [folder, *folder.parents][::-1]:
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid == os.getuid() and not _is_mine(folder):
        folder.chmod(0o700)
        (folder / KEY).unlink(missing_ok=True)


def _is_mine(path: Path) -> bool:
    """Whether something is yours, and nobody outside your own group may write it; a link is not."""
    found = path.lstat()
    others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != os.getgid())
    return found.st_uid == os.getuid() and not others and not stat.S_ISLNK(found.st_mode)
