"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")  # where results go unless --out names a folder

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Values to change, such as training.rounds=5 or seed=1."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="JSON alone on standard output; progress on standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Of a federation: go on without this client, for good."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Of a federation: take back a client that was excluded."),
]


def words(text: str) -> list[str]:
    """The words of a list such as `a,b,c`."""
    return [word.strip() for word in text.split(",") if word.strip()]
