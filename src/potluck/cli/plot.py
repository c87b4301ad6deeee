"""`potluck plot`: pictures of runs, for papers and for a look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion
from potluck.cli.options import Debug
from potluck.cli.screen import Screen

Words = str | None


def plot(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="What to draw. Without it, the kinds are listed.",
            autocompletion=completion.pictures,
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, comparisons or sweeps.",
            autocompletion=completion.results,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write: .png, or .pdf and .svg for papers. Default: KIND.png."
        ),
    ] = None,
    over: Annotated[
        Words,
        typer.Option(metavar="KEY", help="For option, the setting to draw over: d1. For grid, two: d1,lr."),
    ] = None,
    clients: Annotated[Words, typer.Option(metavar="IDS", help="The clients to show: 0,3,5.")] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="The number of test samples to use.")
    ] = None,
    stages: Annotated[
        Words,
        typer.Option(metavar="NAMES", help="The stages of the models to look at: stem,layer2,features."),
    ] = None,
    classes: Annotated[
        Words, typer.Option(metavar="NAMES", help="For tsne and pca, the classes to show: 3,8.")
    ] = None,
    moment: Annotated[
        Words, typer.Option(metavar="MOMENT", help="The moment to show: after_aggregation or after_training.")
    ] = None,
    mode: Annotated[Words, typer.Option(metavar="MODE", help="The way to predict.")] = None,
    plugins: Annotated[
        bool,
        typer.Option(
            "--plugins",
            help="For cka, tsne, pca and confusion: load the plug-ins that the run names. Their code runs here.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Draw a picture of finished or running experiments; without arguments, list the kinds of pictures."""
    from potluck.errors import ConfigError
    from potluck.runs.pictures.api import plot as draw

    screen = Screen(json=False)
    if kind is None:
        return _show_kinds(screen)
    if not runs:
        raise ConfigError(f"potluck plot {kind}: name the folder of a run, a comparison or a sweep")
    place = out or Path(f"{kind}.png")
    draw(
        kind,  # type: ignore[arg-type]
        runs,
        out=place,
        over=over,
        clients=clients,
        samples=samples,
        stages=stages,
        classes=classes,
        moment=moment,
        mode=mode,
        plugins=plugins,
    )
    screen.show(f"picture: {place}")


def _show_kinds(screen: Screen) -> None:
    from potluck.report.render import Sheet
    from potluck.report.render import words as column
    from potluck.runs.pictures.api import KINDS

    columns = (
        column("kind", lambda entry: entry[0]),
        column("shows", lambda entry: entry[1].line),
        column("options", lambda entry: " ".join(f"--{name}" for name in entry[1].options if name != "data")),
    )
    note = "potluck plot KIND RUN… --out FILE.png, .pdf or .svg"
    screen.sheet(Sheet("Kinds of pictures", columns, list(KINDS.items()), (note,), sortable=False))
