"""What commands print: results on standard output, progress on standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from potluck.core.plain_values import harmless
from potluck.report.render import Sheet, console_on, plain, rich_table

MOST_ROWS = 40  # rows of a table, such as clients or architectures


class Harmless:
    """Anything that is printed, without letters of a stranger's that the terminal would obey."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same segments, which have their colours apart from their text."""
        for one in console.render(self.inner, options):
            yield one if one.control else Segment(harmless(one.text), one.style)


def fill_streams() -> None:
    """Open what is closed of standard input, output and error, on nothing.

    A file of a run would get the free number otherwise, and with it whatever a library prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def print_everything() -> None:
    """Let no character stop a command whose work is done: one that a stream cannot encode is replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def notes_first(sheet: Sheet) -> Group:
    """A sheet for the terminal with its notes above the table, as wide as the terminal; without rows, no table."""
    parts: list[RenderableType] = [Text(sheet.title, "bold"), *map(Text, sheet.notes)]
    if sheet.entries:
        parts += [Text(""), rich_table(replace(sheet, title="", notes=()))]
    return Group(*map(Harmless, parts))


class Screen:
    """The two streams of a command; with `json`, standard output gets nothing but JSON."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.out = console_on(stderr=False)
        self.err = console_on(stderr=True)

    def data(self, value: Any) -> None:
        """Print JSON, for programs; in ASCII where standard output has less than Unicode."""
        unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        typer.echo(json.dumps(value, indent=2, ensure_ascii=not unicode, allow_nan=False))

    def show(self, *parts: RenderableType) -> None:
        """Print text and tables, for people."""
        for part in parts:
            shown = Harmless(Text(part) if isinstance(part, str) else part)
            self.out.print(shown, soft_wrap=isinstance(part, str))

    def sheet(self, sheet: Sheet) -> None:
        """Print a table: fitted to the terminal, or as aligned text where there is none."""
        self.show(rich_table(sheet) if self.out.is_terminal else plain(sheet).rstrip())
