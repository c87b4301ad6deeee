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
    """Write the pages of runs, comparisons and sweeps again, also of a run that is still running."""
    from potluck.runs.pages import write_pages

    screen = Screen(json)
    written = [path for folder in folders for path in write_pages(folder)]
    if json:
        screen.data({"pages": [str(path) for path in written]})
    else:
        screen.show(*(f"report: {path}" for path in written))
