"""The command line: all commands, and where they start.

Commands import what they need when they are called, so that `potluck --help` is quick: torch takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from potluck.cli.compare import compare
from potluck.cli.demo import demo
from potluck.cli.doctor import doctor
from potluck.cli.examples import EXAMPLES, FIRST, epilog, flowing
from potluck.cli.exits import end_in_peace, end_on_signals, guarded, last_words
from potluck.cli.federation import gate, keys, prune, serve
from potluck.cli.inspect import explain, methods, split
from potluck.cli.join import join
from potluck.cli.new import new
from potluck.cli.plot import plot
from potluck.cli.report import report
from potluck.cli.run import resume, run
from potluck.cli.screen import fill_streams, print_everything
from potluck.cli.status import status
from potluck.cli.suggestions import Command, Commands
from potluck.cli.watch import watch
from potluck.version import __version__

app = typer.Typer(
    name="potluck",
    cls=Commands,
    help="Federated learning where everyone brings their own model.",
    no_args_is_help=True,
    epilog=epilog(FIRST),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANELS: dict[str, tuple[Callable[..., None], ...]] = {  # as --help lists them
    "Start here": (demo, doctor, new),
    "Run experiments": (run, resume, compare, watch),
    "Look at methods, data and results": (methods, explain, split, plot, report),
    "Federations of real sites": (serve, join, gate, status, keys, prune),
}
for _panel, _commands in PANELS.items():
    for _command in _commands:
        _name = _command.__name__
        app.command(
            _name,
            cls=Command,
            help=flowing(_command.__doc__ or ""),
            rich_help_panel=_panel,
            epilog=epilog(EXAMPLES[_name]),
        )(guarded(_command))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"potluck {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning where everyone brings their own model."""


def main() -> None:
    """Run the command that was asked for."""
    fill_streams()
    end_on_signals()
    print_everything()
    try:
        app()
    except OSError as error:  # what typer prints itself, such as --help, goes to a disk that is full
        sys.exit(last_words(error))
    finally:
        end_in_peace()
