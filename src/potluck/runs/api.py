"""`run` and `resume`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from potluck.core.dataset import Data
from potluck.data import Split
from potluck.engine.factory import player
from potluck.engine.store.budget import check_memory
from potluck.errors import RoundFailed, RunError
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.federation.federation import Federation
from potluck.files import read_json, write_json, write_whole
from potluck.runs import pilots as tuning
from potluck.runs.environment import check_version, environment
from potluck.runs.folder import RunFolder
from potluck.runs.loop import Interrupted, Run, chosen_modes
from potluck.runs.observers import Watcher
from potluck.runs.result import RunResult


def run(
    experiment: Experiment | None = None,
    /,
    *,
    out: Path | str | None = None,
    watcher: Watcher | None = None,
    given: tuple[Data, Split] | None = None,
    **values: Any,
) -> RunResult:
    """Run an experiment: a ready one, or one made of the keyword values.

    `out` is the run folder, which must not exist; default `runs/<name>`, or the next free `runs/<name>-2`.
    """
    if experiment is not None and values:
        raise TypeError(
            f"run() of a ready experiment takes no {next(iter(values))!r}; see Experiment.variant"
        )
    experiment = experiment if experiment is not None else Experiment.make(**values)
    experiment = _ready(experiment)
    built = experiment.build(*(given or (None, None)))
    chosen_modes(experiment, built.method.modes)
    check_memory(experiment.engine.memory_bytes(), built.clients)
    wanted = Path(out) if out is not None else Path("runs") / experiment.name
    folder = RunFolder.create(wanted, exact=out is not None)
    with folder.locked():
        experiment, built = _tuned(experiment, built, folder, watcher or Watcher())
        write_start(folder, experiment, built)
        return _play(experiment, folder, built, watcher, fresh=True)


def _tuned(
    experiment: Experiment, federation: Federation, folder: RunFolder, watcher: Watcher
) -> tuple[Experiment, Federation]:
    """The experiment with the option its method left open chosen, by pilot runs that are thrown away."""
    option = federation.method.open_option(federation.population)
    if option is None:
        return experiment, federation
    pilots = folder / tuning.PILOTS

    def play(pilot: Experiment) -> Path:
        place = pilots / str(getattr(pilot.method, option.name))
        return run(pilot, out=place, given=(federation.data, federation.split)).folder

    try:
        choice = tuning.tune(experiment, option, play, watcher.notice)
    except BaseException as error:
        shutil.rmtree(folder.path, ignore_errors=True)  # nothing has begun: the same command may try again
        if isinstance(error, Interrupted):
            raise KeyboardInterrupt(f"stopped while {option.name} was chosen") from error
        if isinstance(error, RoundFailed):  # there is nothing left to resume
            raise RoundFailed(f"{error.__cause__ or error} (while {option.name} was chosen)") from error
        raise
    shutil.rmtree(pilots)
    write_json(folder / tuning.FILE, choice)
    chosen = tuning.settled(experiment, folder.path)
    return chosen, chosen.build(federation.data, federation.split)


def write_start(folder: RunFolder, experiment: Experiment, federation: Federation) -> None:
    """What a run folder holds from the start; the configuration last, as the sign that all is there."""
    federation.save_split(folder / "split.json")
    write_json(folder / "contract.json", explain(federation))
    write_json(folder / "environment.json", environment(experiment, federation))
    write_whole(folder / "config.yaml", experiment.to_yaml().encode())


def resume(
    folder: Path | str, *, watcher: Watcher | None = None, experiment: Experiment | None = None
) -> RunResult:
    """Go on with a run after its last checkpoint, to the same end as if it had never stopped.

    A run made from Python with models or data of one's own needs the same `experiment` again.
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
    experiment = _ready(tuning.settled(experiment, home.path))
    with home.locked():
        federation = experiment.build(split=Split.load(home / "split.json"))
        check_memory(experiment.engine.memory_bytes(), federation.clients)
        if about["origins"] and about["origins"] != federation.clients.fingerprints():
            raise RunError(f"the models given now start from other weights than those {home.path} began with")
        return _play(experiment, home, federation, watcher, fresh=False)


def _ready(experiment: Experiment) -> Experiment:
    """The experiment as its engine runs it; an engine that is not there is refused."""
    found = player(experiment.engine.name)
    ready: Experiment = experiment if found is None else found.ready(experiment)
    return ready


def _play(
    experiment: Experiment, folder: RunFolder, federation: Federation, watcher: Watcher | None, fresh: bool
) -> RunResult:
    """Play a run whose folder is begun, from its start or from its last checkpoint."""
    found = player(experiment.engine.name)
    if found is not None:
        result: RunResult = found.play(experiment, folder, federation, watcher or Watcher(), fresh)
        return result
    going = Run(experiment, folder, federation, watcher)
    if not fresh:
        going.restore(going.checkpoints.load())
    return going.play()
