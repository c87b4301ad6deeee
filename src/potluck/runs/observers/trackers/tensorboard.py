"""TensorBoard: event files in the run folder. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from potluck.runs.observers.trackers.tracker import Notes, Tracker


class TensorBoardTracker(Tracker):
    """Writes scalars, and the settings as text. A resumed run adds a file to the same folder.

    The file of a run that went back says so, and TensorBoard then leaves out what it had of the rounds after.
    """

    name = "tensorboard"

    def open(self, notes: Notes) -> Notes:
        """Begin another event file."""
        from torch.utils.tensorboard import SummaryWriter

        place = Path(self.settings.folder or self.folder / "tensorboard")
        logged = int(notes.get("round", 0))
        self.writer = SummaryWriter(place, purge_step=self.done + 1 if logged > self.done else None)
        if not notes:
            settings = yaml.safe_dump(self.hyperparameters(), sort_keys=False)
            self.writer.add_text("settings", f"```yaml\n{settings}```")
        return notes | {"round": min(logged, self.done)}

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the scalars, to disk at once: a round counts as logged from now on."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def shut(self) -> None:
        """Close the file."""
        self.writer.close()
