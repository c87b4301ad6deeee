"""The list of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from potluck.core.method import Method
from potluck.report.format import count
from potluck.report.render import Column, Sheet, words


def method_entry(method: type[Method], explained: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One method, as `potluck methods --json` lists it; `explained` has its sizes in an example."""
    example = explained or {}
    plain = method()
    sent = [name for step in method.steps() for name in plain.up_contract(step)]
    received = [name for step in method.steps() for name in plain.down_contract(step)]
    sizes = ("up_formula", "down_formula", "up_scalars", "down_scalars")
    return {
        "name": method.name,
        "citation": method.citation,
        "needs_public_data": method.needs_public_data,
        "models": method.models,
        "sends": list(dict.fromkeys(sent)),
        "receives": list(dict.fromkeys(received)),
        **{name: example.get(name) for name in sizes},
    }


def methods_sheet(entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row for every method."""
    columns = (
        words("method", itemgetter("name")),
        words("published", lambda entry: entry["citation"] or None),
        words("models of the clients", itemgetter("models")),
        words("public data", lambda entry: "needed" if entry["needs_public_data"] else None),
        words("sends", lambda entry: _formula(entry, "up", "sends")),
        words("receives", lambda entry: _formula(entry, "down", "receives")),
        Column("up", itemgetter("up_scalars"), count),
        Column("down", itemgetter("down_scalars"), count),
    )
    notes = (
        "sends, receives: scalars of a client in a round. up, down: the same in numbers, for client 0 of the demo.",
        "d: width of a representation; C: classes, C_k: those a client holds; n: its samples; P: public samples; "
        "|x|: numbers in x.",
        "`potluck explain METHOD` shows what each of these is and how large.",
    )
    return Sheet(f"{len(entries)} methods", columns, entries, notes).without_empty_columns()


def _formula(entry: Mapping[str, Any], way: str, names: str) -> str:
    """The scalars that cross as a formula; their names where no example could be built."""
    formula = entry[f"{way}_formula"]
    return (", ".join(entry[names]) if formula is None else formula) or "nothing"
