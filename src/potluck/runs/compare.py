"""Comparisons: several methods on the same split, initial models, cohorts and order of batches.

The folder of a comparison has one run folder per method and seed, `comparison.json` and `comparison.html`. The
same command again skips runs that are finished and resumes those that were stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from potluck.core.dataset import Data
from potluck.core.rng import Rng
from potluck.data import Split
from potluck.engine.evaluate import check_evaluation, judged_by
from potluck.errors import ConfigError, RunError, nearest
from potluck.experiment.differences import first_difference
from potluck.experiment.schema import Experiment
from potluck.files import read_json, write_json, write_whole
from potluck.methods.registry import find_method, method_names
from potluck.report.chosen_rounds import check_rounds, with_rounds
from potluck.report.comparison import compare_runs
from potluck.report.log import read_config
from potluck.report.page import write_comparison
from potluck.report.targets import check_targets, with_targets
from potluck.runs.api import resume, run
from potluck.runs.environment import check_version
from potluck.runs.folder import RunFolder
from potluck.runs.observers import Observer
from potluck.runs.pilots import PILOTS, settled

BASELINE = "local"
MARK = "experiment.yaml"  # marks the folder of a comparison; a folder without it is never written into
# What a run may leave behind that was stopped before its first round.
START = ("split.json", "contract.json", "environment.json", "tuning.json", ".lock")

Watch = Callable[[str], Observer]
Skip = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonResult:
    """A finished comparison: its folder, and what `compare_runs` found."""

    folder: Path
    comparison: dict[str, Any]


def with_baseline(methods: Sequence[str]) -> list[str]:
    """The methods without repetitions, with Local put first if it was left out; unknown names are refused."""
    for method in methods:
        find_method(method)
    named = list(dict.fromkeys(methods))
    return named if BASELINE in named else [BASELINE, *named]


def experiments_by_method(
    path: Path | str, methods: Sequence[str], overrides: Sequence[str] = ()
) -> dict[str, Experiment]:
    """The experiment of a file under several methods.

    The method that the file names keeps its options, the others have their defaults. An override such as
    `fedmrl.d1=50` sets an option of one method, any other override applies to all.
    """
    general, own = own_overrides(overrides)
    for method in own:
        if method not in methods:
            raise ConfigError(
                f"{own[method][0]!r} sets an option of {method}, which is not one of the methods"
            )
    written = Experiment.load(path, general).method.name
    experiments = {}
    for method in methods:
        chosen = [] if method == written else [f"method={{name: {method}}}"]
        options = [f"method.{override.partition('.')[2]}" for override in own.get(method, ())]
        experiments[method] = Experiment.load(path, [*general, *chosen, *options])
    return experiments


def own_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides that apply to all methods, and by method those that begin with its name."""
    general: list[str] = []
    own: dict[str, list[str]] = {}
    known = set(method_names())
    for override in overrides:
        method = override.partition("=")[0].partition(".")[0]
        (own.setdefault(method, []) if method in known else general).append(override)
    return general, own


def compare(
    experiments: Mapping[str, Experiment],
    seeds: Sequence[int],
    folder: Path | str,
    watch: Watch = lambda label: Observer(),
    skip: Skip = lambda sentence: None,
    *,
    targets: Sequence[float] = (),
    rounds: Sequence[int] = (),
    against: str | None = None,
) -> ComparisonResult:
    """Run every experiment with every seed into `folder`, or what is left to run, and compare with Local.

    The keys of `experiments` are methods, or labels where one method appears with several settings. `watch` makes
    the observer of a run from its label; `skip` is told of runs that were finished before. `targets` asks what it
    costs to reach these scores, `rounds` for the scores after these rounds. `against` names what to compare with
    instead of Local, then also client by client.
    """
    for label, experiment in experiments.items():
        check_rounds(rounds, experiment.training.rounds, experiment.evaluate.every, label)
    check_reference(against, experiments)
    home = RunFolder(Path(folder))
    first = next(iter(experiments.values()))
    data = first.load_data()
    splits = {seed: first.variant(seed=seed).make_split(data) for seed in seeds}
    for experiment in experiments.values():
        check(experiment.variant(seed=seeds[0]), data, splits[seeds[0]], targets)
    _make_folder(home.path, first)
    folders: dict[str, list[Path]] = {}
    with home.locked():
        for seed in seeds:
            for method, experiment in experiments.items():
                label = f"{method}, seed {seed}" if len(seeds) > 1 else method
                part = _Part(experiment.variant(seed=seed), home / f"{method}-seed{seed}", label)
                part.finish(data, splits[seed], watch, skip)
                folders.setdefault(method, []).append(part.folder)
        rng, by_client = Rng(first.seed, ("compare",)), against is not None
        comparison = compare_runs(folders, rng, baseline=against or BASELINE, by_client=by_client)
        if targets:
            comparison = with_targets(comparison, folders, targets)
        if rounds:
            comparison = with_rounds(comparison, folders, rounds)
        write_json(home / "comparison.json", comparison)
        write_comparison(home / "comparison.html", comparison)
    return ComparisonResult(home.path, comparison)


def check_reference(against: str | None, labels: Iterable[str]) -> None:
    """Refuse a reference that is not among the compared labels; None stands for Local."""
    labels = list(labels)
    if against is not None and against not in labels:
        raise ConfigError(f"there is no {against!r} here to compare against; {nearest(against, labels)}")


def check(experiment: Experiment, data: Data, split: Split, targets: Sequence[float] = ()) -> None:
    """Refuse an experiment that cannot work, or a target, before another one has trained for hours."""
    federation = experiment.build(data, split)
    check_evaluation(experiment.evaluate, federation)
    check_targets(targets, judged_by(experiment.evaluate, federation))


def _make_folder(path: Path, experiment: Experiment) -> None:
    """Make the folder, or reuse one that a comparison made; any other is refused."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        foreign = not (path / MARK).exists() and any(path.iterdir())
    except OSError as error:
        raise RunError(f"cannot make the folder {path}: {error.strerror or error}") from error
    if foreign:
        raise RunError(f"{path} exists and holds something else than a comparison; choose another folder")
    write_whole(path / MARK, experiment.to_yaml().encode())


@dataclass(frozen=True)
class _Part:
    """One run of a comparison."""

    experiment: Experiment
    folder: Path
    label: str

    def finish(self, data: Data, split: Split, watch: Watch, skip: Skip) -> None:
        """Run it, resume it, or skip it if it is finished."""
        if not (self.folder / "config.yaml").exists():
            self._clear()
            run(self.experiment, out=self.folder, watcher=watch(self.label), given=(data, split))
            return
        self._check_same()
        if self._finished():
            skip(f"{self.label}: finished before, taken from {self.folder}")
        else:
            resume(self.folder, watcher=watch(self.label))

    def _clear(self) -> None:
        """Remove what is left of a run that was stopped before its first round."""
        if not self.folder.exists():
            return
        shutil.rmtree(self.folder / PILOTS, ignore_errors=True)
        for name in START:
            (self.folder / name).unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError as error:
            raise RunError(f"{self.folder} is no run folder; move it out of the way") from error

    def _check_same(self) -> None:
        """Refuse a run that was made with other settings."""
        check_version(self.folder, read_json(self.folder / "environment.json"))
        experiment = settled(self.experiment, self.folder)
        there, wanted = read_config(self.folder), yaml.safe_load(experiment.to_yaml())
        key = first_difference(there, wanted)
        if key is not None:
            raise RunError(
                f"{self.folder} was run with other settings ({key}); choose another folder with --out, "
                "or remove that one"
            )

    def _finished(self) -> bool:
        if not (self.folder / "report.html").exists() or not (self.folder / "summary.json").exists():
            return False
        rounds: int = read_json(self.folder / "summary.json")["rounds"]
        return rounds == self.experiment.training.rounds
