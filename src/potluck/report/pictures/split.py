"""Who has which class: bubbles, a column per client and a row per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure

from potluck.report.pictures.style import (
    FAINT,
    INK,
    PALETTE,
    RULE,
    SLANTED,
    WIDTH,
    are_slanted,
    clean_axes,
    depth_of,
    name_columns,
    note_below,
    own_style,
    shorten,
)
from potluck.report.split_chart import MOST, left_out_of, round_numbers

MOST_MARKS = 2000  # more marks are drawn as an image, to keep pages small
SMALL_CELL = 0.13  # inches; in smaller cells the areas of bubbles cannot be told apart


@dataclass(frozen=True)
class _Layout:
    """The sizes and positions in the split picture, in inches."""

    cell: float
    columns: int
    rows: int
    left: float
    below: float = 0.66

    bars = 0.8
    gap = 0.12
    above = 0.3
    right = 1.25

    @property
    def size(self) -> tuple[float, float]:
        width = self.left + self.cell * self.columns + self.right
        return width, self.below + self.cell * self.rows + self.gap + self.bars + self.above

    def box(self, bottom: float, height: float) -> tuple[float, float, float, float]:
        width, total = self.size
        return self.left / width, bottom / total, self.cell * self.columns / width, height / total


@own_style()
def split_picture(
    counts: Sequence[Sequence[int]],
    clients: Sequence[str],
    class_names: Sequence[str] | None = None,
    total: tuple[int, int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Figure:
    """Who has which class: a column per client, a row per class, and bubbles whose area is the number of samples.

    With many clients, the bubbles become small squares that are darker for more samples. The bars above are the
    clients' training samples. Of more than 100 clients or classes the first 100 are shown; `total` is the number
    of clients and classes, and `sizes` the samples of each client, where not all are given.
    """
    everything = np.asarray(counts, np.int64).reshape(len(clients), -1)
    table = everything[:MOST, :MOST]
    names = list(class_names or map(str, range(everything.shape[1])))[: table.shape[1]]
    shown = [shorten(client, 12) for client in clients[: table.shape[0]]]
    layout = _split_layout(table, names, shown)
    figure = Figure(figsize=layout.size)
    bubbles = figure.add_axes(layout.box(layout.below, layout.cell * layout.rows))
    bars = figure.add_axes(layout.box(layout.below + layout.cell * layout.rows + layout.gap, layout.bars))
    for axes in (bubbles, bars):
        clean_axes(axes)
        axes.set_xlim(-0.5, table.shape[0] - 0.5)
    _draw_split(bubbles, table, layout.cell)
    _split_ticks(bubbles, shown, names, layout.cell)
    own = everything.sum(1) if sizes is None else np.asarray(sizes, np.int64)
    _draw_sizes(bars, own[: table.shape[0]])
    _size_key(figure, layout, int(table.max(initial=0)))
    note_below(figure, left_out_of(total or everything.shape, table.shape))
    return figure


def _split_layout(table: npt.NDArray[np.int64], names: Sequence[str], clients: Sequence[str]) -> _Layout:
    left = 0.5 + 0.068 * max((len(shorten(name, 18)) for name in names), default=1)
    available = WIDTH - left - _Layout.right
    cell = float(np.clip(available / max(table.shape[0], 1), 0.068, 0.36))
    cell = min(cell, max(0.068, 7.5 / max(table.shape[1], 1)))
    below = _Layout.below + (depth_of(clients) if are_slanted(clients, cell) else 0.0)
    return _Layout(cell, table.shape[0], table.shape[1], left, below)


def _draw_marks(axes: Axes, x: Any, y: Any, share: npt.NDArray[np.float64], cell: float) -> None:
    """Draw a mark per value, a `share` of the largest: bubbles by area, or in small cells squares by opacity."""
    if cell < SMALL_CELL:
        strength = to_rgba_array([PALETTE[0]] * len(share), list(0.18 + 0.82 * share))
        marks = axes.scatter(x, y, s=(cell * 72) ** 2, marker="s", color=strength)
    else:
        area = (0.94 * cell * 72) ** 2 * share  # the largest just touches its neighbours
        marks = axes.scatter(x, y, s=np.maximum(area, 1.5), color=PALETTE[0], alpha=0.85, zorder=2)
    marks.set_linewidth(0)
    marks.set_rasterized(len(share) > MOST_MARKS)


def _draw_split(axes: Axes, table: npt.NDArray[np.int64], cell: float) -> None:
    client, label = np.nonzero(table)
    _draw_marks(axes, client, label, table[client, label] / table.max(initial=1), cell)
    axes.set_ylim(table.shape[1] - 0.5, -0.5)
    if cell > 0.15:
        axes.hlines(range(table.shape[1]), -0.5, table.shape[0] - 0.5, color=RULE, linewidth=0.6, zorder=1)


def _split_ticks(axes: Axes, clients: Sequence[str], names: Sequence[str], cell: float) -> None:
    slanted = are_slanted(clients, cell)
    needed = SLANTED if slanted else 0.075 * max(2, *(len(c) + 1 for c in clients), 2) if clients else 1
    name_columns(axes, _every(len(clients), cell, needed), clients, slanted)
    rows = _every(len(names), cell, 0.15)
    axes.set_yticks(rows, [shorten(names[i], 18) for i in rows])
    axes.tick_params(axis="both", labelsize=8, pad=4)
    axes.set_xlabel("client", color=FAINT, fontsize=9)
    axes.set_ylabel("label", color=FAINT, fontsize=9)


def _every(count: int, cell: float, needed: float) -> list[int]:
    """The positions to label when a label needs `needed` inches and positions are `cell` inches apart."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * cell >= needed or step == 100)
    return list(range(0, count, step))


def _draw_sizes(axes: Axes, samples: npt.NDArray[np.int64]) -> None:
    axes.bar(range(len(samples)), samples, width=0.72, color=FAINT, alpha=0.55, linewidth=0)
    axes.set_xticks([])
    top = int(samples.max(initial=1))
    axes.set_yticks([0, top], ["0", f"{top:,}"])
    axes.set_ylim(0, 1.02 * max(top, 1))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title("training samples", color=FAINT, fontsize=8.5, loc="left", pad=6)


def _size_key(figure: Figure, layout: _Layout, largest: int) -> None:
    """Draw the key to the areas, to the right of the bubbles."""
    key = figure.add_axes((0, 0, 1, 1))
    key.set_axis_off()
    width, height = layout.size
    key.set_xlim(0, width)
    key.set_ylim(0, height)
    step = max(layout.cell, 0.17) + 0.03
    top = layout.below + layout.cell * layout.rows - 0.1
    across = layout.left + layout.cell * layout.columns + 0.2
    key.text(across, top, "samples", color=FAINT, fontsize=8.5, va="center")
    for index, value in enumerate(round_numbers(largest)):
        height_at = top - (index + 1) * step - 0.04
        _draw_marks(key, [across + 0.15], [height_at], np.array([value / largest]), layout.cell)
        key.text(
            across + 0.15 + layout.cell / 2 + 0.1, height_at, f"{value:,}", color=INK, fontsize=8, va="center"
        )
