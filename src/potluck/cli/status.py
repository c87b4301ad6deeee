"""`potluck status`: where a run, a federation or a site stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.options import AsJson, Debug
from potluck.cli.screen import Screen


def status(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A run, the home of `potluck join`, or a folder with several runs, such as a comparison.",
        ),
    ],
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show where a run or a federation stands: round, score, who is connected, refusals, bytes, time left."""
    from potluck.live.sheets import overview_sheet, status_sheet
    from potluck.live.snapshot import Follower, Watch, find_runs

    screen, watched = Screen(json), Watch([folder])
    if find_runs(folder) == [folder]:
        now = Follower(folder).look()
        return screen.data(now.to_json()) if json else screen.sheet(status_sheet(now))
    found = watched.look()
    if json:
        screen.data([one.to_json() for one in found])
    else:
        screen.sheet(overview_sheet(found, f"{len(found)} runs in {folder}"))
