"""A run: an experiment played round by round into a folder that can be resumed at any moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from potluck.core.card import ClientId
from potluck.core.message import Message
from potluck.core.packed import State
from potluck.core.server import Server
from potluck.engine.cohort import Cohort
from potluck.engine.evaluate import Moment, metric_lines, score_of
from potluck.engine.factory import make_engine
from potluck.engine.ledger import Ledger
from potluck.engine.protocol import Answer, Engine, Examination, Failure
from potluck.engine.rounds import Rounds
from potluck.engine.store.checkpoints import Checkpoint, Checkpoints
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.state_files import StateFiles
from potluck.errors import ConfigError, RoundFailed, nearest
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import write_json
from potluck.report.format import measured
from potluck.report.page import write_report
from potluck.report.scores import messages_block, seconds_per_round, summarise
from potluck.runs.advice import advice
from potluck.runs.environment import precision, threads
from potluck.runs.folder import RunFolder
from potluck.runs.observers import RoundEnd, Watcher
from potluck.runs.result import RunResult
from potluck.signals import held_back


class Interrupted(KeyboardInterrupt):
    """A run was stopped by hand, after a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"stopped; go on with: potluck resume {folder}")
        self.folder = folder


@dataclass
class Progress:
    """Where a run stands besides the state of server and clients."""

    round: int = 0
    failures: dict[ClientId, int] = field(default_factory=dict)


class Run:
    """One run at work."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        federation: Federation,
        watcher: Watcher | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: one that keeps the clients' states itself, wherever they are."""
        self.experiment, self.folder, self.federation = experiment, folder, federation
        self.watcher = watcher or Watcher()
        self.method = federation.method
        self.engine, self.store = (
            (engine, ClientStore())
            if engine is not None
            else make_engine(
                federation.clients, experiment.engine, StateFiles(folder / "checkpoints"), self.watcher.notice
            )
        )
        self.rounds = Rounds(federation, self.engine, name=experiment.name)
        self.server = self.rounds.server
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.progress = Progress()
        self.modes = chosen_modes(experiment, self.method.modes)
        self._saved_at = time.monotonic()
        self._headline: float | None = None
        self._measure = "accuracy"  # of the headline

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Go back to a checkpoint: states, progress, and the logs as they were then."""
        if checkpoint is None:
            self.folder.cut({})
            return
        self.server.restore(
            {name: value.to(self.federation.device) for name, value in checkpoint.server.items()}
        )
        for client, path in checkpoint.clients.items():
            self.store.put(client, path)
        notes = checkpoint.notes
        self.progress = Progress(checkpoint.round, dict(notes["failures"]))
        self.rounds.accepted = dict(notes["accepted"])
        self.folder.cut(notes["logs"])

    def play(self) -> RunResult:
        """Play the remaining rounds; on Ctrl-C keep everything up to the last whole round."""
        rounds = self.experiment.training.rounds
        self.watcher.begin(self.experiment.name, self.method.name, rounds, self.progress.round)
        try:
            if self.progress.round == 0:
                self._advise()
            with threads(self.experiment.engine.threads), precision(self.federation.precision):
                while self.progress.round < rounds:
                    self._play_round(self.progress.round + 1)
            self._checkpoint()
        except KeyboardInterrupt as error:
            with held_back(forget=True):
                self._checkpoint()
                self.checkpoints.wait()
            raise Interrupted(self.folder.path) from error
        finally:
            self.engine.close()
            self.checkpoints.close()
            self.store.close()
        try:
            result = self._finish()
        except KeyboardInterrupt as error:
            raise Interrupted(self.folder.path) from error
        self.watcher.end(self.folder.path)
        return result

    def _advise(self) -> None:
        for sentence in advice(self.federation):
            self.watcher.advise(sentence)

    def _play_round(self, round_: int) -> None:
        """One whole round: nothing of it stays if it does not end."""
        before, undo = self.server.snapshot(), self._undo(round_)
        if round_ < self.experiment.training.rounds:
            self.store.prefetch(self._cohort(round_ + 1))
        started = time.perf_counter()
        try:
            ledger, lines, seconds = self._attempts(round_, before)
            seconds["seconds"] = time.perf_counter() - started
            timing = {name: round(value, 6) for name, value in seconds.items()}
            observed = observations(self.server)
            with held_back():
                self.folder.append("metrics.jsonl", lines)
                self.folder.append("ledger.jsonl", ledger.lines)
                self.folder.append("timing.jsonl", [{"round": round_, **timing}])
                if observed:
                    self.folder.append("observations.jsonl", observed)
                self.progress.round = round_
        except BaseException:
            if self.progress.round < round_:
                with held_back():
                    self.server.restore(before)
                    self.engine.settle(round_, self.federation.population.trainers, ())
                    undo()
            raise
        self._tell(round_, lines, seconds["seconds"])
        if time.monotonic() - self._saved_at >= self.experiment.checkpoint.every:
            self._checkpoint()

    def _undo(self, round_: int) -> Callable[[], None]:
        """What takes a round back that was settled but not logged: it may be stopped while it is evaluated."""
        back = self.store.mark(self._cohort(round_))
        accepted, failures = dict(self.rounds.accepted), dict(self.progress.failures)

        def undo() -> None:
            back()
            self.rounds.accepted, self.progress.failures = accepted, failures

        return undo

    def _cohort(self, round_: int) -> tuple[ClientId, ...]:
        return self.federation.population.cohort(round_, self.federation.population.cohort_size)

    def _attempts(self, round_: int, before: State) -> tuple[Ledger, list[dict[str, Any]], dict[str, float]]:
        attempts = self.experiment.training.attempts
        for attempt in range(1, attempts + 1):
            try:
                return self._attempt(round_, attempt)
            except RoundFailed as error:
                self.server.restore(before)
                self.engine.settle(round_, self.federation.population.trainers, ())
                if attempt == attempts:
                    raise RoundFailed(
                        f"{error} (tried {attempts} times; the run is kept up to round {round_ - 1}: "
                        f"potluck resume {self.folder.path})"
                    ) from error
                self.watcher.notice(f"{error}; trying again")
        raise AssertionError("unreachable: attempts is at least 1")

    def _attempt(self, round_: int, attempt: int) -> tuple[Ledger, list[dict[str, Any]], dict[str, float]]:
        federation, settings = self.federation, self.experiment.training
        ids = self._cohort(round_)
        ledger, lines = Ledger(round_), []
        examined = round_ % self.experiment.evaluate.every == 0 or round_ == settings.rounds
        everyone = federation.population.ids if self.experiment.evaluate.who == "all" else ids
        watch = Stopwatch()
        if examined:
            lines += self._examine("before", everyone, round_, attempt, ledger)
        watch.lap("evaluate")

        def before_settling(cohort: Cohort) -> None:
            watch.lap("train")
            if examined:
                lines.extend(self._examine("after_training", cohort.ids, round_, attempt, ledger))

        cohort = self.rounds.play(
            round_,
            ids,
            attempt=attempt,
            quorum=max(1, round(settings.quorum * len(ids))),
            ledger=ledger,
            before_settling=before_settling,
        )
        self._note(cohort, round_)
        if examined:
            lines += self._examine("after_aggregation", everyone, round_, attempt, ledger)
        watch.lap("evaluate")
        return ledger, lines, watch.seconds

    def _note(self, cohort: Cohort, round_: int) -> None:
        for client, reason in cohort.failures.items():
            self.progress.failures[client] = self.progress.failures.get(client, 0) + 1
            self.watcher.notice(f"round {round_} goes on without client {client}: {reason}")

    def _examine(
        self, when: Moment, ids: Sequence[ClientId], round_: int, attempt: int, ledger: Ledger
    ) -> list[dict[str, Any]]:
        """Measure clients at one moment, if it is asked for: with the newest downlink, except after training."""
        settings = self.experiment.evaluate
        if when not in settings.when:
            return []
        examinations = []
        for client in ids:
            down = None if when == "after_training" else Message(self.method.downlink(self.server, client))
            if down:
                ledger.add(client, "evaluate", "down", "evaluate", down)
            stamp = self.rounds.stamp(client, round_, attempt)
            examinations.append(Examination(client, down, stamp, self.modes, settings.on))
        outcomes = self.engine.examine(examinations)
        for failure in (outcome for outcome in outcomes if isinstance(outcome, Failure)):
            self.watcher.notice(f"round {round_}: {failure.reason} (not evaluated)")
        return self._lines(when, round_, [one for one in outcomes if isinstance(one, Answer)])

    def _lines(self, when: Moment, round_: int, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """The log lines of all answers, with one read from the device."""
        names = [(answer, name) for answer in answers for name in answer.report.metrics]
        values = (
            torch.stack([answer.report.metrics[name] for answer, name in names]).tolist() if names else []
        )
        sums: dict[ClientId, dict[str, float]] = {answer.client: {} for answer in answers}
        for (answer, name), value in zip(names, values, strict=True):
            sums[answer.client][name] = value
        held_out = set(self.federation.population.held_out)
        lines = []
        for client, found in sums.items():
            samples = self.federation.population.samples(client)
            common = self.experiment.evaluate.on == "global"
            test = len(self.federation.clients.shared_test(client)) if common else samples["test"]
            counts = {"test": test, "validation": samples["validation"]}
            lines += metric_lines(round_, when, client, found, counts, self.modes, client in held_out)
        return lines

    def _tell(self, round_: int, lines: Sequence[Mapping[str, Any]], seconds: float) -> None:
        when = "after_aggregation" if "after_aggregation" in self.experiment.evaluate.when else None
        tests = [
            line["test"]
            for line in lines
            if "test" in line and line["mode"] == self.modes[0] and when in (None, line["when"])
        ]
        scores = [score for test in tests if (score := score_of(test)) is not None]
        if scores:
            self._headline = sum(scores) / len(scores)
            self._measure = measured(
                {str(place): test.get("metric", "accuracy") for place, test in enumerate(tests)}
            )
        losses = [test["loss"] for test in tests if test["loss"] is not None]
        loss = sum(losses) / len(losses) if losses else None
        rounds = self.experiment.training.rounds
        self.watcher.round(RoundEnd(round_, rounds, self._headline, loss, seconds, self._measure))

    def _checkpoint(self) -> None:
        if math.isinf(self.experiment.checkpoint.every):
            return
        self._saved_at = time.monotonic()
        with held_back():  # a state that is taken as changed and then not saved would be lost
            notes = {
                "accepted": dict(self.rounds.accepted),
                "failures": dict(self.progress.failures),
                "logs": self.folder.offsets(),
            }
            self.checkpoints.save(self.progress.round, self.server.snapshot(), self.store.save(), notes)

    def _finish(self) -> RunResult:
        """Score the logs, write the summary and the report."""
        folder, experiment = self.folder, self.experiment
        summary = {
            "method": self.method.name,
            "rounds": self.progress.round,
            "seed": experiment.seed,
            "clients": len(self.federation.population.ids),
            "accuracy": summarise(folder / "metrics.jsonl", mode=self.modes[0]),
            "messages": messages_block(folder / "ledger.jsonl"),
            "seconds_per_round": seconds_per_round(folder / "timing.jsonl"),
            "failures": self.progress.failures,
            "split": self.federation.split.hash,
        }
        write_json(folder / "summary.json", summary)
        write_report(folder.path)
        return RunResult(folder.path, summary)


def observations(server: Server) -> list[dict[str, Any]]:
    """What the method noted of the clients in `server.report.metrics`, as `client/name`, with one read."""
    noted = server.report.metrics
    values = torch.stack([*noted.values()]).tolist() if noted else []
    found: dict[ClientId, dict[str, float]] = {}
    for name, value in zip(noted, values, strict=True):
        client, _, what = name.rpartition("/")
        found.setdefault(client, {})[what] = value
    return [{"round": server.round, "client": client, **seen} for client, seen in found.items()]


class Stopwatch:
    """Seconds per kind of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def chosen_modes(experiment: Experiment, known: tuple[str, ...]) -> tuple[str, ...]:
    """The inference modes to evaluate, the reported one first."""
    asked = experiment.evaluate.modes
    if asked == "first":
        return known[:1]
    if asked == "all":
        return known
    for mode in asked:
        if mode not in known:
            raise ConfigError(
                f"evaluate.modes: {experiment.method.name} has no mode {mode!r}; {nearest(mode, known)}"
            )
    return tuple(asked)
