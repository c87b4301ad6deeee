"""A finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import write_json
from potluck.report.format import measured
from potluck.report.page import write_report
from potluck.report.scores import messages_block, seconds_per_round, summarise
from potluck.runs.folder import RunFolder
from potluck.runs.predictions import confusion, read_predictions
from potluck.runs.state import RunState


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder and its summary."""

    folder: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Mean test accuracy over clients after the last round, or mean score for tasks without an accuracy."""
        value: float | None = self.summary["accuracy"]["last"]
        return value

    def predictions(self, round: int | None = None) -> pd.DataFrame:
        """What the clients predicted, a row per sample; needs `evaluate: {predictions: true}`."""
        return read_predictions(self.folder, round)

    def confusion(self, **chosen: Any) -> dict[str, pd.DataFrame]:
        """A confusion matrix per client, from the predictions; see `potluck.runs.predictions.confusion`."""
        return confusion(self.folder, **chosen)

    @property
    def advice(self) -> list[str]:
        """What the user should have known before the first round, a sentence each."""
        return list(self.summary.get("advice", ()))

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last round; None if it did not."""
        return self.summary.get("stopped")

    def __str__(self) -> str:
        word = measured(self.summary["accuracy"].get("metrics"))
        accuracy = "no test data" if self.accuracy is None else f"{word} {self.accuracy:.1%}"
        return f"{self.summary['method']}: {accuracy}, {self.summary['rounds']} rounds, {self.folder}"


def conclude(
    folder: RunFolder,
    experiment: Experiment,
    federation: Federation,
    state: RunState,
    reported: str,
    advice: Sequence[str] = (),
    stopped: str | None = None,
) -> RunResult:
    """Score the logs and write summary and report.

    `reported` is the inference mode of the summary, `stopped` says why the run ended before its last round.
    """
    summary = {
        "method": federation.method.name,
        "rounds": state.round,
        "seed": experiment.seed,
        "clients": len(federation.population.ids),
        "accuracy": summarise(folder / "metrics.jsonl", mode=reported),
        "messages": messages_block(folder / "ledger.jsonl"),
        "seconds_per_round": seconds_per_round(folder / "timing.jsonl"),
        "failures": state.failures,
        "split": federation.split.hash,
        "advice": list(advice),
        "stopped": stopped,
    }
    write_json(folder / "summary.json", summary)
    write_report(folder.path)
    return RunResult(folder.path, summary)
