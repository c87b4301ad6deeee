"""Checkpoints of a run: at intervals, at its end, and when it is stopped."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from potluck.engine.store.checkpoints import Checkpoint, Checkpoints, DamagedCheckpoint
from potluck.errors import RunError, first_line, kind_and_message
from potluck.report.again import to_go_on
from potluck.runs.folder import RunFolder
from potluck.runs.log_marks import Marks
from potluck.runs.observers.base import Observer, RoundEnd
from potluck.runs.predictions import drop_predictions
from potluck.runs.state import RunState
from potluck.signals import held_back


class Checkpointer(Observer):
    """Saves the state of a run after a round, if the last checkpoint is `every` seconds old.

    Files are written in the background. A `durable` run waits for them after every round: clients that outlive the
    server must not hear that a round was accepted which the next server would not know of.
    """

    def __init__(self, folder: RunFolder, state: RunState, every: float, durable: bool = False) -> None:
        self.folder, self.state, self.every, self.durable = folder, state, every, durable
        self.files = Checkpoints(folder / "checkpoints")
        self._saved_at = time.monotonic()

    def round(self, end: RoundEnd) -> None:
        """Save if it is time."""
        if time.monotonic() - self._saved_at >= self.every:
            self.save()

    def save(self) -> None:
        """Save the run as it stands; nothing if checkpoints are turned off."""
        if not math.isinf(self.every):
            self._save()

    def _save(self, marks: Marks | None = None) -> None:
        """Save the run, with the marks of its logs (by default as they are)."""
        self._saved_at = time.monotonic()
        with held_back():  # the store counts a state as saved once it is asked for: the files must follow
            server, clients, notes = self.state.saved()
            notes |= {"run": self._run, "logs": self.folder.marks() if marks is None else marks}
            self.files.save(self.state.round, server, clients, notes, self.folder.sync_logs)
        if self.durable:
            self.files.wait()

    @cached_property
    def _run(self) -> str:
        """Which run this is, so that no checkpoint of another one is taken for its own."""
        about = self.folder.about()
        known = [about.get(key) for key in ("started", "split", "views")]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def rounds(self) -> tuple[int, ...]:
        """The rounds that `restore` can go back to, ascending."""
        return self.files.rounds()

    def restore(
        self,
        is_due: Callable[[int], bool],
        accepted: Callable[[], None] = lambda: None,
        round_: int | None = None,
    ) -> None:
        """Go back to the last checkpoint, or to the start if there is none; later lines of the logs are cut.

        `is_due` says which rounds are evaluated. The last round always is: if the run has become longer, that
        evaluation is taken out of the logs. Predictions go with the evaluations they belong to. `accepted` is
        called once nothing can be refused any more, before anything in the folder changes. `round_` asks for the
        checkpoint of an earlier round, one of `rounds`, or with 0 for the start; what came after it is gone then.
        """
        checkpoint = self._loaded(round_) if round_ != 0 else None
        if checkpoint is None:
            accepted()
            self.files.clear()
            self.folder.cut({})
            drop_predictions(self.folder.path, 1)
            return
        self._check_logs(checkpoint)
        self._put_back(checkpoint)
        surplus = not is_due(checkpoint.round)
        accepted()
        if round_ is not None:
            self.files.go_back(round_)
        drop_predictions(self.folder.path, checkpoint.round + (0 if surplus else 1))
        marks = checkpoint.notes["logs"]
        self.folder.cut(marks)
        without = self.folder.prepare_without(checkpoint.round, marks) if surplus else {}
        if without:
            self._save(without)
            self.files.wait()
            self.folder.cut(without)

    def _loaded(self, round_: int | None) -> Checkpoint | None:
        """The checkpoint; of a damaged one it is said which others are there."""
        try:
            return self.files.load(round_)
        except DamagedCheckpoint as error:
            whole = [one for one in error.rounds if self._logs_reach(one)]
            raise RunError(f"{error}; {_way_on(self.folder.path, whole)}") from error

    def _check_logs(self, checkpoint: Checkpoint) -> None:
        try:
            self.folder.check_logs(checkpoint.notes.get("logs", {}))
        except RunError as error:
            older = [one for one in self.rounds() if one < checkpoint.round and self._logs_reach(one)]
            raise RunError(
                f"{error}; put a whole copy of it back, or {_way_on(self.folder.path, older)}"
            ) from error

    def _logs_reach(self, round_: int) -> bool:
        """Whether the logs are whole up to the checkpoint of a round."""
        try:
            self.folder.check_logs(self.files.notes(round_).get("logs", {}))
        except RunError:
            return False
        return True

    def _put_back(self, checkpoint: Checkpoint) -> None:
        """Stand where a checkpoint was saved; one of something else is refused."""
        try:
            if checkpoint.round != self.folder.rounds_logged(checkpoint.notes["logs"]):
                raise ValueError(f"its logs do not end with round {checkpoint.round}")
            if checkpoint.notes.get("run") != self._run:
                raise ValueError("environment.json tells of another one")
            self.state.restore(checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
            raise RunError(
                f"the checkpoint in {self.files.folder} is not one of this run: {first_line(error)}"
            ) from error

    def unfit(self, round_: int, error: Exception) -> str:
        """The sentence about a checkpoint after which no round can be played, and which others there are."""
        older = [one for one in self.rounds() if one < round_ and self._logs_reach(one)]
        return (
            f"the checkpoint in {self.files.folder} does not fit this run: round {round_ + 1} fails with "
            f"{kind_and_message(error)}; {_way_on(self.folder.path, older)}"
        )

    def saved_round(self) -> int:
        """The round of the newest checkpoint on disk, 0 if there is none."""
        return saved_round(self.folder.path)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self.files.wait()

    def close(self) -> None:
        """Finish, and end the thread that writes."""
        self.files.close()


def saved_round(folder: Path) -> int:
    """The round of the newest checkpoint of a run folder, 0 if there is none."""
    return Checkpoints(folder / "checkpoints").newest_round()


def begin_again(folder: Path) -> str:
    """How to ask for all rounds anew."""
    return (
        f"play all rounds anew, which drops what the folder has of them: {to_go_on(folder, portable=True)} "
        "--from-round 0 (from_round=0 in Python)"
    )


def _way_on(folder: Path, rounds: Sequence[int]) -> str:
    """How to go on where the newest checkpoint is of no use."""
    if not rounds:
        return f"start a new run, as no other checkpoint is whole, or {begin_again(folder)}"
    also = f" (there are those of rounds {', '.join(map(str, rounds))})" if len(rounds) > 1 else ""
    return (
        f"go on from the checkpoint of round {rounds[-1]}{also}: {to_go_on(folder, portable=True)} "
        f"--from-round {rounds[-1]} (from_round={rounds[-1]} in Python)"
    )
