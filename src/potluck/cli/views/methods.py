"""The list of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from potluck.core.method import Method
from potluck.report.render import Sheet, words


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
    columns = (
        words("method", itemgetter("name")),
        words("published", lambda entry: entry["citation"] or None),
        words("models of the clients", itemgetter("models")),
        words("sends", lambda entry: ", ".join(entry["sends"]) or "nothing"),
        words("receives", lambda entry: ", ".join(entry["receives"]) or "nothing"),
        words("public data", lambda entry: "needed" if entry["needs_public_data"] else None),
    )
    notes = ("`potluck explain METHOD` shows what each of these is and how large.",)
    return Sheet(f"{len(entries)} methods", columns, entries, notes).without_empty_columns()
