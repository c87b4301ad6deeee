"""The list of methods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from potluck.core.method import Method
from potluck.report.format import count
from potluck.report.render import Column, Sheet, words

SIZES = (Column("up", itemgetter("up_scalars"), count), Column("down", itemgetter("down_scalars"), count))
ABOUT_SIZES = "up, down: the scalars that client 0 of the demo sends and receives in a round."
# What the symbols of formulas stand for.
SYMBOLS = {
    "d": "width of a representation",
    "C": "classes",
    "C_k": "classes that the client holds",
    "known": "classes that any client has sent so far",
    "n": "training samples of the client",
    "P": "public samples",
    "P_t": "public samples of a round",
    "L": "public samples that the server lists for the client, by class",
    "R": "public samples of a round, in FedHeNN",
    "r": "public samples of a batch or of several",
    "m": "peers whose representations come; in FedHeNN the columns of a kernel, R or d",
    "p": "numbers of a sample before the body of a model",
    "q": "numbers of a sample after it",
}


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
    """A row for every method: where it is from, whom it suits, and how much crosses."""
    columns = (
        words("method", itemgetter("name")),
        words("published", lambda entry: entry["citation"] or None),
        words("models of the clients", itemgetter("models")),
        words("public data", lambda entry: "needed" if entry["needs_public_data"] else None),
        *SIZES,
    )
    notes = (
        f"{ABOUT_SIZES} --formulas shows what they are made of.",
        "`potluck explain METHOD` shows what each of these is and how large.",
    )
    return Sheet(f"{len(entries)} methods", columns, entries, notes).without_empty_columns()


def formulas_sheet(entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row for every method: the scalars that cross, as formulas, and below what their symbols mean."""
    columns = (
        words("method", itemgetter("name")),
        words("sends", lambda entry: _formula(entry, "up", "sends")),
        words("receives", lambda entry: _formula(entry, "down", "receives")),
        *SIZES,
    )
    used = {symbol for entry in entries for way in ("up", "down") for symbol in _symbols(entry, way)}
    legend = (f"{symbol}: {meaning}." for symbol, meaning in SYMBOLS.items() if symbol in used)
    notes = (
        f"sends, receives: scalars of a client in a round. {ABOUT_SIZES}",
        *legend,
        "|x|: all numbers in the part x. ≤: at most.",
        "`potluck explain METHOD` shows what each of these is and how large.",
    )
    return Sheet(f"{len(entries)} methods", columns, entries, notes).without_empty_columns()


def _symbols(entry: Mapping[str, Any], way: str) -> set[str]:
    """The symbols of a formula, without the parts whose numbers it counts."""
    return {*re.findall(r"[A-Za-z_]+", re.sub(r"\|[^|]*\|", "", entry[f"{way}_formula"] or ""))}


def _formula(entry: Mapping[str, Any], way: str, names: str) -> str:
    """The scalars that cross as a formula; their names where no example could be built."""
    formula = entry[f"{way}_formula"]
    return (", ".join(entry[names]) if formula is None else formula) or "nothing"
