"""Comparisons: several methods on the same split, initial models, cohorts and order of batches.

The folder of a comparison has one run folder per method and seed, `comparison.json` and `comparison.html`. The
same command again skips runs that are finished and resumes those that were stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from potluck.core.dataset import Data
from potluck.core.rng import Rng
from potluck.data import Split
from potluck.engine.evaluate import check_evaluation, judged_by
from potluck.errors import ConfigError, RunError
from potluck.experiment.differences import differences
from potluck.experiment.export import to_values
from potluck.experiment.overrides import apply_override, read_yaml
from potluck.experiment.plain import plain
from potluck.experiment.schema import Experiment
from potluck.files import read_json, write_json, write_whole
from potluck.methods.registry import method_names
from potluck.plugins import load_plugin
from potluck.report.chosen_rounds import check_rounds, with_rounds
from potluck.report.comparison import compare_runs
from potluck.report.comparison_page import write_comparison
from potluck.report.log import View, read_config
from potluck.report.targets import check_targets, with_targets
from potluck.runs.api import resume, run
from potluck.runs.comparisons.comparison import COMPARISON, MARK, Comparison
from potluck.runs.comparisons.comparison import open_comparison as open_comparison
from potluck.runs.comparisons.references import BASELINE, check_reference, references, with_locals
from potluck.runs.environment import check_version, data_facts
from potluck.runs.folder import RunFolder
from potluck.runs.observers import Observer
from potluck.runs.own_code import check_own_code
from potluck.runs.pilots import PILOTS, settled
from potluck.runs.resuming import is_free

# What a run may leave behind that was stopped before its first round.
START = ("split.json", "contract.json", "environment.json", "tuning.json", ".lock")

Watch = Callable[[str], Observer]
Skip = Callable[[str], None]


def experiments_by_method(
    path: Path | str, methods: Sequence[str], overrides: Sequence[str] = ()
) -> dict[str, Experiment]:
    """The experiment of a file under several methods.

    The method that the file names keeps its options, the others have their defaults. An override such as
    `fedmrl.d1=50` sets an option of one method, any other override applies to all.
    """
    load_plugins(path, overrides)
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


def load_plugins(path: Path | str, overrides: Sequence[str]) -> None:
    """Load what a file names under `plugins`, so that the command line can name its methods."""
    values: dict[str, Any] = {"plugins": read_yaml(Path(path)).get("plugins")}
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] == "plugins":
            apply_override(values, override)
    for plugin in values["plugins"] or ():
        load_plugin(str(plugin), Path(path).resolve().parent)


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
    view: View = "last",
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Comparison:
    """Run every experiment with every seed into `folder`, or what is left to run, and compare with Local.

    The keys of `experiments` are methods, or labels where one method appears with several settings. Each is paired
    with Local under the same settings of training, which is added where it is missing. `watch` makes the observer
    of a run from its label; `skip` is told of runs that were finished before. `targets` asks what it costs to reach
    these scores, `rounds` for the scores after these rounds. `against` names what to compare with instead of
    Local. `variants` has what each label changes, for the page.
    """
    experiments = with_locals(experiments)
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
        comparison = compare_runs(
            folders,
            Rng(first.seed, ("compare",)),
            baseline=against or BASELINE,
            references=dict.fromkeys(experiments, against) if against else references(experiments),
            view=view,
        )
        if targets:
            comparison = with_targets(comparison, folders, targets)
        if rounds:
            comparison = with_rounds(comparison, folders, rounds)
        changes = {label: each for label, each in (variants or {}).items() if label in experiments}
        comparison |= {"variants": plain(changes)} if changes else {}
        write_json(home / COMPARISON, comparison)
        write_comparison(home / "comparison.html", comparison)
    return Comparison(home.path, comparison)


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
        self._check_same(data, split)
        if self._finished():
            skip(f"{self.label}: finished before, taken from {self.folder}")
        else:
            own = None if self.experiment.portable else settled(self.experiment, self.folder)
            resume(self.folder, watcher=watch(self.label), experiment=own)

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

    def _check_same(self, data: Data, split: Split) -> None:
        """Refuse a run that was made with other settings, on other data or from other models."""
        about = read_json(self.folder / "environment.json")
        check_version(self.folder, about)
        experiment = settled(self.experiment, self.folder)
        there, wanted = read_config(self.folder), yaml.safe_load(experiment.to_yaml())
        for one in differences(there, wanted):
            if not is_free(one):
                raise RunError(
                    f"{self.folder} was run with other settings ({one}); choose another folder with --out, "
                    "or remove that one"
                )
        check_own_code(self.folder, to_values(experiment), about["code"])
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
        if not (self.folder / "report.html").exists() or not (self.folder / "summary.json").exists():
            return False
        rounds: int = read_json(self.folder / "summary.json")["rounds"]
        return rounds == self.experiment.training.rounds
