"""A finished run, to look at and to take away: its scores as tables and pictures, its clients with their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.core.method import Method
from potluck.core.plain_values import harmless
from potluck.engine.store.checkpoints import Checkpoints
from potluck.engine.store.manifest import Manifest
from potluck.errors import ConfigError, RunError
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import write_json
from potluck.front_door import front_door
from potluck.models import Entries, ModelPool
from potluck.report import run_frames
from potluck.report.format import counted, moment
from potluck.report.log import ENVIRONMENT, Curve, read_config, read_mapping, read_metrics
from potluck.report.measures import measure_of
from potluck.report.page import write_report
from potluck.report.predictions import FOLDER
from potluck.report.reading import REMEDY, reading, shown_from
from potluck.report.render import Sheet, notebook, plain
from potluck.report.scores import disagreement, messages_block, seconds_per_round, summarise
from potluck.report.sheets import about_kept, client_rows, number_of_rows, run_sheet
from potluck.report.split_file import read_split
from potluck.runs.environment import kept_split
from potluck.runs.folder import LOGS, RunFolder
from potluck.runs.kept_models.given import Plugins
from potluck.runs.kept_models.opened import OpenedModels, Remake
from potluck.runs.log_marks import Marks
from potluck.runs.predictions import confusion, read_predictions
from potluck.runs.results.client_result import ClientResults, Line
from potluck.runs.state import RunState
from potluck.runs.stored import read_client_ids

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHOWN = 12  # clients that a printed result lists
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LEDGER, TIMING = "ledger.jsonl", "timing.jsonl"


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run: its folder, its summary, and what its log and its models say.

    `potluck.run` gives one, `potluck.open` gives one again later.

    >>> import tempfile, potluck
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = potluck.run(
    ...         data="digits", partition={"kind": "iid", "clients": 2}, models=["mlp-small"], method="fedproto",
    ...         training={"rounds": 1}, engine={"device": "cpu"}, out=f"{folder}/run",
    ...     )
    ...     scores = result.clients["1"].predict([[[[0.0] * 8] * 8]] * 3)
    ...     scores.shape, result.clients["1"].score == result.summary["accuracy"]["per_client"]["1"]
    (torch.Size([3, 10]), True)
    """

    folder: Path
    summary: dict[str, Any]
    # The user's own classes, as in `potluck.open`.
    models: Entries | None = field(default=None, compare=False)
    _remake: Remake | None = field(default=None, compare=False)
    _plugins: Plugins = field(default=False, compare=False)

    @property
    def accuracy(self) -> float | None:
        """Mean test accuracy over clients after the last round, or mean score for tasks without an accuracy."""
        value: float | None = self.summary["accuracy"]["last"]
        return value

    @property
    def advice(self) -> list[str]:
        """The advice that was given before the first round, a sentence each."""
        return list(self.summary.get("advice", ()))

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last round; None if it did not."""
        return self.summary.get("stopped")

    # --- clients and models ---

    @cached_property
    def clients(self) -> ClientResults:
        """Every client by its id, held-out ones too: `result.clients["3"].model()`."""
        with reading(self.folder / METRICS):
            return self._found_clients()

    def _found_clients(self) -> ClientResults:
        models = OpenedModels(self.folder, self.models, self._remake, self._plugins)
        found: dict[str, list[Line]] = {}
        for line in run_frames.read_lines(self.folder / METRICS, models.kept_round or self._last_round):
            if "missing" not in line:
                found.setdefault(line["client"], []).append(line)
        accuracy = self.summary["accuracy"]
        return ClientResults(models, self._client_ids, (accuracy["when"], accuracy["mode"]), found)

    @property
    def _client_ids(self) -> tuple[str, ...]:
        return read_client_ids(self.folder)

    @property
    def _last_round(self) -> int | None:
        rounds = self.summary["accuracy"].get("rounds") or {}
        value: int | None = rounds.get("last")
        return value

    # --- tables and pictures ---

    @shown_from(METRICS)
    def frame(self) -> pd.DataFrame:
        """The log as a pandas frame: a row per round, client, moment and mode that was measured.

        Beside these four a row has the test measures (`accuracy`, or those of the client's task), `loss` and
        `samples`, the same on validation samples (`validation_accuracy`, …), and `held_out`.
        """
        return run_frames.frame(self.folder / METRICS, self.summary["accuracy"])

    @shown_from(METRICS)
    def check_log(self) -> None:
        """Refuse a log that lost or gained lines or does not belong to the last checkpoint.

        A summary or a split of another run is refused, too.
        """
        log = self.folder / METRICS
        run_frames.check_whole(log, run_frames.read_lines(log, self._last_round), self.summary["accuracy"])
        saved, marks = _saved(self.folder / "checkpoints" / Checkpoints.MANIFEST)
        finished = (
            saved == self.summary["rounds"]
        )  # otherwise the last rounds were played without checkpoints
        try:
            RunFolder(self.folder).check_logs(marks, [name for name in LOGS if name in marks], whole=finished)
        except RunError as error:
            raise RunError(f"{error}; {REMEDY}") from error
        self._check_scores()
        self._check_facts()
        if "sites" not in (
            read_config(self.folder).get("partition") or ()
        ):  # the rows of sites are not known here
            kept_split(RunFolder(self.folder), RunFolder(self.folder).about())

    @shown_from(SUMMARY)
    def _check_scores(self) -> None:
        """Refuse scores that are not those of the log."""
        said = self.summary["accuracy"]
        try:
            found = summarise(self.folder / METRICS, mode=said["mode"])
        except ConfigError as error:
            raise RunError(f"{self.folder / SUMMARY} is not of this log: {error}; {REMEDY}") from error
        self._refuse_other({"accuracy": said}, {"accuracy": found}, METRICS)

    def _check_facts(self) -> None:
        """Refuse what else is said of the run, if its other files say something else."""
        for name, facts in _told_beside(self.folder).items():
            said = {key: self.summary[key] for key in facts if self.summary.get(key) is not None}
            self._refuse_other(said, facts, name)

    @shown_from(SUMMARY)
    def _refuse_other(self, said: Mapping[str, Any], found: Mapping[str, Any], name: str) -> None:
        other = disagreement(said, found)
        if other is not None:
            raise RunError(
                f"{self.folder / SUMMARY} does not agree with {name} beside it: {other} is another there; {REMEDY}"
            )

    @shown_from(METRICS)
    def curves(self) -> pd.DataFrame:
        """The mean over clients per round, moment and mode, held-out clients left out.

        Where clients were missing, it is over those measured in the last round, in the rounds that all these have.
        """
        return run_frames.curves(run_frames.comparable(self.frame(), self.folder / METRICS))

    @front_door()
    @shown_from(METRICS)
    def plot(self, kind: str = "curves") -> Figure:
        """Scores over rounds, a line per moment and mode; the band is one standard deviation over clients.

        `potluck.plot` draws other kinds.
        """
        if kind != "curves":
            raise ConfigError(f"plot() of a run draws its curves; call potluck.plot({kind!r}, result)")
        from potluck.report.pictures.curves import accuracy_over_rounds

        found = self.summary["accuracy"]
        measure = measure_of(found.get("metrics"), found.get("metric_facts"))
        return accuracy_over_rounds(self._curves(), measure=measure)

    def _curves(self) -> list[Curve]:
        metrics, accuracy = read_metrics(self.folder / METRICS), self.summary["accuracy"]
        first = accuracy["when"], accuracy["mode"]
        keys = sorted(metrics.series, key=lambda key: key != first)
        return [metrics.series[key].curve(f"{key[1]}, {moment(key[0])}", band=key == first) for key in keys]

    @front_door()
    def predictions(self, round: int | None = None) -> pd.DataFrame:
        """What the clients predicted, a row per sample; needs `evaluate: {predictions: true}`.

        Labels and predictions of classes are numbers; `result.clients["3"].class_names` has their names. With
        `predictions: all` these are of every round, otherwise of the last one.
        """
        return read_predictions(self.folder, round)

    @front_door()
    def confusion(self, **chosen: Any) -> dict[str, pd.DataFrame]:
        """A confusion matrix per client, from the predictions; see `potluck.runs.predictions.confusion`.

        Rows and columns have the names of the classes where models are kept, else their numbers.
        """
        found, models = confusion(self.folder, **chosen), self.clients.models
        stranger = next(iter(found.keys() - set(self.clients.ids)), None)
        if stranger is not None:
            raise RunError(
                f"{self.folder / FOLDER} names client {stranger!r}, which the run has not; remove it"
            )
        if models.kept_round is None:
            return found
        return {client: _with_names(table, models.class_names(client)) for client, table in found.items()}

    # --- in words ---

    @shown_from(SUMMARY)
    def __str__(self) -> str:
        found = self.summary["accuracy"]
        measure = measure_of(found.get("metrics"), found.get("metric_facts"))
        known = self.accuracy is not None
        score = f"{measure.name} {measure.full(self.accuracy)}" if known else _no_score(found, measure.name)
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        absent = (found.get("missing") or {}).get("last")
        score += f" without client {', '.join(absent)}" if absent else ""
        told = about_kept(found, self.clients.models.kept_round)
        rounds = f"{counted(self.summary['rounds'], 'round')}{stopped}"
        return harmless(
            f"{self.summary['method']}: {score}, {rounds}, {self.folder}"
            + (f"\nmodels: {told}" if told else "")
        )

    def __repr__(self) -> str:
        return plain(self._sheet()).rstrip()

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        return notebook(self._sheet())

    @shown_from(SUMMARY)
    def _sheet(self) -> Sheet:
        """One screen: the clients, how the run went, and where it is."""
        split = read_split(self.folder / "split.json", self.summary["accuracy"].get("per_client") or ())
        models = (read_mapping(self.folder / "environment.json") or {}).get("models")
        rows = client_rows(split, self.summary["accuracy"], models if isinstance(models, dict) else {})
        sheet = run_sheet(self.summary, rows)
        sheet = sheet.first(SHOWN, "result.frame()", number_of_rows(split, rows))
        kept = self.clients.models.kept_round
        closing = (f"models: {self._kept(kept)}", f"folder: {self.folder}")
        return Sheet(sheet.title, sheet.columns, sheet.entries, (*sheet.notes, *closing), sortable=False)

    def _kept(self, round_: int | None) -> str:
        """Which models are kept, and of which round the scores of the clients are."""
        if round_ is None:
            return f"none are kept: {self.clients.models.why_none}"
        told = about_kept(self.summary["accuracy"], round_)
        if not told:
            return f"those after round {round_}, result.clients[…]"
        return f"{told}, those of result.clients[…] of round {round_} too"


def _saved(manifest: Path) -> tuple[int | None, Marks]:
    """The round of the last checkpoint, and how far the logs reached; nothing where that cannot be read."""
    try:
        found = Manifest.read(manifest)
    except (OSError, ValueError, RecursionError):
        return None, {}
    logs = found.notes.get("logs")
    return found.round, logs if isinstance(logs, Mapping) else {}


def _told_beside(folder: Path) -> dict[str, dict[str, Any]]:
    """What other files than `metrics.jsonl` say of the things that a summary says, by file."""
    found = {ENVIRONMENT: _begun_with(folder)}
    if (folder / LEDGER).exists():
        with reading(folder / LEDGER):
            found[LEDGER] = {"messages": messages_block(folder / LEDGER)}
    if (folder / TIMING).exists():
        with reading(folder / TIMING):
            seconds = seconds_per_round(folder / TIMING)
            found[TIMING] = {"rounds": RunFolder(folder).rounds_logged(), "seconds_per_round": seconds}
    return found


def _begun_with(folder: Path) -> dict[str, Any]:
    """What `environment.json` says of method, seed and split; folders of other versions may not say it all."""
    with reading(folder / ENVIRONMENT):
        about = RunFolder(folder).about()
        settings = about.get("settings", {})
        known = {"method": (settings.get("method") or {}).get("name"), "seed": settings.get("seed")}
        return {key: one for key, one in {**known, "split": about.get("split")}.items() if one is not None}


def _with_names(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """A confusion matrix with the names of the classes, where there is one for each."""
    if len(names) != len(table):
        return table
    named = table.set_axis(list(names)).set_axis(list(names), axis=1)
    return named.rename_axis(index="label", columns="prediction")


def _no_score(found: Mapping[str, Any], measure: str) -> str:
    """Why a run has no score, given the `accuracy` block of its summary."""
    if found.get("metrics"):
        return f"{measure} undefined for every client"
    return "no test data" if found["when"] else "nothing measured"


def conclude(
    folder: RunFolder,
    experiment: Experiment,
    federation: Federation,
    state: RunState,
    reported: str,
    advice: Sequence[str] = (),
    stopped: str | None = None,
    remarks: Mapping[str, Any] | None = None,
) -> RunResult:
    """Score the logs and write summary and report.

    `reported` is the inference mode of the summary, `stopped` says why the run ended before its last round, and
    `remarks` are further entries of the summary.
    """
    summary = {
        "method": federation.method.name,
        "rounds": state.round,
        "seed": experiment.seed,
        "clients": len(federation.population.ids),
        "accuracy": summarise(folder / METRICS, mode=reported),
        "messages": messages_block(folder / LEDGER),
        "seconds_per_round": seconds_per_round(folder / TIMING),
        "failures": state.failures,
        "failure_reasons": state.reasons,
        "split": federation.split.hash,
        "advice": list(advice),
        "stopped": stopped,
        **(remarks or {}),
    }
    write_json(folder / SUMMARY, summary)
    write_report(folder.path)
    return RunResult(folder.path, summary, _remake=remaking(federation))


def remaking(federation: Federation) -> Remake:
    """Makes the method anew. It holds on to the user's classes and options, not to the data."""
    made, config, pool = type(federation.method), federation.method.config, federation.clients.models.pool

    def remake() -> tuple[Method, ModelPool]:
        return made(config, pool), pool

    return remake
