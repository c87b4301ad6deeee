"""The wire contract of a method: what leaves a client, what comes to it, what never leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from potluck.cli.screen import MOST_ROWS
from potluck.federation.explain import explain
from potluck.federation.federation import Federation
from potluck.report.format import count, size


def explain_entry(federation: Federation) -> dict[str, Any]:
    """The contract of the first client, with bytes, and totals for one client of each kind.

    `potluck explain --json` prints it.
    """
    explained = explain(federation)
    for step in explained["steps"]:
        for direction in ("up", "down"):
            contract = getattr(federation.method, f"{direction}_contract")(step["name"])
            for entry in step[direction]:
                width = contract[entry["name"]].dtype.itemsize
                entry["bytes"] = None if entry["scalars"] is None else width * entry["scalars"]
    totals = [explain(federation, client) for client in _one_per_kind(federation)]
    explained["clients"] = [
        {**one["client"], "up_scalars": one["up_scalars"], "down_scalars": one["down_scalars"]}
        for one in totals
    ]
    return explained


def _one_per_kind(federation: Federation) -> list[str]:
    first: dict[str, str] = {}
    for client in federation.population.ids:
        first.setdefault(federation.clients.kind(client), client)
    return list(first.values())[:MOST_ROWS]


def explain_view(explained: Mapping[str, Any], experiment: str) -> RenderableType:
    """Three panels: what leaves a client, what comes to it, what never leaves it."""
    client, steps = explained["client"], explained["steps"]
    head = Text.assemble((explained["method"], "bold"), f"  {explained['citation']}".rstrip())
    about = Text(f"sizes for client {client['id']} ({client['model']}) of {experiment}", "dim")
    about.append(", of the numbers alone; a run's bytes count their names and shapes, too")
    if explained["open"] is not None:
        tried = ", ".join(map(str, explained["open"]["candidates"]))
        about.append(
            f"\n{explained['open']['option']} is chosen of {tried} before the first round; these are the largest"
        )
    leaves = _crossing(steps, "up", explained["up_scalars"])
    comes = _crossing(steps, "down", explained["down_scalars"])
    parts: list[RenderableType] = [
        head,
        about,
        _panel("leaves the client", Group(leaves, _small(explained)), "yellow"),
        _panel("comes to the client", comes, "cyan"),
        _panel("never leaves the client", Text(", ".join(explained["stays"])), "green"),
    ]
    if len(explained["clients"]) > 1:
        parts.append(_by_kind(explained["clients"]))
    return Group(*parts)


def _panel(title: str, content: RenderableType, color: str) -> Panel:
    heading = Text(title, f"bold {color}")
    return Panel(content, title=heading, title_align="left", border_style=color, box=box.ROUNDED)


PURPOSES = {"train": "every round", "setup": "once, where the server lacks it", "evaluate": "to evaluate"}


def _crossing(steps: Sequence[Mapping[str, Any]], direction: str, total: int) -> RenderableType:
    """A row for every tensor that crosses in one direction, and the total of a round."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("name", "shape", "scalars", "size", "when", "meaning"):
        table.add_column(name, justify="right" if name in ("scalars", "size") else "left", overflow="fold")
    for step in steps:
        for entry in step[direction]:
            when = PURPOSES[step["purpose"]]
            if "times" in step:
                when = f"{count(step['times'][direction])} times a round"
            when += ", optional" if entry["optional"] else ""
            numbers = (count(entry["scalars"]), size(entry["bytes"]))
            row = (entry["name"], entry["shape"], *numbers, when, entry["meaning"])
            table.add_row(*map(Text, row))
    if not table.row_count:
        return Text("nothing")
    entries = [entry for step in steps for entry in step[direction]]
    fewer = any(entry["optional"] or entry["formula"].startswith("≤") for entry in entries)
    return Group(table, Text(f"{'at most' if fewer else 'in all'} {count(total)} scalars a round", "bold"))


def _small(explained: Mapping[str, Any]) -> Text:
    """The two small records that cross besides messages: the card and the report."""
    return Text.assemble(
        ("\nonce, at enrolment: ", "dim"),
        _listed(explained["card"]),
        ("\nwith every reply: ", "dim"),
        _listed(explained["report"]),
    )


def _listed(entries: Iterable[Mapping[str, str]]) -> str:
    return "; ".join(f"{entry['name']} ({entry['meaning']})" for entry in entries)


def _by_kind(clients: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("model", "client", "scalars up", "scalars down"):
        table.add_column(name, justify="right" if name.startswith("scalars") else "left")
    for client in clients:
        row = (client["model"], client["id"], count(client["up_scalars"]), count(client["down_scalars"]))
        table.add_row(*map(Text, row))
    return table
