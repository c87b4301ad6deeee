"""`potluck watch`: follow runs and federations while they go on, in the terminal or on a page."""

from __future__ import annotations

import json as to_json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli import completion
from potluck.cli.exits import Ended
from potluck.cli.options import AsJson, Debug
from potluck.cli.screen import Screen, notes_first

if TYPE_CHECKING:
    from rich.console import RenderableType

    from potluck.live.snapshot import Snapshot, Watch
    from potluck.report.render import Sheet

EVERY = 2.0  # seconds between two looks
LONGEST = 600.0  # seconds for which a folder is waited for that is not there
QUIET = 4  # looks at a comparison in which nothing goes on, after which it has ended
HEAD = 18  # lines of a terminal that a table leaves for the rest
Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="FOLDER…",
        help="Runs, comparisons, federations, homes of sites, or folders with some of them.",
        autocompletion=completion.results,
    ),
]


def watch(
    folders: Folders,
    page: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Show them on a page at 127.0.0.1:PORT instead; 0 takes any free port.",
        ),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Follow runs live: rounds, accuracy, loss, clients, refusals, bytes, memory, time left.

    It only reads files and does not disturb the runs. In a terminal it ends when the named runs end. With a page,
    or a folder in which more runs may begin, it goes on until Ctrl-C. A folder that is not there is waited for ten
    minutes.
    """
    from potluck.live.snapshot import Watch, is_to_come

    watched = Watch(folders, patient=True)
    for folder in filter(is_to_come, folders):
        most = "" if page is not None or folder.exists() else f" {LONGEST / 60:g} minutes"
        told = f"no run has begun in {folder} yet: waiting{most} for one (Ctrl-C stops waiting)"
        typer.echo(told, err=True)
    try:
        if page is not None:
            _on_page(watched, page, json)
        elif json:
            _as_json(watched)
        else:
            _in_terminal(watched)
    except Ended:
        raise
    except KeyboardInterrupt:
        pass  # nothing else ends a watch, and the runs go on


def _on_page(watched: Watch, port: int, json: bool) -> None:
    from potluck.live.page import shown

    screen = Screen(json)
    with shown(port, watched) as address:
        if json:
            screen.data({"page": address})
        else:
            screen.show(f"{address} (Ctrl-C ends it)")
        while True:
            time.sleep(3600)


def _as_json(watched: Watch) -> None:
    """A line whenever a run has changed."""
    told: dict[str, str] = {}
    for found in _looks(watched):
        for one in found:
            line = to_json.dumps(one.to_json())
            if told.get(one.folder) != line:
                told[one.folder] = line
                typer.echo(line)


def _in_terminal(watched: Watch) -> None:
    from rich.live import Live

    screen = Screen(json=False)
    if not screen.out.is_terminal:
        return _in_lines(watched, screen)
    with Live(console=screen.out, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for found in _looks(watched):
            live.update(_picture(found, screen.out.height), refresh=True)


def _in_lines(watched: Watch, screen: Screen) -> None:
    """Where there is no terminal: a line whenever a run has gone on a round, or is in another state."""
    from potluck.live.sheets import state_in_words

    told: dict[str, tuple[int, str]] = {}
    found: list[Snapshot] = []
    for found in _looks(watched):
        for one in found:
            if told.get(one.folder) != (one.round, one.state):
                told[one.folder] = one.round, one.state
                words = one.problem or state_in_words(one, time.time())
                screen.show(f"{one.label}: {words}{_numbers(one)}")
    for sheet in _sheets(found, 40):
        screen.show("")
        screen.sheet(sheet)


def _numbers(one: Snapshot) -> str:
    from potluck.live.sheets import progress
    from potluck.report.format import NOTHING, duration

    score = "" if one.score is None else f", {one.measure.name} {one.measure.full(one.score)}"
    left = f", {duration(one.left(time.time()))} left" if one.seconds_left else ""
    return f", {progress(one)}{score}{left}" if progress(one) != NOTHING else ""


def _looks(watched: Watch) -> Iterator[list[Snapshot]]:
    """Look again and again, until nothing goes on any more; in a comparison, the next run may be about to begin."""
    looks, needed, waited = 0, QUIET if watched.may_grow else 1, 0.0
    while True:
        found = watched.look()
        yield found
        over = all(one.is_over for one in found)
        looks = looks + 1 if over and not watched.expects_more else 0
        if looks >= needed:
            return
        waited = waited + EVERY if over and watched.absent else 0.0
        if waited > LONGEST:
            raise watched.refusal(watched.absent[0])
        time.sleep(EVERY)


def _picture(found: list[Snapshot], height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for sheet in _sheets(found, max(height - HEAD, 3)):
        parts += [*([Text("")] if parts else []), notes_first(sheet)]
    return Group(*parts) if parts else Text("No run has begun so far; Ctrl-C ends the watch.")


def _sheets(found: list[Snapshot], rows: int) -> list[Sheet]:
    """One run in full; several side by side."""
    from potluck.live.sheets import overview_sheet, status_sheet

    if len(found) == 1:
        return [
            _one(found[0]) if found[0].problem and not found[0].rounds else status_sheet(found[0], rows=rows)
        ]
    title = f"{len(found)} runs, {sum(one.alive for one in found)} of them going on"
    return [overview_sheet(found, title).first(rows, "--page")] if found else []


def _one(unreadable: Snapshot) -> Sheet:
    from potluck.live.sheets import overview_sheet

    return overview_sheet([unreadable], unreadable.folder)
