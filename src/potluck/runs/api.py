"""`potluck.run` and `potluck.resume`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from potluck.core.dataset import Data
from potluck.data import Split
from potluck.engine.evaluate import check_modes
from potluck.engine.factory import player
from potluck.engine.store.budget import check_memory
from potluck.errors import RoundFailed, RunError
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.federation.federation import Federation
from potluck.files import read_json, write_json, write_whole
from potluck.runs import pilots
from potluck.runs.environment import check_version, environment
from potluck.runs.folder import RunFolder
from potluck.runs.kept_models import check_keep
from potluck.runs.loop import Interrupted, Run
from potluck.runs.observers import Observer, Observers
from potluck.runs.result import RunResult


def run(
    experiment: Experiment | None = None,
    /,
    *,
    out: Path | str | None = None,
    watcher: Observer | None = None,
    observers: Sequence[Observer] = (),
    given: tuple[Data, Split] | None = None,
    **values: Any,
) -> RunResult:
    """Run an experiment: a ready one, or one made of the keyword values.

    `out` is the run folder, which must not exist; default `runs/<name>`, or the next free `runs/<name>-2`.
    `observers` are told how the run goes (see `potluck.Observer`); `watcher` is one more, told first. `given` is
    data and split that were made before, so that several runs can share them.
    """
    if experiment is not None and values:
        raise TypeError(
            f"run() of a ready experiment takes no {next(iter(values))!r}; see Experiment.variant"
        )
    experiment = experiment if experiment is not None else Experiment.make(**values)
    experiment = _ready(experiment)
    built = experiment.build(*(given or (None, None)))
    check_modes(experiment.evaluate, built.method)
    check_keep(experiment, built)
    check_memory(experiment.engine.memory_bytes(), built.clients)
    wanted = Path(out) if out is not None else Path("runs") / experiment.name
    folder = RunFolder.create(wanted, exact=out is not None)
    told = _together(watcher, observers)
    with folder.locked():
        experiment, built = _tuned(experiment, built, folder, told)
        write_start(folder, experiment, built)
        return _play(experiment, folder, built, told, fresh=True)


def _together(watcher: Observer | None, observers: Sequence[Observer]) -> Observer:
    return Observers(*([] if watcher is None else [watcher]), *observers)


def _tuned(
    experiment: Experiment, federation: Federation, folder: RunFolder, watcher: Observer
) -> tuple[Experiment, Federation]:
    """Choose the option that the method leaves open, by pilot runs that are removed afterwards."""
    option = federation.method.open_option(federation.population)
    if option is None:
        return experiment, federation
    home = folder / pilots.PILOTS

    def play(pilot: Experiment) -> Path:
        place = home / str(getattr(pilot.method, option.name))
        return run(pilot, out=place, given=(federation.data, federation.split)).folder

    try:
        choice = pilots.tune(experiment, option, play, watcher.notice)
    except BaseException as error:
        shutil.rmtree(
            folder.path, ignore_errors=True
        )  # the run has not begun, so the same command can try again
        if isinstance(error, Interrupted):
            raise KeyboardInterrupt(f"stopped while {option.name} was chosen") from error
        if isinstance(error, RoundFailed):  # drop its hint to resume: the folder is gone
            raise RoundFailed(f"{error.__cause__ or error} (while {option.name} was chosen)") from error
        raise
    shutil.rmtree(home)
    write_json(folder / pilots.FILE, choice)
    chosen = pilots.settled(experiment, folder.path)
    return chosen, chosen.build(federation.data, federation.split)


def write_start(folder: RunFolder, experiment: Experiment, federation: Federation) -> None:
    """Write what a run folder holds from the start; the configuration last, as the sign that all is there."""
    federation.save_split(folder / "split.json")
    write_json(folder / "contract.json", explain(federation))
    write_json(folder / "environment.json", environment(experiment, federation))
    write_whole(folder / "config.yaml", experiment.to_yaml().encode())


def resume(
    folder: Path | str,
    *,
    watcher: Observer | None = None,
    observers: Sequence[Observer] = (),
    experiment: Experiment | None = None,
) -> RunResult:
    """Go on with a run after its last checkpoint, to the same end as if it had never stopped.

    A run that was made from Python with one's own models or data needs the same `experiment` again. `watcher` and
    `observers` as in `run`.
    """
    home = RunFolder(Path(folder))
    if not home.path.is_dir():
        raise RunError(f"there is no run folder {home.path}")
    about = read_json(home / "environment.json")
    check_version(home.path, about)
    if experiment is None:
        if not about["portable"]:
            raise RunError(
                f"{home.path} was run from Python with models or data of its own; "
                "resume it there: potluck.resume(folder, experiment=…)"
            )
        experiment = Experiment.load(home / "config.yaml")
    experiment = _ready(pilots.settled(experiment, home.path))
    with home.locked():
        federation = experiment.build(split=Split.load(home / "split.json"))
        check_modes(experiment.evaluate, federation.method)
        check_memory(experiment.engine.memory_bytes(), federation.clients)
        if about["origins"] and about["origins"] != federation.clients.fingerprints():
            raise RunError(f"the models given now start from other weights than those {home.path} began with")
        return _play(experiment, home, federation, _together(watcher, observers), fresh=False)


def _ready(experiment: Experiment) -> Experiment:
    """The experiment as its engine plays it; refused if the engine is not installed."""
    own = player(experiment.engine.name)
    ready: Experiment = experiment if own is None else own.ready(experiment)
    return ready


def _play(
    experiment: Experiment, folder: RunFolder, federation: Federation, watcher: Observer, fresh: bool
) -> RunResult:
    """Play a run whose folder is begun, from its start or from its last checkpoint."""
    own = player(experiment.engine.name)
    if own is not None:
        result: RunResult = own.play(experiment, folder, federation, watcher, fresh)
        return result
    going = Run(experiment, folder, federation, watcher)
    if not fresh:
        going.checkpoints.restore()
    return going.play()
