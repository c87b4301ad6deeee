"""`potluck compare`: methods, variants and sweeps side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.exits import Stopped
from potluck.cli.options import RUNS, AsJson, Debug, ExperimentFile, Overrides, words
from potluck.cli.screen import MOST_ROWS, Screen
from potluck.errors import ConfigError

if TYPE_CHECKING:
    from potluck.experiment import Experiment
    from potluck.runs.compare import ComparisonResult


def compare(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="a,b,c",
            help="The methods; Local is always among them. The one the experiment names keeps its options, the "
            "others have their defaults; fedmrl.d1=50 sets an option of one method.",
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(metavar="0,1,2", help="Default: the experiment's own seed.")] = "",
    target: Annotated[
        str,
        typer.Option(
            metavar="0.5,0.9",
            help="Scores above 0 and up to 1: show the first evaluated round whose mean reached each, and what "
            "was sent until then.",
        ),
    ] = "",
    rounds: Annotated[
        str,
        typer.Option(
            metavar="10,50,100",
            help="Rounds that are evaluated: show the scores at each, for all moments and modes measured.",
        ),
    ] = "",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="The method or variant to take differences to, then client by client too. Default: local.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write. Default: runs/<name>-compare."),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run methods side by side: same split, same private initial models, same cohorts, same batch order.

    A file may name variants to compare instead, and a sweep over settings. The same command again skips the runs
    that are finished and goes on with those that were stopped.
    """
    from potluck.runs.compare import with_baseline
    from potluck.runs.sweep import check_sweep, read_sweep

    listed, targets, at = words(methods), _scores(target), _numbers("--rounds", rounds, "10,50,100")
    settings = read_sweep(experiment, with_baseline(listed) if listed else (), overrides or ())
    _check(settings, at, against)
    first = next(one for experiments in settings.values() for one in experiments.values())
    played = _numbers("--seeds", seeds, "0,1,2") or [first.seed]
    folder, screen = out or RUNS / f"{first.name}-compare", Screen(json)
    if len(settings) > 1:
        check_sweep(settings)
    results = {
        setting: compared(screen, experiments, played, folder / setting, sys.argv[1:], targets, at, against)
        for setting, experiments in settings.items()
    }
    if json:
        shown = {name: result.comparison | {"folder": str(result.folder)} for name, result in results.items()}
        screen.data(shown.get("", shown))


def _check(
    settings: Mapping[str, Mapping[str, Experiment]], rounds: Sequence[int], against: str | None
) -> None:
    """Refuse views of a comparison that some setting cannot give, before anything runs."""
    from potluck.report.chosen_rounds import check_rounds
    from potluck.runs.compare import check_reference

    for setting, experiments in settings.items():
        check_reference(against, experiments)
        for label, one in experiments.items():
            who = f"{setting}, {label}" if setting else label
            check_rounds(rounds, one.training.rounds, one.evaluate.every, who)


def _numbers(option: str, text: str, such: str) -> list[int]:
    """Whole numbers between commas, each once."""
    listed = words(text)
    wrong = next((word for word in listed if not word.isdecimal()), None)
    if wrong is not None:
        raise ConfigError(f"{option}: {wrong!r} is no whole number from 0; give some such as {such}")
    return list(dict.fromkeys(map(int, listed)))


def _scores(text: str) -> list[float]:
    """Target scores between commas, each once."""
    targets: list[float] = []
    for word in words(text):
        try:
            targets.append(float(word))
        except ValueError:
            raise ConfigError(f"--target: {word!r} is no number; give scores such as 0.5,0.9") from None
    return list(dict.fromkeys(targets))


def compared(
    screen: Screen,
    experiments: dict[str, Experiment],
    seeds: Sequence[int],
    folder: Path,
    again: Sequence[str],
    targets: Sequence[float] = (),
    rounds: Sequence[int] = (),
    against: str | None = None,
) -> ComparisonResult:
    """Compare under a progress display, then print the tables; `again` are the words that continue it."""
    from potluck.runs.compare import compare as compare_methods
    from potluck.runs.observers.progress import showing

    try:
        with showing(screen.err, len(seeds) * len(experiments)) as display:
            result = compare_methods(
                experiments,
                seeds,
                folder,
                display.watch,
                display.skip,
                targets=targets,
                rounds=rounds,
                against=against,
            )
    except KeyboardInterrupt as error:
        raise Stopped(["potluck", *again]) from error
    if not screen.json:
        _show(screen, result)
    return result


def _show(screen: Screen, result: ComparisonResult) -> None:
    from potluck.cli.views.results import comparison_sheets

    main, *further = comparison_sheets(result.comparison)
    screen.sheet(main)
    for sheet in further:
        screen.show("")
        screen.sheet(sheet.first(MOST_ROWS, "comparison.html"))
    screen.show(
        f"\nreport: {result.folder / 'comparison.html'}",
        f"of each run: {result.folder}/<method>-seed<seed>/report.html",
    )
