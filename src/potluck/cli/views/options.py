"""The options of a method, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.core.options import Option, as_written
from potluck.report.render import Sheet, words


def options_sheet(method: str, options: Sequence[Option]) -> Sheet:
    """A row for every option."""
    columns = (
        words("option", lambda one: one.name),
        words("type", lambda one: one.type),
        words("default", lambda one: None if isinstance(one.default, dict) else as_written(one.default)),
        words("allowed", lambda one: one.allowed or None),
        words("meaning", lambda one: one.meaning or None),
        words("source", lambda one: one.source or None),
    )
    notes = (
        f"Set them as `method: {{name: {method}, …}}`, or as `method.OPTION=VALUE` on the command line.",
    )
    return Sheet(f"options of {method}", columns, options, notes)
