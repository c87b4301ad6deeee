"""Classes of the user's own, brought to all runs of a comparison at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError, nearest
from potluck.models import Entries
from potluck.runs.kept_models.given import known_names
from potluck.runs.kept_models.opened import OpenedModels


def check_models(runs: Iterable[Path], models: Entries | None) -> None:
    """Refuse a class under a name that none of the runs has; runs that kept no models name none."""
    names = [known for run in runs if run.is_dir() and (known := _names(run)) is not None]
    every = dict.fromkeys(name for known in names for name in known)
    unknown = [name for name in _by_name(models) if name not in every]
    if names and unknown:
        raise ConfigError(
            f"models names {unknown[0]!r}, which is neither a client nor a class of any of these runs; "
            f"{nearest(unknown[0], every)}"
        )


def models_of(run: Path, models: Entries | None) -> Entries | None:
    """Of what was given for all runs, what one run has: a method may need a class that the others do not."""
    given = _by_name(models)
    known = _names(run) if given else None
    if known is None:
        return models
    return {name: entry for name, entry in given.items() if name in known} or None


def _by_name(models: Entries | None) -> dict[str, Any]:
    """Classes that are given by name or by client; nothing where they are a list, or a single one."""
    if not isinstance(models, Mapping) or {"name", "model"} & set(models):
        return {}
    return {str(name): entry for name, entry in models.items()}


def _names(run: Path) -> list[str] | None:
    """The names that a run has for classes and clients; None if it kept no models."""
    opened = OpenedModels(run)
    return None if opened.kept_round is None else known_names(opened.about["outline"])
