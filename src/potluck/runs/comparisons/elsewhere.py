"""The runs of a comparison on the machines of a Ray cluster, each as a whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.data import Split
from potluck.engine.settings import EngineSettings
from potluck.errors import PotluckError
from potluck.experiment.recipe import ExperimentRecipe


@dataclass(frozen=True)
class RunJob:
    """One run, played into its folder, which must be on a file system that all machines share.

    `finish` begins the run there, or goes on with it.
    """

    label: str
    folder: Path
    recipe: ExperimentRecipe
    finish: Callable[[Any, Path, Split], None]
    command: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))

    def code(self) -> Mapping[str, bytes]:
        """Plugins, and modules of the user's program."""
        return {name: file.read_bytes() for name, file in self.recipe.files().items()}

    def play(self, device: str) -> str | None:
        """Play the run here; a sentence if that failed."""
        if not (self.folder.parent).is_dir():
            return f"there is no folder {self.folder.parent}; give --out on a file system that all machines share"
        sys.argv = [*self.command]
        os.environ["POTLUCK_PROGRESS"] = "0"
        try:
            self.finish(self.recipe.experiment(device), self.folder, self.recipe.split)
        except PotluckError as error:
            return str(error)
        return None


def play_elsewhere(settings: EngineSettings, jobs: Sequence[RunJob], told: Callable[[str], None]) -> None:
    """Play runs on the machines of the cluster that the settings name."""
    from potluck.engine.factory import check_engine

    check_engine(settings)
    from potluck.engine.ray.jobs import play_jobs

    play_jobs(settings, jobs, told)
