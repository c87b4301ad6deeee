"""A table once, and its renderings: in a terminal, as plain text, as Markdown and in a notebook."""

from __future__ import annotations

import html
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.core.plain_values import harmless
from potluck.report.format import NOTHING, text

SortKey = str | float | None
WIDTH = 110  # characters in a line where there is no terminal

# --- sheets ---------------------------------------------------------------------------------------------


def itself(value: Any) -> Any:
    """The value as it is: the sort key of a column whose values sort by themselves."""
    return value


@dataclass(frozen=True)
class Column:
    """A column of a table: what it takes from an entry, how it shows that, and what it sorts by."""

    name: str
    value: Callable[[Any], Any]
    show: Callable[[Any], str] = text
    key: Callable[[Any], SortKey] = itself
    align: Literal["left", "right"] = "right"

    def cell(self, entry: Any) -> str:
        """The text in the row of an entry."""
        return self.show(self.value(entry))

    def sort_key(self, entry: Any) -> SortKey:
        """What the row of an entry is sorted by."""
        return self.key(self.value(entry))


def words(name: str, value: Callable[[Any], Any], show: Callable[[Any], str] = text) -> Column:
    """A column of words, which stand at the left."""
    return Column(name, value, show, align="left")


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: a row per entry, and notes below it. Readers of a page can sort it by column."""

    title: str
    columns: tuple[Column, ...]
    entries: Sequence[Any]
    notes: tuple[str, ...] = ()
    sortable: bool = True

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The text of every cell."""
        return [tuple(column.cell(entry) for column in self.columns) for entry in self.entries]

    def first(self, rows: int, where: str, total: int | None = None) -> Sheet:
        """The sheet cut to so many rows, with a note that says where the whole one is, and how many that has."""
        if len(self.entries) <= rows:
            return self
        note = f"The first {rows} of {total or len(self.entries)} rows; {where} has them all."
        return replace(self, entries=self.entries[:rows], notes=(note, *self.notes))

    def without_empty_columns(self) -> Sheet:
        """The sheet without columns that have no value at all; without rows all columns stay."""
        kept = [
            column
            for column in self.columns
            if not self.entries or any(column.cell(entry) != NOTHING for entry in self.entries)
        ]
        return replace(self, columns=tuple(kept))


# --- renderings -----------------------------------------------------------------------------------------


def rich_table(sheet: Sheet) -> Table:
    """A sheet for the terminal. Cells are text, never markup: a client may be called `[red]`."""
    table = Table(
        title=Text(sheet.title, "bold"),
        title_justify="left",
        caption=Text("\n".join(sheet.notes)) if sheet.notes else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in sheet.columns:
        table.add_column(Text(column.name), justify=column.align, overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    return table


def plain(sheet: Sheet) -> str:
    """A sheet as aligned text, for logs and files."""
    lines = [tuple(column.name for column in sheet.columns), *sheet.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    drawn = [
        "  ".join(
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(line, widths, sheet.columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    return harmless("\n".join([sheet.title, "", *drawn, *([""] if sheet.notes else []), *sheet.notes]) + "\n")


def markdown(sheet: Sheet) -> str:
    """A sheet as a Markdown table with its notes below."""
    rule = ["---:" if column.align == "right" else ":---" for column in sheet.columns]
    names = [column.name for column in sheet.columns]
    lines = [list(map(_escaped, names)), rule, *(list(map(_escaped, row)) for row in sheet.rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n" + "".join(f"\n{_escaped(note)}\n" for note in sheet.notes)


def _escaped(text: str) -> str:
    """Text on one line, with the signs escaped that Markdown would read as markup."""
    for special in ("\\", "|", "`", "*", "_", ">", "]("):
        text = text.replace(special, f"\\{special}")
    return " ".join(text.replace("<", "&lt;").split())  # not every reader of Markdown knows \\<


def notebook(sheet: Sheet) -> str:
    """A sheet as a small HTML table with its notes below, as notebooks show it; every text is escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        aligned = zip(cells, sheet.columns, strict=True)
        inner = (
            f'<{tag} style="text-align: {column.align}">{html.escape(cell)}</{tag}>'
            for cell, column in aligned
        )
        return f"<tr>{''.join(inner)}</tr>"

    head = row([column.name for column in sheet.columns], "th")
    body = "".join(row(cells, "td") for cells in sheet.rows)
    notes = "".join(f"<div>{html.escape(note)}</div>" for note in sheet.notes)
    title = html.escape(sheet.title)
    return f"<div><b>{title}</b><table><thead>{head}</thead><tbody>{body}</tbody></table>{notes}</div>"


class BestEffort(io.TextIOBase):
    """Standard error as long as it can be written: a full disk or a closed pipe there must not end a run."""

    def write(self, text: str) -> int:
        """Write what can be written."""
        if (stream := _stderr()) is not None:
            try:
                stream.write(text)
            except (OSError, ValueError):
                _silence()
        return len(text)

    def flush(self) -> None:
        """Let what was written appear."""
        if (stream := _stderr()) is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                _silence()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return (stream := _stderr()) is not None and stream.isatty()

    def fileno(self) -> int:
        """The number of the open file."""
        stream = _stderr()
        if stream is None:
            raise OSError("there is no standard error")
        return stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """How letters become bytes."""
        return getattr(_stderr(), "encoding", None) or "utf-8"


def _stderr() -> TextIO | None:
    """Standard error itself, also while a progress bar stands in for it; None where the process has none."""
    found: TextIO | None = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return found


def _silence() -> None:
    """Write to nowhere from now on: what a broken stream still holds would fail again when Python ends."""
    if getattr(sys.stderr, "rich_proxied_file", None) is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


def console_on(stderr: bool) -> Console:
    """A console on standard error or output, wide enough for tables where there is no terminal.

    What it prints is text, never markup: a file may be called `[red].csv`.
    """
    file = BestEffort() if stderr else None
    console = Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console
