"""Checkpoints of a run: at intervals, at its end, and when it is stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from potluck.engine.store.checkpoints import Checkpoints
from potluck.files import read_json
from potluck.runs.folder import RunFolder
from potluck.runs.observers.base import Observer, RoundEnd
from potluck.runs.predictions import drop_predictions
from potluck.runs.state import RunState
from potluck.signals import held_back

KEPT = 3  # checkpoints of a run whose clients outlive it, which can go back


class Checkpointer(Observer):
    """Saves the state of a run after a round, if the last checkpoint is `every` seconds old.

    Files are written in the background. A `durable` run waits for them after every round: clients that outlive the
    server must not hear that a round was accepted which the next server would not know of.
    """

    def __init__(self, folder: RunFolder, state: RunState, every: float, durable: bool = False) -> None:
        self.folder, self.state, self.every, self.durable = folder, state, every, durable
        self.files = Checkpoints(folder / "checkpoints", KEPT if durable else 1)
        self._saved_at = time.monotonic()

    def round(self, end: RoundEnd) -> None:
        """Save if it is time."""
        if time.monotonic() - self._saved_at >= self.every:
            self.save()

    def save(self) -> None:
        """Save the run as it stands; nothing if checkpoints are turned off."""
        if not math.isinf(self.every):
            self._save()

    def _save(self) -> None:
        """Save the run, with the lengths of its logs."""
        self._saved_at = time.monotonic()
        with held_back():  # the store counts a state as saved once it is asked for: the files must follow
            server, clients, notes = self.state.saved()
            notes |= {"logs": self.folder.offsets()}
            self.files.save(self.state.round, server, clients, notes)
        if self.durable:
            self.files.wait()

    def restore(self, is_due: Callable[[int], bool], accepted: Callable[[], None] = lambda: None) -> None:
        """Go back to the last checkpoint, or to the start if there is none; later lines of the logs are cut.

        `is_due` says which rounds are evaluated. The last round always is: if the run has become longer, that
        evaluation is taken out of the logs. Predictions go with the evaluations they belong to. `accepted` is
        called once nothing can be refused any more, before anything in the folder changes.
        """
        checkpoint = self.files.load()
        if checkpoint is None:
            accepted()
            self.folder.cut({})
            drop_predictions(self.folder.path, 1)
            return
        self.state.restore(checkpoint)
        surplus = not is_due(checkpoint.round)
        if not surplus:
            self.folder.check_lengths(checkpoint.notes["logs"])
        accepted()
        drop_predictions(self.folder.path, checkpoint.round + (0 if surplus else 1))
        self.folder.cut(checkpoint.notes["logs"])
        if surplus and self.folder.drop_evaluations(checkpoint.round):
            self._save()  # the lengths of the logs are others now
            self.files.wait()

    def saved_round(self) -> int:
        """The round of the newest checkpoint on disk, 0 if there is none."""
        manifest = self.files.folder / self.files.MANIFEST
        return int(read_json(manifest)["round"]) if manifest.exists() else 0

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self.files.wait()

    def close(self) -> None:
        """Finish, and end the thread that writes."""
        self.files.close()
