"""Weights & Biases. With `mode: offline` everything stays in the run folder until `wandb sync` is called."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from potluck.errors import RunError
from potluck.runs.observers.trackers.tracker import Notes, Tracker
from potluck.runs.own_code import is_started_here


class WandbTracker(Tracker):
    """Logs to one run of Weights & Biases, whose id is kept, so that a resumed run goes on in it."""

    name = "wandb"

    def open(self, notes: Notes) -> Notes:
        """Begin a run there, or go on in the one that is known."""
        import wandb

        self._check_place()
        known, chosen = notes.get("id"), self.settings
        quiet = wandb.Settings(console="off", silent=True)  # the progress display owns the terminal
        self.run = wandb.init(
            id=known or secrets.token_hex(4),
            resume="allow" if known else None,
            reinit="create_new",  # a run of the user's own stays as it is
            name=chosen.name or self.folder.path.name,
            config=self.hyperparameters(),
            allow_val_change=True,
            dir=str(self.folder.path),
            settings=quiet,
            **chosen.model_dump(include={"project", "entity", "group", "tags", "mode"}, exclude_none=True),
        )
        if not self.run.offline:
            self.told.notice(f"wandb shows it at {self.run.url}")
        return {"id": self.run.id}

    def _check_place(self) -> None:
        """Refuse settings in the current folder that came with a run: they can send all, and your key, anywhere."""
        about, home = self.folder.about(), self.folder.path.resolve()
        for file in (Path("wandb/settings"), Path(".wandb/settings")):
            foreign = file.resolve().is_relative_to(home) or not is_started_here(about["settings"], about)
            if file.exists() and foreign:
                raise RunError(
                    f"{file} in the current folder may be somebody else's; start from another folder"
                )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        self.run.log(dict(numbers), step=step)

    def report(self, page: Path) -> None:
        """Keep the report as an artifact."""
        import wandb

        artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
        artifact.add_file(str(page))
        self.run.log_artifact(artifact)

    def shut(self) -> None:
        """Finish the run, as failed unless it is complete."""
        self.run.finish(exit_code=0 if self.ended else 1)
