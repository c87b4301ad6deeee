"""What is loaded through the Hugging Face library: from a folder here, else from a repository of the hub."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from potluck.errors import ModelError, first_line

PATIENCE = 10  # seconds the hub has to answer


def library(name: str) -> Any:
    """A package of the extra, or a sentence how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            "models and tokenizers through transformers need the package "
            f"{name}: pip install 'potluck[transformers]'"
        ) from error


def folder_of(source: str) -> Path | None:
    """The folder meant, None where it is a repository of the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ModelError(f"there is no folder {path}")
    return None


def loaded(load: Any, source: str, **options: Any) -> Any:
    """What `load` makes of a folder, or of a repository: its copy on this machine, else that of the hub."""
    folder = folder_of(source)
    try:
        if folder is not None:
            return load(str(folder), **options)
        try:
            return load(source, local_files_only=True, **options)
        except OSError:
            _reach(source)
        return load(source, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source} could not be loaded: {first_line(error)}") from error


def _reach(repository: str) -> None:
    """Ask the hub once: the library would ask six times, with pauses, before it gives up."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repository, timeout=PATIENCE)
    # The hub's client raises whatever its HTTP library raises, which is not the same one in all versions.
    except Exception as error:
        raise ModelError(
            f"there is no folder {repository} here, and as a hub repository: {first_line(error)}"
        ) from error
