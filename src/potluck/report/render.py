"""A table once, shown in a terminal, as Markdown or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from potluck.report.format import NOTHING

SortKey = str | float | None

# --- sheets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers go right."""

    name: str
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: text in cells, notes below it, and keys to sort by where it can be."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    keys: tuple[tuple[SortKey, ...], ...] = ()

    def first(self, rows: int, where: str) -> Sheet:
        """The same sheet with so many rows at most, and a note that says where they all are."""
        if len(self.rows) <= rows:
            return self
        note = f"The first {rows} of {len(self.rows)} rows; {where} has them all."
        return replace(self, rows=self.rows[:rows], keys=self.keys[:rows], notes=(note, *self.notes))

    def without_empty_columns(self) -> Sheet:
        """The same sheet without the columns that have no value at all; without rows nothing is left out."""
        kept = [i for i in range(len(self.columns)) if any(row[i] != NOTHING for row in self.rows)]
        if not self.rows:
            return self
        return Sheet(
            self.title,
            tuple(self.columns[i] for i in kept),
            tuple(tuple(row[i] for i in kept) for row in self.rows),
            self.notes,
            tuple(tuple(row[i] for i in kept) for row in self.keys),
        )


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
    return "\n".join([sheet.title, "", *drawn, *([""] if sheet.notes else []), *sheet.notes]) + "\n"


def markdown(sheet: Sheet) -> str:
    """A sheet as a Markdown table with its notes below."""
    rule = ["---:" if column.align == "right" else ":---" for column in sheet.columns]
    lines = [
        [_cell(column.name) for column in sheet.columns],
        rule,
        *([_cell(c) for c in row] for row in sheet.rows),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n" + "".join(f"\n{_cell(note)}\n" for note in sheet.notes)


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    for special in ("\\", "|", "`", "*", "_", "<", ">", "]("):
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())


def as_json(value: Mapping[str, Any]) -> str:
    """Plain data for machines."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
