"""`potluck demo`: a small comparison on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.compare import compared
from potluck.cli.options import RUNS, AsJson, Debug
from potluck.cli.screen import Screen

DEMO = Path(__file__).parents[1] / "demo.yaml"
DEMO_METHODS = ("local", "fedavg", "fedproto", "fedmrl")


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where to write; a stopped demo there is continued. Default: runs/demo."
        ),
    ] = None,
    json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train clients with different models on the embedded data, in half a minute."""
    from potluck.runs.comparisons.comparison import Comparison
    from potluck.runs.comparisons.plan import read_sweep

    screen = Screen(json)
    plan = read_sweep(DEMO, DEMO_METHODS)
    folder = out or _free(RUNS / "demo")
    screen.err.print(
        "Clients with four different models learn to read digits, each from a few samples of its own: alone,\n"
        "and with each other. `potluck explain fedmrl` says what crosses between them.",
        style="dim",
    )
    result = compared(screen, plan, [plan.first.seed], folder, ["demo", "--out", str(folder)])
    if json and isinstance(result, Comparison):
        screen.data(result.comparison | {"folder": str(result.folder)})


def _free(folder: Path) -> Path:
    """The folder, or the first of `-2`, `-3`, … that does not exist."""
    number, path = 1, folder
    while path.exists():
        number += 1
        path = folder.with_name(f"{folder.name}-{number}")
    return path
