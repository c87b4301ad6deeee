"""A finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.report.format import measured


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder and its summary."""

    folder: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Mean test accuracy over clients after the last round; of their tasks' scores where those are others."""
        value: float | None = self.summary["accuracy"]["last"]
        return value

    def __str__(self) -> str:
        word = measured(self.summary["accuracy"].get("metrics"))
        accuracy = "no test data" if self.accuracy is None else f"{word} {self.accuracy:.1%}"
        return f"{self.summary['method']}: {accuracy}, {self.summary['rounds']} rounds, {self.folder}"
