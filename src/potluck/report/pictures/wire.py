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
LINE = 0.17  # inches of a line of text


@dataclass(frozen=True)
class _Layout:
    """How wide the parts are, in inches, and how much text fits above an arrow."""

    edge: float
    server: float
    middle: float
    client: float
    letters: int
    lines: int

    @property
    def left(self) -> float:
        return self.edge + self.server

    @property
    def right(self) -> float:
        return self.left + self.middle

    @property
    def width(self) -> float:
        return self.right + self.client + self.edge


WIDE = _Layout(0.25, 1.45, 5.6, 2.6, 90, 2)
NARROW = _Layout(0.04, 0.3, 3.24, 0.3, 48, 4)  # for a phone: what is said of a client is below


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
    contract: Mapping[str, Any],
    sizes: Sizes,
    clients: int,
    totals: Sequence[str] = (),
    note: str = "",
    narrow: bool = False,
) -> Figure:
    """Everything that crosses in one round: an arrow per message, with its tensors above and its size below.

    `totals` are lines that stand at the server. A narrow picture fits a phone.
    """
    layout = NARROW if narrow else WIDE
    arrows = [*_messages(contract, sizes, layout), *_records(contract, layout)]
    below = _below(contract, clients, totals) if narrow else []
    title = _wrapped(" · ".join(_named(contract)), 90 if not narrow else 52, 1 if not narrow else 3)
    top, foot = 0.33 + 0.22 * len(title), 0.45 if not narrow else 0.22 + LINE * len(below)
    high = max(2.4, sum(arrow.height for arrow in arrows) + 0.2) + top + foot
    figure = Figure(figsize=(layout.width, high))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, layout.width)
    axes.set_ylim(0, high)
    for number, line in enumerate(title):
        y = high - 0.3 - 0.22 * number
        axes.text(
            layout.edge, y, line, color=INK, fontsize=11 if not narrow else 9, weight="bold", va="center"
        )
    if narrow:
        _bars(axes, layout, foot, high - top - foot, clients)
        for number, line in enumerate(below):
            axes.text(layout.edge, foot - 0.2 - LINE * number, line, color=FAINT, fontsize=7.8, va="center")
    else:
        _box(axes, layout.edge, foot, layout.server, high - top - foot, "server", totals)
        _clients(axes, layout.right, foot, high - top - foot, contract, clients)
    y = high - top - 0.12
    for arrow in arrows:
        y = _draw_arrow(axes, arrow, y, layout)
    note_below(figure, note)
    return figure


def _named(contract: Mapping[str, Any]) -> list[str]:
    return [str(part) for part in (contract.get("method"), contract.get("citation")) if part]


def _messages(contract: Mapping[str, Any], sizes: Sizes, layout: _Layout) -> list[_Arrow]:
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
            above = tuple(
                line
                for field in fields[:MOST_FIELDS]
                for line in _wrapped(_field(field), layout.letters, layout.lines)
            )
            if len(fields) > MOST_FIELDS:
                above += (f"and {count(len(fields) - MOST_FIELDS)} more",)
            found.append(_Arrow(direction, above, below, head))
            first = False
    return found


def _field(field: Mapping[str, Any]) -> str:
    scalars = field.get("scalars")
    many = f" ({count(scalars)} scalar{'s' * (scalars != 1)})" if isinstance(scalars, int | float) else ""
    optional = ", optional" if field.get("optional") else ""
    return f"{field.get('name')}{many}{optional}: {field.get('meaning')}"


def _wrapped(text: str, letters: int, most: int) -> list[str]:
    """A text in a few lines, cut where it is longer."""
    return textwrap.wrap(shorten(text, most * letters), letters)[:most]


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


def _records(contract: Mapping[str, Any], layout: _Layout) -> list[_Arrow]:
    """The card and the report, as the names of what they hold."""
    found = []
    for name, when in (("card", "once, when a client joins"), ("report", "with every reply")):
        entries = contract.get(name) or ()
        names = ", ".join(str(one.get("name") if isinstance(one, Mapping) else one) for one in entries)
        if names:
            text = _wrapped(f"{name}, {when}: {names}", layout.letters, layout.lines)
            found.append(_Arrow("up", tuple(text), "", small=True))
    return found


def _draw_arrow(axes: Axes, arrow: _Arrow, y: float, layout: _Layout) -> float:
    """Draw one arrow with its texts from `y` downwards, and give where the next begins."""
    left, right = layout.left, layout.right
    middle = left + (0.2 if layout is WIDE else 0.1)
    color = FAINT if arrow.small else COLORS[arrow.direction]
    if arrow.head:
        y -= 0.2
        axes.text(
            middle,
            y,
            shorten(arrow.head, 44 if layout is NARROW else 60),
            color=INK,
            fontsize=9,
            weight="bold",
            va="center",
        )
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
    width = WIDE.client - 0.3
    for shift in (0.16, 0.08) if clients > 1 else ():
        _box(axes, x + shift, y - shift / 2, width, height, "", [])
    model, others, stays = _client(contract, clients)
    lines = [model, *others]
    if stays:
        lines += ["", "never leaves:", *textwrap.wrap(shorten(stays, 200), 30)]
    _box(axes, x, y, width, height, _client_name(contract), lines)


def _client(contract: Mapping[str, Any], clients: int) -> tuple[str, list[str], str]:
    """The model of the client of the sizes, how many others there are, and what never leaves it."""
    model = shorten(str((contract.get("client") or {}).get("model") or ""), 30)
    others = [f"and {count(clients - 1)} more client{'s' * (clients > 2)}"] if clients > 1 else []
    return model, others, ", ".join(str(one) for one in contract.get("stays") or ())


def _client_name(contract: Mapping[str, Any]) -> str:
    return f"client {shorten(str((contract.get('client') or {}).get('id', '')), 18)}"


def _bars(axes: Axes, layout: _Layout, y: float, height: float, clients: int) -> None:
    """Server and clients of a narrow picture, as bars at its sides."""
    for x, name in ((layout.edge, "server"), (layout.right, "clients" if clients > 1 else "client")):
        _box(axes, x, y, layout.server, height, "", [])
        place = x + layout.server / 2, y + height / 2
        axes.text(*place, name, color=INK, fontsize=10, weight="bold", rotation=90, va="center", ha="center")


def _below(contract: Mapping[str, Any], clients: int, totals: Sequence[str]) -> list[str]:
    """What a wide picture says inside its boxes."""
    model, others, stays = _client(contract, clients)
    told = ", ".join([f"{_client_name(contract)}: {model}", *others])
    texts = [told, f"never leaves a client: {stays}" if stays else "", *totals]
    return [line for text in texts for line in _wrapped(text, 56, 5)]


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
