"""MLflow: a run in a tracking server, a database or a folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.runs.observers.trackers.tracker import Notes, Tracker

METRICS, PARAMETERS = 1000, 100  # the most that one request may hold
LONGEST = 500  # characters of a parameter that every version takes


class MlflowTracker(Tracker):
    """Logs to one run of MLflow, whose id is kept, so that a resumed run goes on in it."""

    name = "mlflow"

    def open(self, notes: Notes) -> Notes:
        """Begin a run there, or go on in the one that is known."""
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=self.settings.uri)
        if "id" in notes:
            self.id = str(notes["id"])
            self.client.update_run(self.id, status="RUNNING")
        else:
            self.id = self._create()
        return {"id": self.id}

    def _create(self) -> str:
        from mlflow.entities import Param

        name = self.settings.name or self.folder.path.name
        run = self.client.create_run(self._experiment(), run_name=name)
        parameters = [
            Param(_allowed(key), str(value)[:LONGEST]) for key, value in self.hyperparameters().items()
        ]
        for some in _pieces(parameters, PARAMETERS):
            self.client.log_batch(run.info.run_id, params=some)
        return str(run.info.run_id)

    def _experiment(self) -> str:
        """The id of the experiment of this name, which is made if there is none."""
        name = self.settings.experiment or self.experiment.name
        known = self.client.get_experiment_by_name(name)
        return str(self.client.create_experiment(name) if known is None else known.experiment_id)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(_allowed(name), value, now, step) for name, value in numbers.items()]
        for some in _pieces(metrics, METRICS):
            self.client.log_batch(self.id, metrics=some)

    def report(self, page: Path) -> None:
        """Keep the report as an artifact."""
        self.client.log_artifact(self.id, str(page))

    def shut(self) -> None:
        """Say how the run ended."""
        self.client.set_terminated(self.id, status="FINISHED" if self.ended else "KILLED")


def _allowed(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w./ :-]", "_", name)


def _pieces(values: Sequence[Any], most: int) -> list[Sequence[Any]]:
    return [values[start : start + most] for start in range(0, len(values), most)]
