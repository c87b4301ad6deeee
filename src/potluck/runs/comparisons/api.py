"""`potluck.compare`: methods, variants and sweeps side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.experiment.overrides import as_overrides
from potluck.experiment.plain import plain
from potluck.experiment.schema import Experiment, also_loading, with_plugins
from potluck.front_door import front_door
from potluck.plugins import listed
from potluck.report.chosen_rounds import check_rounds
from potluck.report.comparison import check_view
from potluck.report.log import View
from potluck.runs.api import check_experiment
from potluck.runs.comparisons.comparison import Comparison, Sweep, is_sweep
from potluck.runs.comparisons.plan import Plan, check_sweep, plan_of, read_sweep, refuse_idle_method
from potluck.runs.comparisons.play import Skip, Watch, compare_experiments, make_folder
from potluck.runs.comparisons.references import check_reference
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted
from potluck.runs.observers.progress import progress_display

MANY_SEEDS = 20  # more than anybody writes as a number of seeds
NOT_TAKEN = {
    "observers": "an observer that stops a run early would make the runs unlike; give it to potluck.run",
    "target": "give a list, targets=[0.9]",
    "round": "give a list, rounds=[10]",
}


@front_door(apart=("experiment", "plugins"))
def compare(
    experiment: Experiment | Path | str | None = None,
    /,
    *,
    methods: Sequence[str | Mapping[str, Any]] = (),
    seeds: Sequence[int] | None = None,
    out: Path | str | None = None,
    variants: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[Path | str] = (),
    against: str | None = None,
    targets: Sequence[float] = (),
    rounds: Sequence[int] = (),
    view: View = "last",
    progress: bool | None = None,
    **values: Any,
) -> Comparison | Sweep:
    """Run methods or variants side by side, each paired with Local with the same training settings.

    `experiment` is a ready one, the path of a file, or left out: then the keyword values make one, as in
    `potluck.run`. `methods` are names, or blocks with a name and options. `variants` and `sweep` are written as in
    a file. `seeds` default to the experiment's own, `out` to `runs/<name>-compare`. The same call again takes
    finished runs from the folder and goes on with stopped ones. `overrides` (`training.rounds=5`) are for files.
    `plugins` are files or modules that register methods, models or data sets of your own; a file may name more.
    `progress` shows how far it is, as in `potluck.run`.

    The rest are views of the same runs, and train nothing again:

    - `against`: the method or variant to take all differences to, instead of Local under the same settings.
    - `targets`: scores such as 0.9; `found.targets()` and the tables then say which round first reached each, and
      what was sent until then.
    - `rounds`: rounds that are evaluated; `found.rounds()` and the tables then have the scores after each.
    - `view`: the round that all tables look at: the `last` one, that with the best mean validation score
      (`best_by_validation`), or with the best test score (`best_by_test`, an upper bound and no result).
    """
    for name, hint in NOT_TAKEN.items():
        if name in values:
            raise ConfigError(f"compare() takes no {name!r}; {hint}")
    _check_views(() if seeds is None else seeds, targets, rounds, view)
    plan = _planned(experiment, methods, variants, sweep, overrides, listed(plugins), values)
    folder = Path(out) if out is not None else default_folder(plan)
    options = {"targets": targets, "rounds": rounds, "against": against, "view": view}
    played = [plan.first.seed] if seeds is None else distinct("seeds", seeds)
    with progress_display(progress, len(played) * plan.size) as display, _stopped_whole(folder):
        return play(plan, played, folder, display.watch, display.skip, **options)


@contextlib.contextmanager
def _stopped_whole(folder: Path) -> Iterator[None]:
    """Ctrl-C stops the comparison, not only the run it was at: say how all of it goes on."""
    try:
        yield
    except KeyboardInterrupt as error:
        onward = f"call potluck.compare again with the same arguments and out={str(folder)!r}"
        raise Interrupted(folder, onward) from error


def _planned(
    experiment: Experiment | Path | str | None,
    methods: Sequence[Any],
    variants: Mapping[str, Any] | None,
    sweep: Mapping[str, Any] | None,
    overrides: Sequence[str],
    plugins: Sequence[str],
    values: Mapping[str, Any],
) -> Plan:
    if experiment is not None:
        check_experiment("compare", experiment, values)
    _check_methods(methods, variants)
    overrides = as_overrides(overrides)
    if isinstance(experiment, Path | str):
        overrides = with_plugins(experiment, overrides, plugins)
        return read_sweep(experiment, methods, overrides, variants, sweep)
    if overrides:
        raise ConfigError("overrides are for experiment files; give an experiment made in Python its values")
    if experiment is None:
        if not methods and not variants and values.get("method") is None:
            raise ConfigError(
                "compare() is given no method; name some to compare, methods=['fedavg', 'fedproto']"
            )
        own = {"plugins": plugins} if plugins else {}
        experiment = Experiment.make(**({"method": methods[0] if methods else "local"} | own | dict(values)))
        refuse_idle_method(values.get("method"), methods, variants)
    else:
        experiment = also_loading(experiment, plugins)
    return plan_of(experiment, methods, variants, sweep)


def _check_methods(methods: Any, variants: Any) -> None:
    """Refuse methods that are no list, and methods beside variants: only one of the two says what is compared."""
    if isinstance(methods, str):
        raise ConfigError(f"methods: give a list, [{methods!r}]")
    if not isinstance(methods, Sequence):
        raise ConfigError(
            f"methods: give a list such as ['fedproto', {{'name': 'fedmrl', 'd1': 16}}], not {methods!r}; methods "
            "with labels go under variants"
        )
    if methods and variants:
        raise ConfigError(
            "give methods or variants, not both; a method is a variant too: "
            "variants={'fedproto': {'method': 'fedproto'}}"
        )


def _check_views(seeds: Any, targets: Any, rounds: Any, view: str) -> None:
    """Refuse what is no list of numbers, or no view, before anything runs."""
    for key, given, kind in (
        ("seeds", seeds, Integral),
        ("rounds", rounds, Integral),
        ("targets", targets, Real),
    ):
        if isinstance(given, int | float | str):
            raise ConfigError(f"{key}: give a list, {key}=[{_listed(given)}]{_meant(key, given)}")
        if not isinstance(given, Iterable):
            raise ConfigError(f"{key}: give a list of numbers, not {given!r}")
        wrong = [one for one in given if isinstance(one, bool) or not isinstance(one, kind)]
        if wrong:
            whole = "whole " if kind is Integral else ""
            raise ConfigError(f"{key}: {wrong[0]!r} is not a {whole}number; give {whole}numbers")
    check_view(view)


def _meant(key: str, given: Any) -> str:
    """Who writes `seeds=3` may mean three of them."""
    several = key == "seeds" and type(given) is int and 1 < given <= MANY_SEEDS
    return f", or for {given} seeds {key}={list(range(given))}" if several else ""


def _listed(given: float | str) -> str:
    """What stands in the list that was meant: `0, 1` for `"0,1"`."""
    return ", ".join(given.replace(",", " ").split()) if isinstance(given, str) else repr(given)


def distinct(key: str, seeds: Iterable[int]) -> list[int]:
    """Some seeds, each named once: a comparison of `0, 0` would look like one of two seeds, and be one of one."""
    listed = list(seeds)
    if not listed:
        raise ConfigError(f"{key} is empty; leave it out, or name some")
    twice = next((seed for seed in listed if listed.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"{key}: {twice} is named twice; name each seed once")
    return listed


def default_folder(plan: Plan) -> Path:
    """Where a comparison goes unless another folder is named."""
    return Path("runs") / f"{plan.first.name}-compare"


def check_views(plan: Plan, rounds: Sequence[int], against: str | None) -> None:
    """Refuse views of a comparison that some setting cannot give, before anything runs."""
    for setting, experiments in plan.experiments.items():
        check_reference(against, experiments)
        for label, one in experiments.items():
            who = f"{setting}, {label}" if setting else label
            check_rounds(rounds, one.training.rounds, one.evaluate.every, who)


@dataclass
class _Counted:
    """Tells of each run its number and, in a sweep, its setting: `run 7 of 18, alpha=0.1: fedproto, seed 1`."""

    show: Watch
    say: Skip
    runs: int
    begun: int = 0

    def watch(self, setting: str) -> Watch:
        """Watch a run of this setting."""
        return lambda label: self.show(self._named(setting, label))

    def skip(self, setting: str) -> Skip:
        """Say that a run of this setting was finished before."""
        return lambda sentence: self.say(self._named(setting, sentence))

    def _named(self, setting: str, rest: str) -> str:
        self.begun += 1
        if not setting:
            return rest
        return f"run {self.begun} of {self.runs}, {setting}: {rest}"


def play(
    plan: Plan, seeds: Sequence[int], folder: Path, watch: Watch, skip: Skip, **options: Any
) -> Comparison | Sweep:
    """Run what is left of a plan, and compare; `options` are the views that `compare` takes."""
    check_view(options.get("view", "last"))
    check_views(plan, options.get("rounds") or (), options.get("against"))
    if len(plan.experiments) > 1:
        check_sweep(plan.experiments)
    told = _Counted(watch, skip, len(seeds) * plan.size)

    def compared(setting: str) -> Comparison:
        return compare_experiments(
            plan.experiments[setting],
            seeds,
            folder / setting,
            told.watch(setting),
            told.skip(setting),
            variants=plan.variants,
            base=plan.bases[setting],
            **options,
        )

    if not plan.is_sweep:
        return compared("")
    make_folder(folder, "sweep", lambda names: is_sweep(folder, plan.experiments))
    with RunFolder(folder).locked():
        found = {setting: compared(setting) for setting in plan.experiments}
        whole = Sweep(folder, plan.first.name, plain(plan.settings), found)
        whole.write()
    return whole
