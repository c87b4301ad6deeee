"""The list of methods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from potluck.core.method import Method
from potluck.report.format import count
from potluck.report.render import Column, Sheet, words

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
    "m": "peers whose representations come (in FedHeNN the columns of a kernel, R or d)",
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
    note = f"{ABOUT_SIZES} --formulas shows what they are made of."
    return _sheet(entries, (*ABOUT, *SIZES), (note,))


def formulas_sheet(entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row for every method: the scalars that cross, as formulas, and below what their symbols mean."""
    return _sheet(entries, (*ABOUT[:1], *FORMULAS, *SIZES), _legend(entries))


def whole_sheet(entries: Sequence[Mapping[str, Any]]) -> Sheet:
    """A row for every method with all of that, for a page."""
    return _sheet(entries, (*ABOUT, *FORMULAS, *SIZES), _legend(entries))


def _sheet(entries: Sequence[Mapping[str, Any]], columns: tuple[Column, ...], notes: Sequence[str]) -> Sheet:
    last = "`potluck explain METHOD` shows what each of these is and how large."
    return Sheet(f"{len(entries)} methods", columns, entries, (*notes, last)).without_empty_columns()


def _legend(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns and the symbols of formulas mean; only of symbols that occur."""
    used = {symbol for entry in entries for way in ("up", "down") for symbol in _symbols(entry, way)}
    meanings = [f"{symbol}: {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in used]
    return [
        f"sends, receives: scalars of a client in a round. {ABOUT_SIZES}",
        "; ".join([*meanings, "|x|: all numbers in the part x; ≤: at most."]),
    ]


def _symbols(entry: Mapping[str, Any], way: str) -> set[str]:
    """The symbols of a formula, without the parts whose numbers it counts."""
    return {*re.findall(r"[A-Za-z_]+", re.sub(r"\|[^|]*\|", "", entry[f"{way}_formula"] or ""))}


def _formula(entry: Mapping[str, Any], way: str, names: str) -> str:
    """The scalars that cross as a formula; their names where no example could be built."""
    formula = entry[f"{way}_formula"]
    return (", ".join(entry[names]) if formula is None else formula) or "nothing"


ABOUT = (
    words("method", itemgetter("name")),
    words("published", lambda entry: entry["citation"] or None),
    words("models of the clients", itemgetter("models")),
    words("public data", lambda entry: "needed" if entry["needs_public_data"] else None),
)
FORMULAS = (
    words("sends", lambda entry: _formula(entry, "up", "sends")),
    words("receives", lambda entry: _formula(entry, "down", "receives")),
)
SIZES = (Column("up", itemgetter("up_scalars"), count), Column("down", itemgetter("down_scalars"), count))
