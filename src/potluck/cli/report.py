"""`potluck report`: write the pages of runs and comparisons anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion
from potluck.cli.options import AsJson, Debug
from potluck.cli.screen import Screen

Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="FOLDER…",
        help="Runs, finished or still running, comparisons or sweeps.",
        autocompletion=completion.results,
    ),
]


def report(folders: Folders, json: AsJson = False, debug: Debug = False) -> None:
    """Write the pages of runs, comparisons and sweeps anew, also of a run that is still going on."""
    screen = Screen(json)
    written = [path for folder in folders for path in _pages(folder)]
    if json:
        screen.data({"pages": [str(path) for path in written]})
    else:
        screen.show(*(f"report: {path}" for path in written))


def _pages(folder: Path) -> list[Path]:
    """Write all pages of a folder: that of a run, those of a comparison and its runs, or those of a sweep."""
    from potluck.report.comparison_page import write_comparison
    from potluck.report.log import read_mapping
    from potluck.report.page import write_report
    from potluck.report.reading import reading
    from potluck.runs.comparisons.comparison import COMPARISON, SWEEP, Sweep, open_comparison

    if (folder / SWEEP).exists() and isinstance(sweep := open_comparison(folder), Sweep):
        sweep.write()
        return [
            folder / "sweep.html",
            *(page for part in sweep.comparisons for page in _pages(folder / part)),
        ]
    comparison = read_mapping(folder / COMPARISON) if folder.is_dir() else None
    if comparison is None:
        return [write_report(folder)]
    with reading(folder / COMPARISON):
        own = write_comparison(folder / "comparison.html", comparison)
    return [own, *(write_report(config.parent) for config in sorted(folder.glob("*-seed*/config.yaml")))]
