"""The wire as a drawing: the server, the clients, and what crosses between them, with sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from potluck.report.format import count, size
from potluck.report.pictures.style import FAINT, INK, PALETTE, PAPER, note_below, own_style, shorten

Sizes = Mapping[
    tuple[str, str], tuple[float, float]
]  # step and direction → least and most bytes of a message
WHEN = {"train": "every round", "setup": "once, where the server lacks it", "evaluate": "to evaluate"}
COLORS = {"down": PALETTE[0], "up": PALETTE[1]}
MOST_STEPS, MOST_FIELDS = 12, 10
SERVER, MIDDLE, CLIENT = 1.45, 5.6, 2.5  # inches across
LINE = 0.17  # inches of a line of text
LETTERS, MOST_LINES = 90, 2  # of a text above an arrow


@dataclass(frozen=True)
class _Arrow:
    """One message, or one of the two small records: where it goes, what it says above and below."""

    direction: str
    above: tuple[str, ...]
    below: str
    head: str = ""  # the step it belongs to, where it is its first
    small: bool = False

    @property
    def height(self) -> float:
        return LINE * (len(self.above) + bool(self.below)) + (0.28 if self.head else 0.0) + 0.24


@own_style()
def wire_picture(
    contract: Mapping[str, Any], sizes: Sizes, clients: int, totals: Sequence[str] = (), note: str = ""
) -> Figure:
    """Everything that crosses in one round: an arrow per message, with its tensors above and its size below.

    `totals` are lines that stand at the server.
    """
    arrows = [*_messages(contract, sizes), *_records(contract)]
    width, top, foot = 0.25 + SERVER + MIDDLE + CLIENT + 0.35, 0.55, 0.45
    high = max(2.4, sum(arrow.height for arrow in arrows) + 0.2) + top + foot
    figure = Figure(figsize=(width, high))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(0, high)
    title = " · ".join(str(part) for part in (contract.get("method"), contract.get("citation")) if part)
    axes.text(0.25, high - 0.3, shorten(title, 90), color=INK, fontsize=11, weight="bold", va="center")
    left, right = 0.25 + SERVER, 0.25 + SERVER + MIDDLE
    _box(axes, 0.25, foot, SERVER, high - top - foot, "server", totals)
    _clients(axes, right, foot, high - top - foot, contract, clients)
    y = high - top - 0.12
    for arrow in arrows:
        y = _draw_arrow(axes, arrow, y, left, right)
    note_below(figure, note)
    return figure


def _messages(contract: Mapping[str, Any], sizes: Sizes) -> list[_Arrow]:
    found = []
    for step in (contract.get("steps") or ())[:MOST_STEPS]:
        first = True
        for direction in ("down", "up"):
            fields = step.get(direction) or ()
            if not fields:
                continue
            head = (
                f"{step.get('name')}, {WHEN.get(str(step.get('purpose')), step.get('purpose'))}"
                if first
                else ""
            )
            times = (step.get("times") or {}).get(direction)
            below = _size(sizes, (str(step.get("name")), direction), fields, times)
            above = tuple(line for field in fields[:MOST_FIELDS] for line in _wrapped(_field(field)))
            if len(fields) > MOST_FIELDS:
                above += (f"and {count(len(fields) - MOST_FIELDS)} more",)
            found.append(_Arrow(direction, above, below, head))
            first = False
    return found


def _field(field: Mapping[str, Any]) -> str:
    scalars = field.get("scalars")
    many = f" ({count(scalars)} scalars)" if isinstance(scalars, int | float) else ""
    optional = ", optional" if field.get("optional") else ""
    return f"{field.get('name')}{many}{optional}: {field.get('meaning')}"


def _wrapped(text: str) -> list[str]:
    """A text in a few lines, cut where it is longer."""
    lines = textwrap.wrap(shorten(text, MOST_LINES * LETTERS), LETTERS)
    return lines[:MOST_LINES]


def _size(sizes: Sizes, message: tuple[str, str], fields: Sequence[Mapping[str, Any]], times: Any) -> str:
    """How large a message is: as the ledger says or, before anything was sent, by its fields."""
    if message in sizes:
        low, high = sizes[message]
        told = (
            f"{size(low)} a message" if size(low) == size(high) else f"{size(low)} to {size(high)} a message"
        )
    elif sizes:
        return "not sent in this run"
    elif all(isinstance(field.get("bytes"), int | float) for field in fields):
        told = f"{size(sum(field['bytes'] for field in fields))} of numbers"
    else:
        told = ""
    often = f"{count(times)} times a round" if times else ""
    return ", ".join(part for part in (told, often) if part)


def _records(contract: Mapping[str, Any]) -> list[_Arrow]:
    """The card and the report, as the names of what they hold."""
    found = []
    for name, when in (("card", "once, when a client joins"), ("report", "with every reply")):
        entries = contract.get(name) or ()
        names = ", ".join(str(one.get("name") if isinstance(one, Mapping) else one) for one in entries)
        if names:
            found.append(_Arrow("up", tuple(_wrapped(f"{name}, {when}: {names}")), "", small=True))
    return found


def _draw_arrow(axes: Axes, arrow: _Arrow, y: float, left: float, right: float) -> float:
    """Draw one arrow with its texts from `y` downwards, and give where the next begins."""
    middle, color = left + 0.2, FAINT if arrow.small else COLORS[arrow.direction]
    if arrow.head:
        y -= 0.2
        axes.text(middle, y, shorten(arrow.head, 60), color=INK, fontsize=9, weight="bold", va="center")
        y -= 0.08
    for text in arrow.above:
        y -= LINE
        axes.text(middle, y + 0.02, text, color=FAINT if arrow.small else INK, fontsize=7.8, va="center")
    y -= 0.11
    ends = ((left + 0.06, y), (right - 0.06, y))
    start, stop = ends if arrow.direction == "down" else ends[::-1]
    dash = ":" if arrow.small else (0, (4, 2)) if arrow.direction == "up" else "-"
    axes.plot(
        *zip(start, stop, strict=True), color=color, linestyle=dash, linewidth=1.0 if arrow.small else 1.8
    )
    head = ">" if arrow.direction == "down" else "<"
    axes.plot(*stop, marker=head, color=color, markersize=5 if arrow.small else 7)
    if arrow.below:
        y -= LINE
        across = right - 0.2 if arrow.direction == "down" else middle
        side = "right" if arrow.direction == "down" else "left"
        axes.text(
            across, y + 0.02, arrow.below, color=color, fontsize=8.2, weight="bold", va="center", ha=side
        )
    return y - 0.13


def _clients(
    axes: Axes, x: float, y: float, height: float, contract: Mapping[str, Any], clients: int
) -> None:
    """The client of the sizes, others behind it, and what never leaves it."""
    client = contract.get("client") or {}
    for shift in (0.16, 0.08) if clients > 1 else ():
        _box(axes, x + shift, y - shift / 2, CLIENT - 0.2, height, "", [])
    stays = [str(one) for one in contract.get("stays") or ()]
    lines = [shorten(str(client.get("model") or ""), 30)]
    if clients > 1:
        lines.append(f"and {count(clients - 1)} more client{'s' * (clients > 2)}")
    if stays:
        lines += ["", "never leaves:", *textwrap.wrap(shorten(", ".join(stays), 200), 30)]
    _box(axes, x, y, CLIENT - 0.2, height, f"client {shorten(str(client.get('id', '')), 18)}", lines)


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, lines: Sequence[str]
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=PAPER,
            edgecolor=INK,
            linewidth=1.2,
        )
    )
    if title:
        axes.text(x + 0.14, y + height - 0.24, title, color=INK, fontsize=10, weight="bold", va="center")
    for number, line in enumerate(lines):
        axes.text(x + 0.14, y + height - 0.48 - number * 0.18, line, color=FAINT, fontsize=8.2, va="center")
