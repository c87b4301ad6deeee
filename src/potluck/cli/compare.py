"""`potluck compare`: methods, variants and sweeps side by side."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.cli import completion
from potluck.cli.exits import Stopped
from potluck.cli.options import AsJson, Debug, ExperimentFile, Overrides, PluginFiles, check_experiment, words
from potluck.cli.screen import MOST_ROWS, Screen
from potluck.errors import ConfigError
from potluck.files import check_writable, write_anew

if TYPE_CHECKING:
    from potluck.runs.comparisons.comparison import Comparison, Sweep
    from potluck.runs.comparisons.plan import Plan


ENDINGS = {
    "csv": ".csv",
    "latex": ".tex",
    "pdf": ".pdf",
}  # others may be files of the user's that are no tables
LONGEST_NUMBER = 100  # digits
CONTENTS = {"csv": "a table", "latex": "a LaTeX table", "pdf": "a PDF"}


def compare(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="a,b,c",
            help="The methods to compare; Local is always added. The experiment's own method keeps its options, "
            "the others have their defaults; fedmrl.d1=50 sets an option of one method.",
            autocompletion=completion.listed_methods,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="The seeds. Default: the experiment's own.")
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            metavar="0.5,0.9",
            help="Target scores (accuracy: above 0, up to 1): show the first evaluated round whose mean reaches "
            "each, and what was sent by then.",
        ),
    ] = "",
    rounds: Annotated[
        str,
        typer.Option(
            metavar="10,50,100",
            help="Evaluated rounds: show the scores at each, for all moments and modes that were measured.",
        ),
    ] = "",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Take differences to this method or variant, also client by client. Default: local.",
            autocompletion=completion.methods,
        ),
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            metavar="VIEW",
            help="The round that the tables show: last, best_by_validation, or best_by_test (an upper bound).",
        ),
    ] = "last",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to write. Default: runs/<name>-compare."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a table with one row per method, seed, client, moment and mode."
        ),
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the main table for a paper (booktabs).")
    ] = None,
    pdf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw scores over rounds (for a sweep, a heat map) as a vector figure."
        ),
    ] = None,
    plugin: PluginFiles = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run methods side by side: same split, same private initial models, same cohorts, same batch order.

    A file may list variants to compare instead, and a sweep over settings. The same command again skips finished
    runs and continues the others.
    """
    check_experiment(experiment)
    from potluck.experiment.schema import with_plugins
    from potluck.report.comparison import check_view
    from potluck.runs.comparisons.api import check_views, default_folder, distinct
    from potluck.runs.comparisons.plan import read_sweep

    files = {"csv": csv, "latex": latex, "pdf": pdf}
    _check_files(files)
    _refuse_empty({"--methods": methods, "--seeds": seeds})
    _refuse_idle_seed(overrides or (), seeds)
    targets, at = _scores(target), list(dict.fromkeys(_numbers("--rounds", rounds, "10,50,100")))
    changes = with_plugins(experiment, overrides or (), plugin or ())
    plan = read_sweep(experiment, words(methods or ""), changes)
    check_view(view)
    check_views(plan, at, against)
    listed = _numbers("--seeds", seeds or "", "0,1,2")
    played = distinct("--seeds", listed) if listed else [plan.first.seed]
    screen = Screen(json)
    _tell_left_out(screen, experiment, methods)
    _tell_twice(screen, words(methods or ""))
    views = {"targets": targets, "rounds": at, "against": against, "view": view}
    result = compared(screen, plan, played, out or default_folder(plan), sys.argv[1:], **views)
    if json:
        screen.data(_content(result))
    _export(screen, result, files)


# --- what is refused before anything runs ---------------------------------------------------------------


def _refuse_empty(lists: Mapping[str, str | None]) -> None:
    for option, given in lists.items():
        if given is not None and not words(given):
            raise ConfigError(f"{option} is empty; leave it out, or name some")


def _refuse_idle_seed(overrides: Sequence[str], seeds: str | None) -> None:
    idle = next((one for one in overrides if one.partition("=")[0] == "seed"), None)
    if idle is not None and seeds:
        raise ConfigError(f"{idle} changes nothing beside --seeds {seeds}: leave one of them out")


def _check_files(files: Mapping[str, Path | None]) -> None:
    for option, file in files.items():
        if file is not None:
            _check_file(option, file)


def _check_file(option: str, file: Path) -> None:
    """Refuse a file that could not be written when all is done."""
    if not file.parent.is_dir():
        raise ConfigError(f"--{option} {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise ConfigError(f"--{option} {file} is a folder; name a file in it")
    if file.suffix.lower() != (ending := ENDINGS[option]):
        raise ConfigError(
            f"--{option} {file}: {CONTENTS[option]} is written; give a name that ends in {ending}"
        )
    home = next((one for one in file.resolve().parents if (one / "environment.json").exists()), None)
    if home is not None:
        raise ConfigError(f"--{option} {file} is in the run folder {home}; name a file elsewhere")
    check_writable(file)


def _numbers(option: str, text: str, such: str) -> list[int]:
    """Whole numbers between commas."""
    listed = words(text)
    wrong = next((word for word in listed if not word.isdecimal() or len(word) > LONGEST_NUMBER), None)
    if wrong is not None:
        given = wrong if len(wrong) <= LONGEST_NUMBER else f"{wrong[:20]}…"
        raise ConfigError(f"{option}: {given!r} is not a whole number from 0; give some such as {such}")
    return list(map(int, listed))


def _scores(text: str) -> list[float]:
    """Target scores between commas, each once."""
    targets: list[float] = []
    for word in words(text):
        try:
            targets.append(float(word))
        except ValueError:
            raise ConfigError(f"--target: {word!r} is not a number; give scores such as 0.5,0.9") from None
    return list(dict.fromkeys(targets))


# --- what is told beside the results --------------------------------------------------------------------


def _tell_left_out(screen: Screen, experiment: Path, methods: str | None) -> None:
    from potluck.experiment.overrides import read_yaml

    if methods and read_yaml(experiment).get("variants"):
        screen.err.print(f"{experiment}: variants ignored, as --methods replaces them", soft_wrap=True)


def _tell_twice(screen: Screen, methods: Sequence[str]) -> None:
    twice = next((one for one in methods if methods.count(one) > 1), None)
    if twice is not None:
        screen.err.print(f"--methods: {twice} is named twice and run once", soft_wrap=True)


# --- playing and showing --------------------------------------------------------------------------------


def compared(
    screen: Screen, plan: Plan, seeds: Sequence[int], folder: Path, again: Sequence[str], **views: Any
) -> Comparison | Sweep:
    """Compare under a progress display, then print the tables; `again` are the words that continue it."""
    from potluck.runs.comparisons.api import play
    from potluck.runs.observers.progress import showing

    try:
        with showing(screen.err, len(seeds) * plan.size) as display:
            result = play(plan, seeds, folder, display.watch, display.skip, **views)
    except KeyboardInterrupt as error:
        raise Stopped(shlex.join(["potluck", *again])) from error
    if not screen.json:
        _show(screen, result)
    return result


def _show(screen: Screen, result: Comparison | Sweep) -> None:
    from potluck.runs.comparisons.comparison import Sweep

    if isinstance(result, Sweep):
        for setting, one in result.comparisons.items():
            screen.show(f"{setting}:")
            _show_comparison(screen, one)
        screen.sheet(result.sheet.first(MOST_ROWS, "sweep.html"))
        screen.show(f"\noverview: {result.folder / 'sweep.html'}")
    else:
        _show_comparison(screen, result)


def _show_comparison(screen: Screen, result: Comparison) -> None:
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


# --- results for programs and papers --------------------------------------------------------------------


def _content(result: Comparison | Sweep) -> dict[str, Any]:
    """The JSON of a comparison, or that of every setting of a sweep."""
    from potluck.runs.comparisons.comparison import Comparison

    if isinstance(result, Comparison):
        return result.comparison | {"folder": str(result.folder)}
    return {setting: _content(one) for setting, one in result.comparisons.items()}


def _export(screen: Screen, result: Comparison | Sweep, files: Mapping[str, Path | None]) -> None:
    for option, file in files.items():
        if file is not None:
            write_anew(file, _exported(option, result))
            screen.err.print(f"written: {file}", soft_wrap=True)


def _exported(option: str, result: Comparison | Sweep) -> bytes:
    """What `--csv`, `--latex` and `--pdf` write."""
    from potluck.report.comparison_frames import csv_of
    from potluck.report.pictures.files import to_pdf

    if option == "csv":
        return csv_of(result.frame())
    return result.latex().encode() if option == "latex" else to_pdf(result.plot())
