"""`potluck status`: where a federation stands, at the server or at a site."""

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
            metavar="FOLDER", help="The run folder of `potluck serve`, or the home of `potluck join`."
        ),
    ],
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show where a federation stands: round, who is connected, last replies, refusals, bytes, versions."""
    from potluck.cli.views.status import status_sheet
    from potluck.deploy.status import read_status

    screen, found = Screen(json), read_status(folder)
    if json:
        return screen.data(found)
    screen.sheet(status_sheet(found, str(folder)))
