"""What a picture is asked of: run folders, comparisons and sweeps, as paths or as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from potluck.core.dataset import Dataset
from potluck.errors import ConfigError, RunError
from potluck.models import Entries
from potluck.report.again import to_go_on
from potluck.report.log import Metrics, read_config, read_mapping, read_metrics
from potluck.report.measures import Measure, measure_of
from potluck.report.reading import reading
from potluck.report.scores import summarise
from potluck.runs.comparisons.comparison import Comparison, Sweep
from potluck.runs.kept_models.given import Plugins
from potluck.runs.open import looked_at, runs_so_far
from potluck.runs.results.open_run import open_run
from potluck.runs.results.run_result import RunResult

Given = RunResult | Comparison | Sweep | Path | str


@dataclass(frozen=True)
class Options:
    """What a picture may be told besides its runs; None where nothing was said."""

    over: tuple[str, ...] | None = None
    clients: tuple[str, ...] | None = None
    samples: int | None = None
    stages: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    moment: str | None = None
    mode: str | None = None
    data: Dataset | None = None


@dataclass(frozen=True)
class Code:
    """The user's own classes and plug-ins that a picture of models may use, as in `potluck.open`."""

    models: Entries | None = None
    plugins: Plugins = False


@dataclass(frozen=True)
class RunFiles:
    """A run by its folder, finished or not; nothing is read before it is needed."""

    folder: Path
    known: RunResult | None = None  # where the run was given as an object, with models of the user's
    code: Code = Code()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The experiment with every default written out."""
        return read_config(self.folder)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What `environment.json` says; nothing where it is absent."""
        return read_mapping(self.folder / "environment.json") or {}

    @cached_property
    def metrics(self) -> Metrics:
        """What was measured; a run without any measurement is refused."""
        found = read_metrics(self.folder)
        if not found.series and not found.held_out:
            raise RunError(f"{self.folder} has measured nothing{self.until_now}; {self.how_to_measure}")
        return found

    def check_measured(self) -> None:
        """Refuse a run without any measurement."""
        _ = self.metrics

    @property
    def how_to_measure(self) -> str:
        """What to do about a run without scores."""
        if not self.finished:
            return f"wait for its first evaluated round, or go on with it: {self.onward}"
        return "give its clients test samples (partition.test), and run it again"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder / "summary.json").exists()

    @property
    def until_now(self) -> str:
        """` so far` for a run that is not finished."""
        return "" if self.finished else " so far"

    @property
    def onward(self) -> str:
        """How to go on with the run."""
        return to_go_on(self.folder, portable=bool(self.environment.get("portable", True)))

    @cached_property
    def scores(self) -> dict[str, Any]:
        """The block `accuracy` of a summary, from the log."""
        with reading(self.folder / "metrics.jsonl"):
            return summarise(self.metrics)

    @property
    def measure(self) -> Measure:
        """What the clients are measured by."""
        return measure_of(self.scores.get("metrics"), self.scores.get("metric_facts"))

    def no_score(self) -> RunError:
        """The error that no client has a score."""
        return RunError(f"no client of {self.folder} has a score{self.until_now}; {self.how_to_measure}")

    def result(self, kind: str) -> RunResult:
        """The finished run with its models, for a kind of picture; one that is not finished is refused."""
        if self.known is not None and self.code == Code():
            return self.known
        if not self.finished:
            raise RunError(
                f"{kind} looks into the models of a finished run, and the run in {self.folder} is not finished; "
                f"go on with it: {self.onward}, or draw a picture of its log, such as curves"
            )
        return open_run(self.folder, self.code.models, self.code.plugins)


@dataclass(frozen=True)
class Asked:
    """Everything that one picture is made from."""

    kind: str
    given: tuple[Path | RunResult | Comparison | Sweep, ...]
    options: Options
    code: Code = Code()

    @cached_property
    def runs(self) -> tuple[RunFiles, ...]:
        """All runs, those inside comparisons and sweeps too, each once."""
        found = {one.folder.resolve(): one for given in self.given for one in _runs_of(given)}
        return tuple(replace(one, code=self.code) for one in found.values())

    @property
    def only(self) -> RunFiles:
        """The run of a picture that is of one run; of a comparison its first run will not do."""
        if len(self.runs) != 1:
            inside = ", ".join(str(run.folder) for run in self.runs[:3])
            raise ConfigError(
                f"{self.kind} shows one run, and these are {len(self.runs)}; give one of them: {inside}"
                f"{', …' if len(self.runs) > 3 else ''}"
            )
        return self.runs[0]

    @property
    def comparison(self) -> Comparison | None:
        """The comparison, where that is all there is."""
        one = self.given[0] if len(self.given) == 1 else None
        return one if isinstance(one, Comparison) else None


def asked_of(kind: str, runs: Given | Sequence[Given], options: Options, code: Code) -> Asked:
    """Look at what was given; a folder that is no run is refused."""
    several = list(runs) if isinstance(runs, list | tuple) else [runs]
    if not several:
        raise ConfigError(f"{kind}: give the folder of a run, or of a comparison")
    return Asked(kind, tuple(found for one in several for found in _opened(one, kind)), options, code)


def _opened(given: Any, kind: str) -> Sequence[Path | RunResult | Comparison | Sweep]:
    """A run, a comparison or a sweep, or the runs so far of an unfinished one; for a timeline also a trace."""
    if isinstance(given, RunResult | Comparison | Sweep):
        return [given]
    if not isinstance(given, str | Path):
        raise ConfigError(
            f"runs: give folders, or what potluck.run, compare and open return, not a {type(given).__name__}"
        )
    home = Path(given)
    if home.is_file():
        if kind == "timeline":
            return [home]
        raise RunError(f"{home} is a file; give the folder of a run, or of a comparison")
    begun = runs_so_far(home)
    measured = [run for run in begun if any(file.stat().st_size for file in run.glob("metrics.jsonl"))]
    return measured or begun or [looked_at(home)]


def _runs_of(given: Path | RunResult | Comparison | Sweep) -> Iterator[RunFiles]:
    if isinstance(given, RunResult):
        yield RunFiles(given.folder, given)
    elif isinstance(given, Sweep):
        for one in given.comparisons.values():
            yield from _runs_of(one)
    elif isinstance(given, Comparison):
        for entry in given.comparison["methods"]:
            for name in entry["runs"].values():
                yield _there(given.folder / name)
    else:
        yield RunFiles(given)


def _there(folder: Path) -> RunFiles:
    if not folder.is_dir():
        raise RunError(f"{folder} is gone, and the picture needs its files; run potluck compare again")
    return RunFiles(folder)


Draw = Callable[[Asked], Any]
