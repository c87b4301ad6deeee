"""`potluck run` and `potluck resume`."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli import completion
from potluck.cli.exits import Stopped
from potluck.cli.options import (
    AsJson,
    Debug,
    Exclude,
    ExperimentFile,
    Include,
    LogForm,
    Overrides,
    PagePort,
    PluginFiles,
    Prometheus,
    check_experiment,
    check_log,
    check_run,
)
from potluck.cli.screen import Screen
from potluck.errors import ConfigError, RunError, StoppedComplete
from potluck.report.again import to_go_on, typed

if TYPE_CHECKING:
    from potluck.runs.observers import Observer
    from potluck.runs.results.run_result import RunResult


def run(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The run folder, which must not exist. Default: runs/<name>, runs/<name>-2, …",
        ),
    ] = None,
    plugin: PluginFiles = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run an experiment."""
    check_experiment(experiment)
    from potluck.experiment import Experiment
    from potluck.experiment.overrides import read_yaml
    from potluck.experiment.schema import SEVERAL, with_plugins
    from potluck.runs.api import run as play

    screen = Screen(json)
    chosen = Experiment.load(experiment, with_plugins(experiment, overrides or (), plugin or ()))
    several = [key for key in SEVERAL if key in read_yaml(experiment)]
    if several:
        left = " and ".join(several)
        screen.err.print(f"{experiment}: {left} ignored; potluck compare runs them", soft_wrap=True)
    watched(screen, chosen.method.name, lambda watcher: play(chosen, out=out, watcher=watcher))


def resume(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The folder of a run that was stopped.", autocompletion=completion.results
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="Settings that may change, such as engine.device=cpu."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="The total number of rounds; also extends a finished run."),
    ] = None,
    from_round: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Go back to the checkpoint of round N (one of the last three; 0: the start) and continue there.",
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code that another person's folder names.")
    ] = False,
    exclude: Exclude = None,
    include: Include = None,
    prometheus: Prometheus = None,
    page: PagePort = None,
    log: LogForm = "",
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Continue a run as if it had never stopped; a federation continues as it was served."""
    check_run(run)
    from potluck.deploy.flower.resume import is_served, listed
    from potluck.runs.api import resume as go_on

    check_log(log)
    if is_served(run):
        if from_round is not None:
            raise ConfigError(
                f"--from-round: {run} is a federation, which goes on after its last checkpoint; leave it out"
            )
        return _resume_served(
            run, overrides or (), rounds, trust, listed(exclude), listed(include), prometheus, page, log, json
        )
    if exclude or include or prometheus is not None or page is not None or log:
        raise ConfigError(
            f"--exclude, --include, --prometheus, --page and --log are for federations; {run} is none, leave them "
            f"out; any run can be followed with: potluck watch {typed(run)}"
        )
    screen, finished = Screen(json), (run / "summary.json").exists()
    watched(
        screen,
        _method_of(run),
        lambda watcher: go_on(
            run,
            rounds=rounds,
            watcher=watcher,
            overrides=overrides or (),
            trust=trust,
            from_round=from_round,
        ),
    )
    if finished and rounds is None and from_round is None:
        screen.err.print("the run was finished already; --rounds N gives it more rounds", soft_wrap=True)


def _resume_served(
    run: Path,
    overrides: Sequence[str],
    rounds: int | None,
    trust: bool,
    exclude: Sequence[str],
    include: Sequence[str],
    prometheus: int | None,
    page: int | None,
    log: str,
    json: bool,
) -> None:
    """Go on with a federation, at the address and with the files that `serve` was given."""
    from potluck.deploy.flower.resume import experiment_of, method_of, read_told
    from potluck.deploy.flower.serve import serve as play

    told = read_told(run, trust)
    chosen = experiment_of(told, overrides, rounds)
    watched(
        Screen(json),
        method_of(run),
        lambda watcher: play(
            chosen, run, told.address, told.security, watcher, exclude, include, prometheus, page
        ),
        every_notice=True,
        log=log,
    )


def _method_of(run: Path) -> str:
    """What the progress lines of a run begin with; `resume` itself says what is wrong with a folder."""
    from potluck.files import read_json

    try:
        return str(read_json(run / "environment.json")["settings"]["method"]["name"])
    except (RunError, KeyError, TypeError):
        return run.name


def watched(
    screen: Screen,
    label: str,
    play: Callable[[Observer], RunResult],
    every_notice: bool = False,
    log: str = "",
) -> None:
    """Play a run under a progress display, or in lines of a `log` (text or json), then print its results."""
    from potluck.runs.loop import Interrupted

    complete: list[Path] = []

    def played(watcher: Observer) -> RunResult:
        return play(_with_end(watcher, complete.append))

    try:
        result = played(_lines(log)) if log else _displayed(screen, label, played, every_notice)
        _show(screen, result)
    except KeyboardInterrupt as error:
        if complete:  # what is left is to end Flower's processes, or to print
            raise StoppedComplete(complete[0]) from error
        if isinstance(error, Interrupted):
            raise Stopped(to_go_on(error.folder, portable=True) + error.note) from error
        raise


def _show(screen: Screen, result: RunResult) -> None:
    from potluck.cli.views.results import run_sheet_of

    try:
        if screen.json:
            screen.data(result.summary | {"folder": str(result.folder)})
        else:
            screen.sheet(run_sheet_of(result))
            screen.show(f"\nreport: {result.folder / 'report.html'}")
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise RunError(
            f"the run is complete, see {result.folder}, but its results cannot be printed: "
            f"{error.strerror or error}; check where standard output goes"
        ) from error


def _with_end(watcher: Observer, end: Callable[[Path], None]) -> Observer:
    """A watcher, and beside it what is to be called with the folder when the run is complete."""
    from potluck.runs.observers import Observer, Observers

    class End(Observer):
        def end(self, folder: Path) -> None:
            end(folder)

    return Observers(watcher, End())


def _displayed(
    screen: Screen, label: str, play: Callable[[Observer], RunResult], every_notice: bool
) -> RunResult:
    from potluck.runs.observers.progress import showing

    with showing(screen.err) as display:
        display.notices = math.inf if every_notice else display.notices
        return play(display.watch(label))


def _lines(log: str) -> Observer:
    from potluck.deploy.logs import Log
    from potluck.deploy.run_notes import LogLines

    return LogLines(Log(log == "json"))
