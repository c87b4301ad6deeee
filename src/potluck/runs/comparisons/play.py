"""Comparisons: several methods on the same split, initial models, cohorts and order of batches.

The folder of a comparison has one run folder per method and seed, `comparison.json` and `comparison.html`. The
same command again skips runs that are finished and resumes those that were stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.dataset import Data
from potluck.core.rng import Rng
from potluck.data import Split
from potluck.engine.evaluation.checks import check_evaluation, judged_by
from potluck.engine.registry import RAY
from potluck.errors import RunError
from potluck.experiment.differences import Difference, changes_since
from potluck.experiment.export import to_values
from potluck.experiment.plain import plain
from potluck.experiment.recipe import ExperimentRecipe
from potluck.experiment.schema import Experiment
from potluck.files import check_name, make_folders, refuse_links, write_json, write_whole
from potluck.report.chosen_rounds import check_rounds, with_rounds
from potluck.report.comparison import compare_runs
from potluck.report.comparison_page import write_comparison
from potluck.report.log import View, read_config
from potluck.report.targets import check_targets, with_targets
from potluck.runs.api import go_on, run
from potluck.runs.comparisons.comparison import COMPARISON, MARK, Comparison
from potluck.runs.comparisons.elsewhere import RunJob, play_elsewhere
from potluck.runs.comparisons.references import BASELINE, check_reference, references, with_locals
from potluck.runs.environment import check_version, data_facts
from potluck.runs.fetched_files import check_fetched_files
from potluck.runs.folder import LOCK, RunFolder
from potluck.runs.observers import Observer
from potluck.runs.own_code import check_own_code, reach, unused_plugins
from potluck.runs.pilots import settled
from potluck.runs.results.run_result import RunResult, remaking
from potluck.runs.resuming import ROUNDS, is_free
from potluck.runs.stored import read_summary

Watch = Callable[[str], Observer]
Skip = Callable[[str], None]


def compare_experiments(
    experiments: Mapping[str, Experiment],
    seeds: Sequence[int],
    folder: Path | str,
    watch: Watch = lambda label: Observer(),
    skip: Skip = lambda sentence: None,
    *,
    targets: Sequence[float] = (),
    rounds: Sequence[int] = (),
    against: str | None = None,
    view: View = "last",
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    base: Experiment | None = None,
) -> Comparison:
    """Run every experiment with every seed into `folder`, or what is left to run, and compare with Local.

    The keys of `experiments` are methods, or labels where one method appears with several settings. Each is paired
    with Local with the same training settings, which is added where it is missing. `watch` makes the observer
    of a run from its label; `skip` is told of runs that were finished before. `targets` asks what it costs to reach
    these scores, `rounds` for the scores after these rounds. `against` names what to compare with instead of
    Local. `variants` has what each label changes, and `base` is the experiment without these changes (by default
    the first one), for the page.
    """
    base = base if base is not None else next(iter(experiments.values()))
    experiments = with_locals(experiments, base)
    for label, experiment in experiments.items():
        check_rounds(rounds, experiment.training.rounds, experiment.evaluate.every, label)
    check_reference(against, experiments)
    home = RunFolder(Path(folder))
    first = next(iter(experiments.values()))
    data = first.load_data()
    splits = {seed: first.variant(seed=seed).make_split(data) for seed in seeds}
    for experiment in experiments.values():
        check(experiment.variant(seed=seeds[0]), data, splits[seeds[0]], targets)
    make_folder(home.path, "comparison", _is_begun)
    with home.locked():
        _check_begun([part for _, _, part in _parts(experiments, seeds, home)], data, splits)
        write_whole(home / MARK, base.to_yaml().encode())
        folders: dict[str, list[Path]] = {label: [] for label in experiments}
        results: dict[tuple[str, int], RunResult] = {}
        if base.engine.name == RAY:
            _spread([part for _, _, part in _parts(experiments, seeds, home)], data, splits, skip)
            skip = _silent
        for label, seed, part in _parts(experiments, seeds, home):
            results[label, seed] = part.finish(data, splits[seed], watch, skip)
            folders[label].append(part.folder)
        comparison = _compared(experiments, folders, against, view)
        if targets:
            comparison = with_targets(comparison, folders, targets)
        if rounds:
            comparison = with_rounds(comparison, folders, rounds)
        changes = {label: each for label, each in (variants or {}).items() if label in experiments}
        comparison |= {"variants": plain(changes)} if changes else {}
        comparison = _with_settings(comparison, experiments, changes)
        comparison |= _not_shown(home.path, folders)
        write_json(home / COMPARISON, comparison)
        write_comparison(home / "comparison.html", comparison)
    return Comparison(home.path, comparison, results)


def _with_settings(
    comparison: Mapping[str, Any],
    experiments: Mapping[str, Experiment],
    changes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Add to every entry its own values of all keys that some variant changes."""
    keys = list(dict.fromkeys(key for each in changes.values() for key in _changed_keys(each)))
    if not keys:
        return dict(comparison)
    values = {label: to_values(one) for label, one in experiments.items()}
    methods = [
        entry | {"settings": {key: _value(values[entry["method"]], key) for key in keys}}
        for entry in comparison["methods"]
    ]
    return {**comparison, "methods": methods}


def _changed_keys(changes: Mapping[str, Any]) -> Iterator[str]:
    """The keys that a variant changes, the options in a block `method: {name: …, d1: 8}` included."""
    for key, value in changes.items():
        if key != "method":
            yield key
        elif isinstance(value, Mapping):
            yield from (f"method.{option}" for option in value if option != "name")


def _value(values: Any, key: str) -> Any:
    """What a dotted key says; None where there is no such value."""
    for word in key.split("."):
        values = values.get(word) if isinstance(values, Mapping) else None
    return values


def _not_shown(home: Path, folders: Mapping[str, Sequence[Path]]) -> dict[str, list[str]]:
    """The runs of earlier calls in this folder that were not asked for now."""
    shown = {folder.name for each in folders.values() for folder in each}
    found = sorted(path.parent.name for path in home.glob("*-seed*/config.yaml"))
    others = [name for name in found if name not in shown]
    return {"not_shown": others} if others else {}


def _parts(
    experiments: Mapping[str, Experiment], seeds: Sequence[int], home: RunFolder
) -> Iterator[tuple[str, int, _Part]]:
    """The runs of a comparison with label and seed, all labels of the first seed first."""
    for seed in seeds:
        for label, experiment in experiments.items():
            shown = f"{label}, seed {seed}" if len(seeds) > 1 else label
            yield label, seed, _Part(experiment.variant(seed=seed), home / f"{label}-seed{seed}", shown)


def _spread(parts: Sequence[_Part], data: Data, splits: Mapping[int, Split], told: Skip) -> None:
    """Play what is left to play on a cluster, each run as a whole at one of its homes."""
    jobs = [part.job(data, splits[part.experiment.seed]) for part in parts if not part.is_done]
    if jobs:
        play_elsewhere(parts[0].experiment.engine, jobs, told)


def _finish(experiment: Experiment, folder: Path, split: Split) -> None:
    """Play one run of a comparison in another process."""
    _Part(experiment, folder, folder.name).finish(
        experiment.load_data(), split, lambda label: Observer(), _silent
    )


def _silent(sentence: str) -> None:
    """Say nothing."""


def _check_begun(parts: Sequence[_Part], data: Data, splits: Mapping[int, Split]) -> None:
    """Before any run goes on, or gets more rounds, refuse what would be refused of the others."""
    for part in parts:
        if part.begun:
            part.check_same(data, splits[part.experiment.seed])


def _compared(
    experiments: Mapping[str, Experiment],
    folders: Mapping[str, Sequence[Path]],
    against: str | None,
    view: View,
) -> dict[str, Any]:
    """The content of `comparison.json`: all finished runs, each against its own Local or all against one label."""
    return compare_runs(
        folders,
        Rng(next(iter(experiments.values())).seed, ("compare",)),
        baseline=against or BASELINE,
        references=dict.fromkeys(experiments, against) if against else references(experiments),
        view=view,
    )


def check(experiment: Experiment, data: Data, split: Split, targets: Sequence[float] = ()) -> None:
    """Refuse an experiment that cannot work, or a target, before another one has trained for hours."""
    federation = experiment.build(data, split)
    check_evaluation(experiment.evaluate, federation)
    check_targets(targets, judged_by(experiment.evaluate, federation))


def make_folder(path: Path, what: str, is_ours: Callable[[set[str]], bool]) -> None:
    """Make the folder of a comparison or a sweep, or reuse one that `is_ours` knows by its names; refuse others."""
    check_name(path)
    if path.is_file():
        raise RunError(f"{path} is a file; choose another folder")
    try:
        make_folders(path, exist_ok=True)
        names = {one.name for one in path.iterdir() if not one.name.startswith(f".{MARK}.")}
    except OSError as error:
        raise RunError(
            f"cannot make the folder {path}: {error.strerror or error}; choose another one"
        ) from error
    if names - {LOCK} and not is_ours(names):
        raise RunError(f"{path} exists and has something other than a {what}; choose another folder")
    refuse_links(path)


def _is_begun(names: set[str]) -> bool:
    """Whether a comparison was begun: it locks its folder, then writes its mark, a name that users' files have."""
    return MARK in names and not names.isdisjoint({LOCK, COMPARISON})


@dataclass(frozen=True)
class _Part:
    """One run of a comparison."""

    experiment: Experiment
    folder: Path
    label: str

    @property
    def begun(self) -> bool:
        """Whether its first round was reached in an earlier call."""
        return (self.folder / "config.yaml").exists()

    @property
    def as_begun(self) -> Experiment:
        """The experiment without plugins that were added since and that nothing of it comes from."""
        there = read_config(self.folder).get("plugins") or ()
        added = unused_plugins(self.experiment) - {*map(str, there)}
        if not added:
            return self.experiment
        kept = [name for name in to_values(self.experiment)["plugins"] if name not in added]
        return self.experiment.variant(plugins=kept)

    @property
    def is_shorter(self) -> bool:
        """Whether it was begun with fewer rounds than are asked for now; it can play the others still."""
        training = read_config(self.folder).get("training")
        rounds = training.get("rounds") if isinstance(training, Mapping) else None
        return isinstance(rounds, int) and rounds < self.experiment.training.rounds

    @property
    def is_done(self) -> bool:
        """Whether it was played to its end."""
        return self.begun and not self.is_shorter and self._finished()

    def job(self, data: Data, split: Split) -> RunJob:
        """The run as a job for another process."""
        built = self.experiment.build(data, split)
        recipe = ExperimentRecipe.of(self.experiment, built, Experiment.of_file)
        return RunJob(self.label, self.folder.resolve(), recipe, _finish)

    def finish(self, data: Data, split: Split, watch: Watch, skip: Skip) -> RunResult:
        """Run it, go on with it (also to more rounds than it had), or skip it if it is finished."""
        if not self.begun:
            self._clear()
            return run(self.experiment, out=self.folder, watcher=watch(self.label), given=(data, split))
        rounds = self.experiment.training.rounds if self.is_shorter else None
        if self._finished():
            skip(f"{self.label}: finished before, taken from {self.folder}")
            federation = settled(self.as_begun, self.folder).build(data, split)
            result = RunResult(self.folder, self._summary(), _remake=remaking(federation))
            self._check_log(result)
            return result
        here = self.as_begun
        given = not here.portable or bool(reach(to_values(here), {}))
        own = settled(here, self.folder) if given else None
        return go_on(self.folder, rounds, watch(self.label), experiment=own, compared=True)

    def _check_log(self, result: RunResult) -> None:
        try:
            result.check_log()
        except RunError as error:
            raise RunError(f"{error}; or remove {self.folder}, and potluck compare runs it again") from error

    def _clear(self) -> None:
        """Remove what is left of a run that was stopped before its first round."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir() or not RunFolder(self.folder).is_shell():
            raise RunError(f"{self.folder} is not a run folder; move it out of the way")
        shutil.rmtree(self.folder)

    def check_same(self, data: Data, split: Split) -> None:
        """Refuse a run that was made with other settings, on other data or from other models.

        Only its rounds may have been fewer.
        """
        about = RunFolder(self.folder).about(
            f"put a whole copy of it back, or remove {self.folder}, which is then run again"
        )
        check_version(self.folder, about)
        experiment = settled(self.as_begun, self.folder)
        for one in changes_since(read_config(self.folder), experiment):
            if not is_free(one) and not (self.is_shorter and one.key == ROUNDS):
                raise RunError(
                    f"{self.folder} was run with other settings ({one}); {_of_longer(one)}"
                    "choose another folder with --out (in Python out=…), or remove that one"
                )
        check_own_code(self.folder, experiment, about["code"])
        check_fetched_files(self.folder, to_values(experiment), about.get("fetched", {}))
        self._check_content(about, data, split)

    def _check_content(self, about: Mapping[str, Any], data: Data, split: Split) -> None:
        """Refuse other data under the same name, and other models of the same class."""
        federation = self.experiment.build(data, split)
        known = {key: about[key] for key in ("data", "public") if key in about}
        origins = {} if self.experiment.portable else federation.clients.fingerprints()
        pairs = {"data": (known, data_facts(federation)), "models": (about["origins"], origins)}
        for what, (there, now) in pairs.items():
            if there != now:
                raise RunError(
                    f"{self.folder} was run with other {what} than are given now; choose another folder "
                    "with --out (in Python out=…), or remove that one"
                )

    def _finished(self) -> bool:
        """Whether it has its report and a summary of all rounds; one that is damaged is written anew at its end."""
        try:
            rounds = self._summary()["rounds"]
        except RunError:
            return False
        return bool(rounds == self.experiment.training.rounds) and (self.folder / "report.html").exists()

    def _summary(self) -> dict[str, Any]:
        return read_summary(self.folder, "the same call")


def _of_longer(one: Difference) -> str:
    """How to compare a run that has more rounds than are asked for, for a sentence; else nothing."""
    if one.key != ROUNDS:
        return ""
    return (
        f"compare with training.rounds={one.there}, which has its scores after round {one.here} too: --rounds "
        f"{one.here} (in Python rounds=[{one.here}]), or "
    )
