"""A run: an experiment played round by round into a folder, from which it can be resumed at any time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from potluck.core.card import ClientId
from potluck.core.metrics import MetricFacts
from potluck.core.server import Server
from potluck.engine.cohort import Cohort, clients_needed
from potluck.engine.evaluation.examined import Examined, score_of
from potluck.engine.evaluation.examiner import Examiner
from potluck.engine.evaluation.log_lines import read_together
from potluck.engine.evaluation.settings import SPLITS, Moment
from potluck.engine.factory import make_engine
from potluck.engine.ledger import Ledger
from potluck.engine.norms import largest_ratio
from potluck.engine.numerics import precision, threads
from potluck.engine.protocol import Engine, about
from potluck.engine.registry import RAY
from potluck.engine.retries import Tries, Waits
from potluck.engine.rounds import Rounds
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.state_files import StateFiles
from potluck.errors import PotluckError, RoundFailed, RunError, StoppedComplete
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import FULL, WRITING
from potluck.front_door import own_place
from potluck.report.again import to_go_on
from potluck.report.format import measured
from potluck.report.log import MOMENTS
from potluck.report.reading import reading
from potluck.runs.folder import RunFolder
from potluck.runs.kept_models.keeping import KeptModels, MeasuredStates
from potluck.runs.observers import Observer, Observers, RoundEnd, StopRun
from potluck.runs.observers.advisor import Advisor
from potluck.runs.observers.checkpoints import Checkpointer
from potluck.runs.observers.logs import RoundLogs
from potluck.runs.observers.trackers import make_trackers
from potluck.runs.results.run_result import RunResult, conclude
from potluck.runs.state import RunState
from potluck.signals import held_back

STATE_FAULTS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)  # over an odd tensor


class Interrupted(KeyboardInterrupt):
    """A run was stopped by hand, after a checkpoint."""

    def __init__(self, folder: Path, onward: str, saved: bool = True) -> None:
        self.folder = folder
        self.note = "" if saved else " (from round 1 again, as checkpoints are turned off)"
        super().__init__(f"stopped; continue with: {onward}{self.note}")


class Run:
    """Plays the rounds of an experiment: each is logged and told to the observers, or leaves no trace."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        federation: Federation,
        watcher: Observer | None = None,
        engine: Engine | None = None,
        waits: Waits | None = None,
    ) -> None:
        """`engine` is one whose clients keep their own states and outlive the run; by default one is made here.

        `waits` come before rounds and evaluations that are tried again because clients were lost.
        """
        self.waits = waits if waits is not None else Waits()
        told = watcher if watcher is not None else Observer()
        self.experiment, self.folder, self.federation = experiment, folder, federation
        self.last = experiment.training.rounds
        self.engine, self.store = (
            (engine, ClientStore())
            if engine is not None
            else make_engine(
                federation.clients,
                experiment.engine.for_rounds(self.last),
                StateFiles(folder / "checkpoints"),
                told.notice,
            )
        )
        self.rounds = Rounds(federation, self.engine, name=experiment.name)
        self.rounds.acceptance.largest_ratio = largest_ratio(experiment.training.max_norm)
        self.rounds.acceptance.notice = told.notice
        self.state = RunState(self.rounds, self.store)
        tries = 1 if engine is None else experiment.training.attempts  # a client that is here is not lost
        self.examiner = Examiner(
            self.rounds,
            experiment.evaluate,
            self.last,
            told.notice,
            tries,
            self.waits,
            experiment.training.quorum,
        )
        self.logs = RoundLogs(folder, experiment.evaluate.predictions == "last")
        self.checkpoints = Checkpointer(
            folder, self.state, experiment.checkpoint.every, durable=engine is not None
        )
        # Advice looks at the clients' models and samples, which the server of other engines may not know.
        on_cluster = experiment.engine.name == RAY
        self.advisors = [Advisor(federation, told.advise, on_cluster)] if engine is None else []
        # The clients of other engines keep their models themselves.
        states = MeasuredStates(self.rounds, self.store, experiment.evaluate)
        models = KeptModels(folder, experiment.keep, states, told.notice, self.checkpoints.saved_round)
        self.keepers = [models] if engine is None else []
        # Trackers and kept models first, so that no other observer that ends the run keeps a round from them.
        self.trackers = make_trackers(experiment, folder, told)
        self.observers = Observers(*self.trackers, *self.keepers, told, *self.advisors, self.checkpoints)
        self.stopped: str | None = None  # why the run ended before its last round
        self.left_out: Mapping[int, Collection[ClientId]] = {}  # who is not asked in a round
        self.replaced: Mapping[int, Collection[ClientId]] = {}  # in whose place others are asked in a round
        self.between_rounds: Callable[[], None] = lambda: None  # may end this run, for another to go on
        # whether an attempt that failed is tried again as it was
        self.may_repeat: Callable[[int, RoundFailed], bool] = lambda round_, error: True
        self.remarks: dict[str, Any] = {}  # what the summary says besides
        self._headline = _Headline()
        self._restored = 0  # the round of the checkpoint that the run goes on from

    def restore(self, accepted: Callable[[], None] = lambda: None, round_: int | None = None) -> None:
        """Go back to the last checkpoint, or to the start; `accepted` and `round_` as in `Checkpointer.restore`.

        A run with rounds left to play is not finished, so what an earlier end of it wrote is removed.
        """
        played = any(self.folder.lines("timing.jsonl"))
        self.checkpoints.restore(self.examiner.is_due, accepted, round_)
        if played and self.state.round == 0:
            self.observers.notice("there is no checkpoint: the run begins again with round 1")
        self._restored = self.state.round
        if self.state.round < self.last:
            for name in ("summary.json", "report.html"):
                (self.folder / name).unlink(missing_ok=True)

    def play(self) -> RunResult:
        """Play the remaining rounds and write summary and report; Ctrl-C keeps all whole rounds."""
        complete = False
        try:
            self._play_rounds()
            result = conclude(
                self.folder,
                self.experiment,
                self.federation,
                self.state,
                reported=self.examiner.modes[0],
                advice=[sentence for advisor in self.advisors for sentence in advisor.sentences],
                stopped=self.stopped,
                remarks=self.remarks | self.engine.remarks(),
            )
            complete = True
            self.observers.end(self.folder.path)
            return result
        except KeyboardInterrupt as error:
            if complete:
                raise StoppedComplete(self.folder.path) from error
            saved = self.state.round == 0 or self.checkpoints.saved_round() > 0
            raise Interrupted(self.folder.path, self._onward, saved) from error
        except (RunError, OSError) as error:
            if not _is_full(error):
                raise
            full = str(error).removesuffix(f"; {WRITING}")
            raise RunError(f"{full}; make room, then continue with: {self._onward}") from error
        finally:
            for tracker in self.trackers:
                tracker.close()

    def _play_rounds(self) -> None:
        try:
            method = self.federation.method.name
            self.observers.begin(self.experiment.name, method, self.last, self.state.round)
            with threads(self.experiment.engine.threads), precision(self.federation.precision):
                with self._stops():
                    self._recall()
                    while self.state.round < self.last:
                        self._tell(self._play_round(self.state.round + 1))
                        if self.state.round < self.last:
                            self.between_rounds()
                if self.stopped is not None:
                    self._evaluate_end()
            self.checkpoints.save()
            for keeper in self.keepers:
                keeper.finish(self.state.round)
        except KeyboardInterrupt:
            with held_back(forget=True):
                self.checkpoints.save()
                self.checkpoints.wait()
            raise
        finally:
            self.engine.close()
            self.checkpoints.close()
            self.store.close()

    @contextlib.contextmanager
    def _stops(self) -> Iterator[None]:
        """Let an observer end the rounds; its reason is kept if it ends them early."""
        try:
            yield
        except StopRun as stop:
            if self.state.round < self.last:
                self.stopped = str(stop) or "an observer asked for it"

    def _recall(self) -> None:
        """Tell the observers of all evaluations before the run goes on, also if one of them wants to stop it."""
        stop: StopRun | None = None
        for found in past_examinations(self.folder, self.examiner.facts):
            try:
                self.observers.recall(found)
            except StopRun as error:
                stop = stop or error
        for keeper in self.keepers:
            keeper.catch_up(self.state.round)
        if stop is not None:
            raise stop

    def _evaluate_end(self) -> None:
        """Evaluate the round after which the run was stopped, as the last round always is.

        Its moments after training are measured on the states that the round left; the one before it is gone.
        """
        round_ = self.state.round
        if round_ == 0 or self.examiner.is_due(round_):
            return
        self.examiner.last = round_
        ids, ledger, attempt = self.cohort(round_), Ledger(round_), self.experiment.training.attempts
        trained = tuple(client for client in ids if self.rounds.accepted.get(client) == round_)
        examined = [
            *self.examiner.examine("after_training", trained, round_, attempt, ledger),
            *self.examiner.examine("after_aggregation", ids, round_, attempt, ledger),
        ]
        with held_back():
            self.logs.evaluation(round_, examined, ledger.lines)
        for found in examined:
            self.observers.examined(found)
        for keeper in self.keepers:
            keeper.measured(round_, examined)

    def _play_round(self, round_: int) -> RoundEnd:
        """Play one round and log it; if anything fails before it is logged, nothing of it stays."""
        with (
            self._on_what_was_saved(round_),
            self.state.transaction(round_, self.cohort(round_)) as undo_attempt,
        ):
            if round_ < self.last:
                self.store.prefetch(self.cohort(round_ + 1))
            started = time.perf_counter()
            played = self._attempts(round_, undo_attempt)
            end = self._round_end(round_, played, time.perf_counter() - started)
            with held_back():
                self.logs.round(end)
                self.state.round = round_
        return end

    @contextlib.contextmanager
    def _on_what_was_saved(self, round_: int) -> Iterator[None]:
        """Say of a checkpoint that the first round after it fails.

        What a mapping in a state holds is up to its method, so it cannot be checked when it is loaded.
        """
        try:
            yield
        except STATE_FAULTS as error:
            known = isinstance(error, PotluckError | torch.OutOfMemoryError)
            if not self._restored or round_ != self._restored + 1 or known or own_place(error.__traceback__):
                raise
            raise RunError(self.checkpoints.unfit(self._restored, error)) from error

    def _tell(self, end: RoundEnd) -> None:
        for found in end.examined:
            self.observers.examined(found)
        self.observers.round(end)

    @property
    def _onward(self) -> str:
        """How to go on with the run."""
        return to_go_on(self.folder.path, self.experiment.portable)

    def drawn(self, round_: int) -> tuple[ClientId, ...]:
        """The clients that are drawn for a round, those who stand in for others included."""
        population, replaced = self.federation.population, self.replaced.get(round_)
        return population.cohort_without(round_, replaced) if replaced else population.cohort(round_)

    def cohort(self, round_: int) -> tuple[ClientId, ...]:
        """The clients that are asked in a round."""
        drawn = self.drawn(round_)
        out = self.left_out.get(round_, ())
        return tuple(client for client in drawn if client not in out) if out else drawn

    def _attempts(self, round_: int, undo_attempt: Callable[[], None]) -> _Attempt:
        """Try a round as often as the settings allow; where clients were lost, as long as patience lasts."""
        tries = Tries(self.experiment.training.attempts, self.waits, self.waits.patience)
        while True:
            try:
                return self._attempt(round_, tries.made)
            except RoundFailed as error:
                undo_attempt()
                wait = tries.next_wait(lost=bool(error.lost))
                if wait is None or not self.may_repeat(round_, error):
                    other = "" if error.lost else "; with other settings start a new run"
                    raise RoundFailed(
                        f"{error} (tried {tries.made} times; the run is kept up to round {round_ - 1}: "
                        f"{self._onward}{other})",
                        error.failures,
                        error.lost,
                        error.spoiled,
                    ) from error
                self.observers.notice(f"{error}; trying again{f' in {wait:g} s' if wait else ''}")
                tries.again(wait)

    def _attempt(self, round_: int, attempt: int) -> _Attempt:
        """Play a round once, with evaluation at its three moments."""
        ids, ledger, watch = self.cohort(round_), Ledger(round_), Stopwatch()
        examined: list[Examined] = []

        def examine(when: Moment, cohort: tuple[ClientId, ...]) -> None:
            examined.extend(self.examiner.examine(when, cohort, round_, attempt, ledger))

        def before_settling(cohort: Cohort) -> None:
            watch.lap("train")
            examine("after_training", cohort.ids)

        examine("before", ids)
        watch.lap("evaluate")
        cohort = self.rounds.play(
            round_,
            ids,
            attempt=attempt,
            quorum=clients_needed(self.experiment.training.quorum, self._size(round_)),
            ledger=ledger,
            before_settling=before_settling,
        )
        self._note(round_, cohort.failures)
        examine("after_aggregation", ids)
        watch.lap("evaluate")
        return _Attempt(ledger, examined, cohort.failures, watch.seconds)

    def _size(self, round_: int) -> int:
        """How many clients the quorum of a round counts; that fewer stand in than are out makes it no lower."""
        asked = len(self.cohort(round_))
        return max(asked, self.federation.population.cohort_size) if self.replaced.get(round_) else asked

    def _note(self, round_: int, failures: Mapping[ClientId, str]) -> None:
        self.state.count_failures(failures)
        for client, reason in failures.items():
            self.observers.notice(f"round {round_} goes on without {about(client, reason)}")

    def _round_end(self, round_: int, played: _Attempt, seconds: float) -> RoundEnd:
        """What observers hear of a round. A round without evaluation repeats the accuracy of the one before."""
        tests = played.examined[-1].parts() if played.examined else {}
        scores = [score for test in tests.values() if (score := score_of(test)) is not None]
        if scores:
            metrics = {client: test.get("metric", "accuracy") for client, test in tests.items()}
            shares = played.examined[-1].facts().is_share
            self._headline = _Headline(sum(scores) / len(scores), measured(metrics), shares)
        losses = [test["loss"] for test in tests.values() if test["loss"] is not None]
        return RoundEnd(
            round_,
            self.last,
            self._headline.accuracy,
            sum(losses) / len(losses) if losses else None,
            seconds,
            self._headline.measure,
            self._headline.is_share,
            examined=played.examined,
            ledger=played.ledger.lines,
            observations=self.examiner.observed(round_, observations(self.rounds.server)),
            timing=played.seconds | {"seconds": seconds},
            failures=played.failures,
            client_seconds=dict(self.engine.work_seconds),
        )


def _is_full(error: Exception) -> bool:
    """Whether a file could not be written for want of space."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, SafetensorError):  # which says the number in words alone
        return any(f"(os error {number})" in str(cause) for number in FULL)
    return isinstance(cause, OSError) and cause.errno in FULL


@dataclass(frozen=True)
class _Headline:
    """The mean score over clients when they were last measured."""

    accuracy: float | None = None
    measure: str = "accuracy"
    is_share: bool = True


@dataclass(frozen=True)
class _Attempt:
    """What an attempt at a round leaves to be logged."""

    ledger: Ledger
    examined: list[Examined]
    failures: dict[ClientId, str]
    seconds: dict[str, float]


def past_examinations(folder: RunFolder, own: Mapping[str, MetricFacts]) -> Iterator[Examined]:
    """The evaluations that are in the log of a run, in order; `own` are the facts of its own metrics."""
    with reading(folder / "metrics.jsonl"):
        for (round_, when), found in groupby(
            folder.lines("metrics.jsonl"), lambda line: (line["round"], line["when"])
        ):
            lines = list(found)
            measured, missing = (
                tuple(line for line in lines if ("missing" in line) is lacks) for lacks in (False, True)
            )
            examined = Examined(round_, when, measured, own=own, missing=missing)
            _check_understood(examined)
            yield examined


def _check_understood(examined: Examined) -> None:
    """Ask for all that observers ask for; what cannot be answered is raised."""
    MOMENTS.index(examined.when)
    examined.facts()
    for split in SPLITS:
        float(sum(examined.scores(split).values()))


def observations(server: Server) -> list[dict[str, Any]]:
    """Log lines of what the method noted of clients in `server.report.metrics`, under `client/name`.

    None for infinity and NaN, which JSON does not have.
    """
    (noted,) = read_together([server.report.metrics])
    found: dict[ClientId, dict[str, float | None]] = {}
    for name, value in noted.items():
        client, _, what = name.rpartition("/")
        found.setdefault(client, {})[what] = value if math.isfinite(value) else None
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
