"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion
from potluck.errors import ConfigError, RunError

RUNS = Path("runs")  # where results go unless --out names a folder

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]...",
        help="Values to change, such as training.rounds=5 or seed=1.",
        autocompletion=completion.overrides,
    ),
]
PluginFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="Load a file or module with your own methods, models or data; repeatable.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print only JSON on standard output; progress goes to standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="In a federation: continue without this client, for good."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="In a federation: take an excluded client back."),
]


Insecure = Annotated[
    bool, typer.Option("--insecure", help="Plain text; on this machine (127.0.0.1) that is the default.")
]
Ca = Annotated[
    Path | None, typer.Option(metavar="FILE", help="TLS: the certificate of the authority both sides trust.")
]
Prometheus = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, metavar="PORT", help="Serve metrics for Prometheus at 127.0.0.1:PORT/metrics."
    ),
]
PagePort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, metavar="PORT", help="Show the run on a page at 127.0.0.1:PORT."),
]
LogForm = Annotated[
    str, typer.Option(metavar="text|json", help="Print lines with the time instead of the progress display.")
]


def words(text: str) -> list[str]:
    """The words of a list such as `a,b,c`."""
    return [word.strip() for word in text.split(",") if word.strip()]


def check_experiment(file: Path) -> None:
    """Refuse a file that is not there at once: what reads it loads torch first, which takes seconds."""
    if not file.exists():
        raise ConfigError(f"there is no experiment file {file}; check the path")


def check_run(folder: Path) -> None:
    """Refuse a folder that is not there, at once."""
    if not folder.is_dir():
        raise RunError(f"there is no run folder {folder}; check the path")


def check_log(log: str) -> None:
    """Refuse a form of the log that there is not."""
    from potluck.deploy.logs import KINDS

    if log and log not in KINDS:
        raise ConfigError(f"--log: {log!r} is not a form of log; give {' or '.join(KINDS)}")
