"""Loads models and tokenizers through Hugging Face libraries, from a local folder or a repository of the hub."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.errors import ModelError, first_line
from potluck.files import in_home
from potluck.version import install_command

PATIENCE = 10  # seconds to wait for the hub


def library(name: str) -> Any:
    """Import a package of the extra `transformers`; if it is missing, a sentence says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            "models and tokenizers through transformers need the package "
            f"{name}: {install_command('transformers')}"
        ) from error


def folder_of(source: str) -> Path | None:
    """The local folder that `source` names, or None if it names a repository of the hub."""
    path = in_home(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ModelError(f"there is no folder {path}; check the path")
    return None


def loaded(load: Any, source: str, **options: Any) -> Any:
    """Call `load` on a local folder, or on a repository: its cached copy first, else the hub."""
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
        raise ModelError(
            f"{source} could not be loaded ({first_line(error)}); check the name, and that it was saved whole"
        ) from error


def _reach(repository: str) -> None:
    """Ask the hub once and fail fast: the library itself tries six times, with pauses."""
    from huggingface_hub import HfApi

    try:
        in_time(lambda: HfApi().model_info(repository, timeout=PATIENCE))
    # The hub's client raises errors of its HTTP library, which differs between versions.
    except Exception as error:
        raise ModelError(
            f"there is no folder {repository} here, and it cannot be fetched from the hub ({first_line(error)}); "
            "check the name"
        ) from error


def in_time(ask: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Ask the hub something; a `TimeoutError` if no answer comes.

    Its client limits how long it waits for a connection, but not how long it looks for the address: where
    no name server answers, that alone takes 20 s and more.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ask()
        except BaseException as error:
            errors.append(error)

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
