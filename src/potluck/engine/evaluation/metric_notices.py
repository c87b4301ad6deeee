"""What the user is told, once, of metrics beside those of the tasks: failed, undefined, or out of their range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from potluck.core.card import ClientId
from potluck.core.metrics import MetricFacts
from potluck.engine.evaluation.examined import Line
from potluck.engine.evaluation.settings import SPLITS
from potluck.engine.protocol import Answer
from potluck.errors import RunError


class MetricNotices:
    """Looks at the values of an experiment's own metrics, and remembers what was said of each."""

    def __init__(self, facts: Mapping[str, MetricFacts], notice: Callable[[str], None]) -> None:
        self.facts, self.notice = facts, notice
        self._told: set[tuple[str, str]] = set()  # what was said of which metric

    def look_at(self, lines: Sequence[Line], answers: Sequence[Answer], is_first: bool) -> None:
        """Look at one evaluation. A metric that fails for every client in the first one ends the run.

        Strangers must not end a run: what they answer is never passed in as the first evaluation.
        """
        for name in self.facts:
            failed = {one.client: one.report.errors[name] for one in answers if name in one.report.errors}
            self._note_failed(name, lines, failed, is_first)
            self._note_outside(name, lines)
            self._note_undefined(name, lines, failed)

    def _note_failed(
        self, name: str, lines: Sequence[Line], failed: Mapping[ClientId, str], is_first: bool
    ) -> None:
        values = _values(name, lines)
        for client, error in [*failed.items()][:1]:
            everywhere = {client for client, _, _ in values} <= set(failed)
            if is_first and everywhere and all(value is None for _, _, value in values):
                raise RunError(
                    f"the metric {name} fails for every client; for client {client}: {error}; "
                    "fix the metric, or leave it out"
                )
            self._say_once("failed", name, f"failed for client {client} and is null in the log: {error}")

    def _note_outside(self, name: str, lines: Sequence[Line]) -> None:
        facts = self.facts[name]
        for client, _, value in _values(name, lines):
            if value is not None and not facts.holds(value):
                span = f"from {facts.low:g} to {facts.high:g}"
                told = f"is {value:g} for client {client}, not {span}: declare its low and high"
                self._say_once("outside", name, told)

    def _note_undefined(self, name: str, lines: Sequence[Line], failed: Mapping[ClientId, str]) -> None:
        """Say which clients have no value, and of which part where they have one of another."""
        parts: dict[ClientId, dict[str, bool]] = {}
        for client, split, value in _values(name, lines):
            if client not in failed:
                parts.setdefault(client, {})[split] = value is not None
        which = [
            client if not any(known.values()) else f"{client} ({', '.join(s for s in known if not known[s])})"
            for client, known in parts.items()
            if not all(known.values())
        ]
        if which:
            whom = "every client" if len(which) == len(parts) else "some clients"
            told = f"is undefined for {whom} and null in the log: {', '.join(which)}"
            self._say_once("undefined", name, told)

    def _say_once(self, what: str, name: str, sentence: str) -> None:
        if (what, name) not in self._told:
            self._told.add((what, name))
            self.notice(f"the metric {name} {sentence}")


def _values(name: str, lines: Sequence[Line]) -> list[tuple[ClientId, str, float | None]]:
    """The values of a metric in log lines, with the client and the split of each."""
    return [
        (line["client"], split, line[split][name])
        for line in lines
        for split in SPLITS
        if name in line.get(split, ())
    ]
