"""Which client has which classes, or which range of what it predicts, and its feature shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from potluck.cli.screen import MOST_ROWS
from potluck.core.dataset import Dataset
from potluck.data import Split
from potluck.report.format import count

MOST_CLASSES = 20  # classes that get a column each
MOST_FEATURES = 40  # columns of a table that are named


def split_entry(data: Dataset, split: Split) -> dict[str, Any]:
    """The rows of each client by part and class, as `potluck split --json` prints them."""
    counts = split.counts(data.labels, data.label_count)
    clients = [
        {
            "id": client.id,
            "train": len(client.train),
            "validation": len(client.validation),
            "test": len(client.test),
            "counts": row.tolist(),
        }
        | ({"shift": client.shift.to_json()} if client.shift else {})
        for client, row in zip(split.clients, counts, strict=True)
    ]
    classes = list(data.label_names) or [str(number) for number in range(data.label_count)]
    about = {"data": data.name, "classes": classes, "hash": split.hash, "held_out": list(split.held_out)}
    features = {"features": list(data.encoding.names)} if data.encoding is not None else {}
    return about | features | {"clients": clients}


def split_view(entry: Mapping[str, Any]) -> RenderableType:
    """A row per client: the size of its parts, and its training samples per class."""
    clients, classes = entry["clients"], entry["classes"]
    few = len(classes) <= MOST_CLASSES
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("client", "train", "validation", "test"):
        table.add_column(name, justify="left" if name == "client" else "right")
    shifted = any("shift" in client for client in clients)
    if shifted:
        table.add_column("shift")
    for name in classes if few else ("classes", "most of"):
        table.add_column(Text(name), justify="right", overflow="fold")
    for client in clients[:MOST_ROWS]:
        id = f"{client['id']} (held out)" if client["id"] in entry["held_out"] else client["id"]
        parts = [count(client[part]) for part in ("train", "validation", "test")]
        held = _shaded(client["counts"]) if few else _largest(client["counts"], classes)
        shift = [Text(_shift(client.get("shift")))] if shifted else []
        table.add_row(Text(id), *parts, *shift, *held)
    return Group(table, Text("\n".join(_notes(entry))))


def _shift(shift: Mapping[str, Any] | None) -> str:
    return f"{shift['kind']} {shift['value']:g}" if shift else "none"


def _shaded(counts: Sequence[int]) -> list[Text]:
    """Numbers on a grey background that is lighter where there are more."""
    most = max(max(counts), 1)
    shades = [237 + round(14 * number / most) for number in counts]
    return [
        Text(str(number), f"{'black' if shade > 244 else 'white'} on color({shade})") if number else Text("·")
        for number, shade in zip(counts, shades, strict=True)
    ]


def _largest(counts: Sequence[int], classes: Sequence[str]) -> list[Text]:
    """The number of classes a client has, and its three largest."""
    ranked = sorted(range(len(counts)), key=lambda label: -counts[label])
    top = [f"{classes[label]} ({counts[label]})" for label in ranked[:3] if counts[label]]
    return [Text(str(sum(number > 0 for number in counts))), Text(", ".join(top))]


def _notes(entry: Mapping[str, Any]) -> list[str]:
    clients = entry["clients"]
    sizes = sorted(client["train"] for client in clients)
    notes = [
        f"{count(len(clients))} clients, {count(sum(sizes))} training samples, from {count(sizes[0])} to "
        f"{count(sizes[-1])} a client; split {entry['hash'][:12]}"
    ]
    if features := entry.get("features"):
        more = f", … ({len(features)} in all)" if len(features) > MOST_FEATURES else ""
        notes.append(f"learned from: {', '.join(features[:MOST_FEATURES])}{more}")
    if len(clients) > MOST_ROWS:
        notes.insert(0, f"the first {MOST_ROWS} clients are shown; --json has them all")
    return notes
