"""`potluck status`: where a run, a federation or a site stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from potluck.cli import completion
from potluck.cli.options import AsJson, Debug
from potluck.cli.screen import Screen, notes_first


def status(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A run, the home of `potluck join`, or a folder with several runs, such as a comparison.",
            autocompletion=completion.results,
        ),
    ],
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the state of a run or a federation: round, score, who is connected, refusals, bytes, time left."""
    from potluck.live.sheets import overview_sheet, status_sheet
    from potluck.live.snapshot import Follower, Watch, find_runs

    screen, watched = Screen(json), Watch([folder])
    told: Any
    if find_runs(folder) == [folder]:
        now = Follower(folder).look()
        told, sheet = now.to_json(), status_sheet(now)
    else:
        found = watched.look()
        told, sheet = (
            [one.to_json() for one in found],
            overview_sheet(found, f"{len(found)} runs in {folder}"),
        )
    if json:
        screen.data(told)
    elif screen.out.is_terminal:
        screen.show(notes_first(sheet))
    else:
        screen.sheet(sheet)
