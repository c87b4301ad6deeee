"""What all trackers have in common: what is logged, under which names, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from potluck.engine.evaluation.examined import Examined
from potluck.errors import RunError, first_line
from potluck.experiment.overrides import by_dotted_key
from potluck.experiment.schema import Experiment
from potluck.files import read_json, write_json
from potluck.runs.folder import RunFolder
from potluck.runs.observers.base import Observer, RoundEnd
from potluck.runs.observers.trackers.numbers import round_numbers, score_numbers

FILE = "tracking.json"  # by tracker: its id of the run, and the last round it has
Notes = dict[str, Any]


class Tracker(Observer):
    """Logs every round once, also when a run is resumed and repeats rounds after its last checkpoint.

    A tracker that cannot start stops a new run before anything is trained. One that fails later is told of and
    left out, because the run is worth more than its curves. A subclass has `open`, `log`, `report` and `shut`.
    """

    name: ClassVar[str]  # of the package, and under `track`

    def __init__(self, experiment: Experiment, folder: RunFolder, told: Observer) -> None:
        self.experiment, self.folder, self.told = experiment, folder, told
        self.settings: Any = getattr(experiment.track, self.name)
        self.notes: Notes = {}
        self.done = 0  # the rounds that were played when it began
        self.working = self.ended = False

    def open(self, notes: Notes) -> Notes:
        """Begin to track, or go on as the notes of an earlier start say; gives the notes for the next one.

        A tracker that can take back rounds after `done`, which are played again, notes `done` as its last round.
        """
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        raise NotImplementedError

    def report(self, page: Path) -> None:
        """Keep the report of the finished run, where the tracker can."""

    def shut(self) -> None:
        """End; `ended` says whether the run is complete."""
        raise NotImplementedError

    def hyperparameters(self) -> dict[str, Any]:
        """The settings of the experiment by dotted key, without those of the trackers."""
        settings = yaml.safe_load(self.experiment.to_yaml())
        settings.pop("track", None)
        return by_dotted_key(settings)

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """Start the tracker."""
        self.notes = self._kept().get(self.name, {})
        self.done, self._logged = done, self.notes.get("round", 0)
        try:
            self.notes |= self.open(dict(self.notes))
            self._logged = self.notes.get("round", 0)
            self.working = True
            self._keep()
        except Exception as error:
            if done == 0:
                raise RunError(
                    f"track: {self.name} could not start: {first_line(error)}; fix that, or leave it out of track"
                ) from error
            self._leave(error)

    def recall(self, found: Examined) -> None:
        """Log an earlier evaluation, if the tracker joined later than that."""
        if found.round > self._logged:
            self._try(lambda: self.log(found.round, score_numbers(found, self.settings.clients)))

    def round(self, end: RoundEnd) -> None:
        """Log a round, unless it is a repetition."""
        if end.round > self._logged:
            self._try(lambda: self._log_round(end))

    def _log_round(self, end: RoundEnd) -> None:
        self.log(end.round, round_numbers(end, self.settings.clients))
        self.notes["round"] = end.round
        self._keep()

    def end(self, folder: Path) -> None:
        """Keep the report."""
        self._try(lambda: self.report(folder / "report.html"))
        self.ended = True

    def close(self) -> None:
        """End, however the run ended."""
        self._try(self.shut)
        self.working = False

    def _try(self, act: Callable[[], None]) -> None:
        """Do something that must not cost the run, while the tracker works."""
        if self.working:
            try:
                act()
            except Exception as error:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        self.working = False
        self.told.advise(
            f"{self.name} failed and is no longer told of this run, which goes on: {first_line(error)}"
        )

    def _kept(self) -> dict[str, Notes]:
        path = self.folder / FILE
        kept = read_json(path) if path.exists() else {}
        if not isinstance(kept, dict) or not all(map(_is_note, kept.values())):
            raise RunError(f"{path} is damaged; remove it, and the trackers begin anew")
        return kept

    def _keep(self) -> None:
        write_json(self.folder / FILE, self._kept() | {self.name: self.notes})


def _is_note(kept: object) -> bool:
    """Whether this is what a tracker keeps: an id as text, and the last round it has."""
    if not isinstance(kept, dict):
        return False
    last = kept.get("round", 0)
    whole = isinstance(last, int) and not isinstance(last, bool) and last >= 0
    return whole and all(isinstance(value, str | int) for value in kept.values())
