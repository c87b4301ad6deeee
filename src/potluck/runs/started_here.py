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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from potluck.experiment.track import TrackSettings

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
    """Your key, which only you can read; made when it is first needed."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    path = base / "potluck" / "seal.key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(new, path)  # unlike a rename, it never replaces the key of another process
            finally:
                new.unlink()
        found = path.read_bytes()
    except FileExistsError:
        found = path.read_bytes()
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    return found if len(found) == 32 else None
