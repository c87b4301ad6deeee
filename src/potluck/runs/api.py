"""`potluck.run` and `potluck.resume`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.core.dataset import Data
from potluck.data import Split
from potluck.engine.evaluation.checks import check_evaluation
from potluck.engine.factory import check_engine, player
from potluck.engine.store.budget import check_memory
from potluck.errors import ConfigError, RoundFailed, RunError, StoppedComplete, check_path
from potluck.experiment.build import check_data_here
from potluck.experiment.export import to_values
from potluck.experiment.overrides import Override
from potluck.experiment.schema import Experiment, also_loading, with_plugins
from potluck.federation.federation import Federation
from potluck.files import write_json, write_whole
from potluck.front_door import front_door
from potluck.plugins import listed
from potluck.report.again import to_go_on
from potluck.report.log import CONTRACT
from potluck.runs import pilots
from potluck.runs.environment import check_texts, contract_text, environment
from potluck.runs.folder import RunFolder
from potluck.runs.kept_models.keeping import check_keep
from potluck.runs.loop import Interrupted, Run
from potluck.runs.observers import Observer, Observers
from potluck.runs.observers.board import on_board
from potluck.runs.observers.progress import progress_display
from potluck.runs.observers.stopping import check_observers, check_rules
from potluck.runs.observers.trackers import check_trackers
from potluck.runs.results.run_result import RunResult
from potluck.runs.resuming import Past


@front_door(apart=("experiment", "out", "watcher"))
def run(
    experiment: Experiment | Path | str | None = None,
    /,
    *,
    out: Path | str | None = None,
    watcher: Observer | None = None,
    observers: Sequence[Observer] = (),
    given: tuple[Data, Split] | None = None,
    progress: bool | None = None,
    **values: Any,
) -> RunResult:
    """Run an experiment: a ready one, that of a file, or one made of the keyword values.

    `out` is the run folder, which must not exist; default `runs/<name>`, or the next free `runs/<name>-2`.
    `progress` shows how far it is, unless False or `POTLUCK_PROGRESS=0`; advice is then a `PotluckAdvice` warning.
    `observers` are told how the run goes (see `potluck.Observer`); `watcher` is one more, told first, in place of
    the progress display. `given` is data and split that were made before, so that several runs can share them.
    Beside an experiment or a file only `plugins` may be given: files or modules that register methods, models or
    data sets of your own.
    """
    check_observers(observers)
    _check_watcher(watcher)
    _check_out(out)
    if given is not None and not (isinstance(given, tuple | list) and len(given) == 2):
        raise ConfigError(f"given: give data and split as (data, split), not a {type(given).__name__}")
    experiment = _ready(_asked(experiment, values))
    built = experiment.build(*(given or (None, None)))
    check_evaluation(experiment.evaluate, built)
    check_rules(observers, experiment.evaluate, built)
    check_keep(experiment, built)
    check_memory(experiment.engine.memory_bytes(), built.clients)
    check_trackers(experiment.track)
    wanted = Path(out) if out is not None else Path("runs") / experiment.name
    check_texts(to_values(experiment))
    folder = RunFolder.create(wanted, exact=out is not None)
    with (
        _begun_here(folder),
        _cleared(folder),
        _told(folder, experiment, watcher, observers, progress, fresh=True) as told,
    ):
        if given is None and experiment.public is not None and not built.method.needs_public_data:
            told.advise(f"public: {built.method.name} uses no public data, so these samples change nothing")
        experiment, built = _tuned(experiment, built, folder, told)
        write_start(folder, experiment, built)
        return _play(experiment, folder, built, told)


def _check_watcher(watcher: Any) -> None:
    if watcher is not None and not isinstance(watcher, Observer):
        raise ConfigError(f"watcher: give an observer, made by a class of potluck.Observer, not {watcher!r}")


def _check_folder(folder: Any) -> None:
    if isinstance(folder, RunResult):
        raise ConfigError("resume() takes the folder of a run; give result.folder")
    check_path("folder", folder)


def _check_out(out: Any) -> None:
    """Refuse what is no path, and a place that is taken by something else than a run."""
    if out is not None and not isinstance(out, str | Path):
        raise ConfigError(f"out: give the path of a folder, not {out!r}")
    if out is not None and not str(out).strip():
        raise ConfigError("out is empty: name a folder, or leave it out")
    if out is not None and Path(out).exists():
        RunFolder.taken_over(Path(out))


def _asked(experiment: Experiment | Path | str | None, values: Mapping[str, Any]) -> Experiment:
    """The experiment that `run` is given, or that of the keyword values."""
    if experiment is None:
        _refuse_seeds(values.get("seeds"))
        return Experiment.make(**values)
    check_experiment("run", experiment, {key: value for key, value in values.items() if key != "plugins"})
    plugins = listed(values.get("plugins", ()))
    if isinstance(experiment, Experiment):
        return also_loading(experiment, plugins)
    return Experiment.load(experiment, with_plugins(experiment, (), plugins))


def _refuse_seeds(seeds: Any) -> None:
    """A run has one seed; a list of them is meant for a comparison."""
    if isinstance(seeds, int | list | tuple):
        raise ConfigError(
            "run() takes one seed, seed=1; for several call potluck.compare(…, seeds=[0, 1, 2])"
        )


def check_experiment(who: str, experiment: Any, values: Mapping[str, Any]) -> None:
    """Refuse what is neither an experiment nor the path of a file, and values beside it."""
    if isinstance(experiment, Mapping):
        how = "experiment=Experiment.make(**values)" if who == "resume" else f"{who}(**values)"
        raise ConfigError(f"{who}() takes no mapping; write {how}")
    if not isinstance(experiment, Experiment | Path | str):
        kind = type(experiment).__name__
        raise ConfigError(
            f"{who}() takes no {kind}; give an Experiment, the path of a file or keyword values"
        )
    if values:
        raise ConfigError(
            f"{who}() of a ready experiment takes no {next(iter(values))!r}; load it with other values first: "
            "Experiment.load(path, ['training.rounds=5']), or change it with Experiment.variant"
        )


@contextlib.contextmanager
def _told(
    folder: RunFolder,
    experiment: Experiment,
    watcher: Observer | None,
    observers: Sequence[Observer],
    progress: bool | None,
    fresh: bool,
) -> Iterator[Observer]:
    """All observers of a run as one: its board, what shows it to the user, then the others."""
    name, method = experiment.name, experiment.method.name
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(on_board(folder, name, method, experiment.training.rounds, fresh))
        if watcher is None:
            watcher = stack.enter_context(progress_display(progress)).watch(method)
        yield Observers(board, watcher, *observers)


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
        quiet = Observer()
        return run(pilot, out=place, given=(federation.data, federation.split), watcher=quiet).folder

    try:
        choice = pilots.tune(experiment, option, play, watcher.notice)
    except BaseException as error:
        # The run has not begun, so the same command can try again.
        shutil.rmtree(folder.path, ignore_errors=True)
        if isinstance(error, Interrupted | StoppedComplete):
            raise KeyboardInterrupt(f"stopped while {option.name} was chosen") from error
        if isinstance(error, RoundFailed):  # drop its hint to resume: the folder is gone
            raise RoundFailed(f"{error.__cause__ or error} (while {option.name} was chosen)") from error
        raise
    shutil.rmtree(home)
    write_json(folder / pilots.FILE, choice)
    chosen = pilots.settled(experiment, folder.path)
    return chosen, chosen.build(federation.data, federation.split)


@contextlib.contextmanager
def _begun_here(folder: RunFolder) -> Iterator[None]:
    """Lock a new folder; refused if another process has begun a run in it since it was made."""
    with folder.locked():
        RunFolder.taken_over(folder.path)
        yield


@contextlib.contextmanager
def _cleared(folder: RunFolder) -> Iterator[None]:
    """Remove a folder that was stopped before its run began, so that the same command can begin it again."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.path.is_dir() and folder.is_shell():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def write_start(folder: RunFolder, experiment: Experiment, federation: Federation) -> None:
    """Write what a run folder holds from the start; the configuration last, as the sign that all is there."""
    federation.save_split(folder / "split.json")
    write_whole(folder / CONTRACT, contract_text(federation))
    write_json(folder / "environment.json", environment(experiment, federation))
    write_whole(folder / "config.yaml", experiment.to_yaml().encode())


@front_door(apart=("experiment", "folder", "watcher"))
def resume(
    folder: Path | str,
    *,
    rounds: int | None = None,
    watcher: Observer | None = None,
    observers: Sequence[Observer] = (),
    experiment: Experiment | None = None,
    overrides: Sequence[Override] = (),
    trust: bool = False,
    progress: bool | None = None,
    from_round: int | None = None,
) -> RunResult:
    """Go on with a run after its last checkpoint, to the same end as if it had never stopped.

    `rounds` extends it, also when it is finished: the logs are then those of a run that had as many rounds from the
    start. A run that was made from Python with one's own models or data needs the same `experiment` again; any
    other goes on with what its folder says, with `overrides` applied. A setting that would change a number is
    refused and named; where the work is done may change, and the folder records it. `trust` lets a folder of
    somebody else run the code it names. `from_round` goes back to the checkpoint of an earlier round, of which the
    last three are kept; 0 is the start. The rounds after it are trained again. `watcher`, `observers` and
    `progress` as in `run`.

    A run of a comparison gets more rounds by `potluck.compare`, which extends all of its runs.
    """
    check_observers(observers)
    _check_watcher(watcher)
    _check_folder(folder)
    if experiment is not None:
        check_experiment("resume", experiment, {})
    if isinstance(experiment, Path | str):
        raise ConfigError(f"resume() takes an Experiment: experiment=Experiment.load({str(experiment)!r})")
    return go_on(Path(folder), rounds, watcher, observers, experiment, overrides, trust, progress, from_round)


def go_on(
    folder: Path,
    rounds: int | None = None,
    watcher: Observer | None = None,
    observers: Sequence[Observer] = (),
    experiment: Experiment | None = None,
    overrides: Sequence[Override] = (),
    trust: bool = False,
    progress: bool | None = None,
    from_round: int | None = None,
    compared: bool = False,
) -> RunResult:
    """Go on with a run as `resume` does; `compared` also extends one of a comparison, as all of it is extended."""
    home = RunFolder.begun(folder)
    with home.locked():  # before anything is read that another process may be about to change
        past = Past.read(home, from_round)
        given = experiment if experiment is not None else past.experiment(overrides, rounds, trust)
        experiment = _ready(past.going_on(given, rounds, compared))
        check_data_here(experiment)
        check_trackers(experiment.track)
        past.check_saved()
        with _told(home, experiment, watcher, observers, progress, fresh=False) as told:
            federation = experiment.build(split=past.split())
            check_evaluation(experiment.evaluate, federation)
            check_keep(experiment, federation)
            check_memory(experiment.engine.memory_bytes(), federation.clients)
            past.check(experiment, federation)
            check_rules(observers, experiment.evaluate, federation)
            return _play(experiment, home, federation, told, past)


def _ready(experiment: Experiment) -> Experiment:
    """The experiment as its engine plays it; refused if the engine is not installed."""
    check_engine(experiment.engine)
    own = player(experiment.engine.name)
    ready: Experiment = experiment if own is None else own.ready(experiment)
    return ready


def _play(
    experiment: Experiment,
    folder: RunFolder,
    federation: Federation,
    watcher: Observer,
    past: Past | None = None,
) -> RunResult:
    """Play a run whose folder is begun, from its start or from the last checkpoint of its past."""
    own = player(experiment.engine.name)
    if own is not None:
        if past is not None and past.from_round is not None:
            raise RunError(
                f"{folder.path} cannot go back to round {past.from_round}: clients of "
                f"{experiment.engine.name} keep their own states; start a new run"
            )
        if past is not None:
            past.record(experiment, federation)
        result: RunResult = own.play(experiment, folder, federation, watcher, fresh=past is None)
        return result
    try:
        going = Run(experiment, folder, federation, watcher)
    except KeyboardInterrupt as error:
        raise Interrupted(folder.path, to_go_on(folder.path, experiment.portable)) from error
    except ConfigError:  # its engine cannot be made, so the same command can try again
        if past is None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    if past is not None:
        going.restore(lambda: past.record(experiment, federation), past.from_round)
    return going.play()
