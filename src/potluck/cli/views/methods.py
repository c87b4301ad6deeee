"""The list of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from potluck.core.method import Method
from potluck.report.format import NOTHING
from potluck.report.render import Column, Sheet


def method_entry(method: type[Method]) -> dict[str, Any]:
    """One method, as `potluck methods --json` lists it."""
    example = method()
    sent = [name for step in method.steps() for name in example.up_contract(step)]
    received = [name for step in method.steps() for name in example.down_contract(step)]
    return {
        "name": method.name,
        "citation": method.citation,
        "needs_public_data": method.needs_public_data,
        "models": method.models,
        "sends": list(dict.fromkeys(sent)),
        "receives": list(dict.fromkeys(received)),
    }


def methods_sheet(entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row for every method."""
    names = ("method", "published", "models of the clients", "sends", "receives", "public data")
    rows = tuple(
        (
            entry["name"],
            entry["citation"] or NOTHING,
            entry["models"],
            ", ".join(entry["sends"]) or "nothing",
            ", ".join(entry["receives"]) or "nothing",
            "needed" if entry["needs_public_data"] else NOTHING,
        )
        for entry in entries
    )
    notes = ("`potluck explain METHOD` shows what each of these is and how large.",)
    sheet = Sheet(f"{len(rows)} methods", tuple(Column(name, "left") for name in names), rows, notes)
    return sheet.without_empty_columns()
