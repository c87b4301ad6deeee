"""Who has which class, as a page draws it: bubbles, a column per client and a row per class.

Their places stretch with the page. Their sizes are shares of a cell, which the page's style turns into pixels, so
that bubbles stay round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from potluck.report.charts import Box, Tick, bars_of, dots_of, percent_of, places_in
from potluck.report.format import shortened
from potluck.report.log import Floats

MOST = 100  # clients and classes; the chart says what it leaves out
BUBBLES = 40  # clients; of more, cells are filled, as bubbles would be too small to compare
STEPS = 12  # sizes that are told apart
ROW, TALL, NARROW = (
    22,
    440,
    6,
)  # pixels: a row, the height from which rows become narrower, and the least of a row
COLUMN = 36  # pixels of a column at most, where the names below need no more
MINUS = re.compile(r"(?<![\w-])-(?=\.?\d)")  # of a number
ON_A_PHONE = 36  # characters that fit below the columns

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SplitChart:
    """Bubbles, the clients' numbers of samples above them, and the key to the sizes."""

    columns: int
    tall: int  # pixels
    row: float  # pixels
    filled: bool  # cells by strength in place of bubbles by area
    marks: Sequence[tuple[float, str]]  # a size as a share of a cell, and where the bubbles of this size are
    bars: str
    most: str  # samples of the largest client
    clients: Sequence[Tick]
    classes: Sequence[Tick]
    left: int  # pixels for the names of classes
    wide: int  # pixels, a column at most
    key: Sequence[tuple[float, str]]
    left_out: str


def split_chart(
    counts: Sequence[Sequence[int]], clients: Sequence[str], names: Sequence[str] | None, total: int | None
) -> SplitChart:
    """The training samples of every client by class; `total` is the number of clients, where not all are given."""
    everything = np.asarray(counts, np.int64).reshape(len(clients), len(counts[0]) if counts else 0)
    table = everything[:MOST, :MOST]
    columns, rows = table.shape
    largest, samples = int(table.max(initial=0)), everything[:columns].sum(1)
    box = (0.0, float(max(columns, 1)), 0.0, float(max(samples.max(initial=1), 1)))
    tall = max(min(ROW * rows, TALL), NARROW * rows)
    labels = _classes((names or [*map(str, range(everything.shape[1]))])[:rows], tall)
    everyone = (everything.shape[0] if total is None else total, everything.shape[1])
    shown = _clients(clients[:columns])
    longest = max((len(name) for _, name in shown), default=0)
    return SplitChart(
        columns=columns,
        tall=tall,
        row=round(tall / max(rows, 1), 2),
        filled=columns > BUBBLES,
        marks=_marks(table, largest, columns > BUBBLES),
        bars=bars_of(samples.tolist(), box),
        most=f"{samples.max(initial=0):,}",
        clients=shown,
        classes=labels,
        left=20 + 8 * max((len(name) for _, name in labels), default=0),
        wide=max(COLUMN, -(-(12 + 8 * longest) * len(shown) // max(columns, 1))),
        key=[(_size(value, largest), f"{value:,}") for value in round_numbers(largest)],
        left_out=left_out_of(everyone, table.shape),
    )


def _size(value: int, largest: int) -> float:
    """The width of a bubble whose area is the share of a value, in a few steps; nobody's samples vanish."""
    return max(1, round(STEPS * math.sqrt(value / largest))) / STEPS


def _marks(table: Counts, largest: int, filled: bool) -> list[tuple[float, str]]:
    columns, rows = table.shape
    box = (0.0, float(max(columns, 1)), 0.0, float(max(rows, 1)))
    found: dict[float, list[tuple[int, int]]] = {}
    for column, row in np.argwhere(table).tolist():
        found.setdefault(_size(int(table[column, row]), largest), []).append((column, row))
    draw = _rectangles if filled else _dots
    return [(round(size, 3), draw(np.array(found[size], float), box)) for size in sorted(found)]


def _dots(cells: Floats, box: Box) -> str:
    return dots_of(places_in(cells[:, 0] + 0.5, box[3] - cells[:, 1] - 0.5, box))


def _rectangles(cells: Floats, box: Box) -> str:
    starts = places_in(cells[:, 0], box[3] - cells[:, 1], box)
    ends = places_in(cells[:, 0] + 1, box[3] - cells[:, 1] - 1, box)
    return "".join(
        f"M{x} {y}H{right}V{foot}H{x}Z" for (x, y), (right, foot) in zip(starts, ends, strict=True)
    )


def _clients(names: Sequence[str]) -> list[Tick]:
    """Names below their columns, as many as fit on a phone."""
    short = [shortened(name, 12) for name in names]
    fitting = (step for step in (1, 2, 5, 10, 20) if sum(len(one) + 2 for one in short[::step]) <= ON_A_PHONE)
    step = next(fitting, 50)
    return [(percent_of(place + 0.5, 0, len(names)), short[place]) for place in range(0, len(names), step)]


def _classes(names: Sequence[str], tall: int) -> list[Tick]:
    """Names beside their rows, as many as have room."""
    step = -(-16 * len(names) // tall) if tall else 1
    return [
        (percent_of(place + 0.5, 0, len(names)), shortened(_signed(names[place]), 15))
        for place in range(0, len(names), step)
    ]


def _signed(name: str) -> str:
    """A name with the sign of minus before its numbers: `from −2.16`."""
    return MINUS.sub("\N{MINUS SIGN}", name)


def round_numbers(largest: int) -> list[int]:
    """Up to three round values for the key, largest first: about the largest, a third and a tenth of it."""
    values = []
    for share in (1.0, 0.35, 0.08):
        target = max(1, int(largest * share))
        scale = 10 ** (len(str(target)) - 1)
        values.append(target // scale * scale)
    return list(dict.fromkeys(values)) if largest else []


def left_out_of(all_of: tuple[int, int], shown: tuple[int, ...]) -> str:
    """What is not shown, in a sentence; empty where everything is."""
    parts = [
        f"the first {few:,} of {many:,} {word}"
        for many, few, word in zip(all_of, shown, ("clients", "classes"), strict=True)
        if few < many
    ]
    return f"Shown: {' and '.join(parts)}." if parts else ""
