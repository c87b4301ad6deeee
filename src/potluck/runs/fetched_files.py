"""The weights and tokenizers that settings name, by their content: clients that come in later load them anew."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.errors import RunError
from potluck.files import sha256
from potluck.runs.own_code import fetched

LOADED = (".safetensors", ".json", ".txt", ".model")  # how the files of a folder end that libraries load
REFERENCE = "refs/main"  # in the hub's cache of a repository: the revision that is loaded


def fetched_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """Every file, folder and repository of the hub that is here, with a hash of its content or its revision."""
    found = {name: _content(name) for name in fetched(settings)}
    return {name: content for name, content in found.items() if content is not None}


def check_fetched_files(folder: Path, settings: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Refuse weights and tokenizers that are not those the run in `folder` began with."""
    for name, content in fetched_files(settings).items():
        if known.get(name, content) != content:
            raise RunError(
                f"{name} is not what it was when {folder} was begun: clients that come in later would start from "
                "other values; put that version back, or start a new run in another folder"
            )


def _content(name: str) -> str | None:
    """What is known of a place by now; None where nothing is, as of a repository that was never fetched."""
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # a user without a home
        path = path.expanduser()
    try:
        if path.is_dir():
            return _folder_hash(path)
        return sha256(path.resolve()) if path.is_file() else _revision(name)
    except (OSError, ValueError) as error:
        raise RunError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _folder_hash(folder: Path) -> str:
    """A hash of the files in a folder that may be loaded, with their names."""
    files = sorted(path for path in folder.iterdir() if path.suffix in LOADED and path.is_file())
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{sha256(path.resolve())}  {path.name}\n".encode(errors="replace"))
    return whole.hexdigest()


def _revision(repository: str) -> str | None:
    """The revision of a repository in the hub's cache; it is what is loaded, whatever the hub has by now."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    home = Path(os.fspath(HF_HUB_CACHE)) / f"models--{repository.replace('/', '--')}"
    try:
        return (home / REFERENCE).read_text().strip()
    except (OSError, ValueError):
        return None
