"""Confusion matrices, of all clients together and of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from potluck.report.pictures.representations import SHADES
from potluck.report.pictures.style import FAINT, INK, clean_axes, name_columns, note_below, own_style, shorten

Counts = npt.NDArray[np.int64]
MOST_ACROSS = 4  # small matrices side by side
LARGE, SMALL = 3.6, 1.5  # inches of the matrix of all clients, and of those of each
GAP, HEAD, FOOT = 0.2, 0.35, 0.35
MOST_NUMBERED = 12  # classes up to which the cells of the large matrix have numbers


@own_style()
def confusion_picture(tables: Mapping[str, Counts], classes: Sequence[str], note: str = "") -> Figure:
    """All clients together, large, and beside it a small matrix per client; a row is the true class.

    Colours are shares of the row, numbers are samples.
    """
    names = [shorten(name, 14) for name in classes]
    edge = 0.45 + 0.07 * max(map(len, names), default=1)
    columns = min(MOST_ACROSS, -(-len(tables) // 2)) if len(tables) > 1 else 0
    rows = -(-len(tables) // columns) if columns else 0
    width = edge + LARGE + (columns and GAP) + columns * (SMALL + GAP) + 0.15
    high = max(HEAD + LARGE + edge + 0.2, rows * (SMALL + HEAD)) + FOOT
    figure = Figure(figsize=(width, high))
    first = figure.add_axes((edge / width, 1 - (HEAD + LARGE) / high, LARGE / width, LARGE / high))
    together = np.sum(list(tables.values()), axis=0)
    _draw_matrix(first, together, "all clients" if columns else f"client {next(iter(tables))}")
    _name_classes(first, names, together)
    for place, (client, table) in enumerate(tables.items() if columns else ()):
        row, column = divmod(place, columns)
        x, y = edge + LARGE + 2 * GAP + column * (SMALL + GAP), high - (row + 1) * (SMALL + HEAD)
        axes = figure.add_axes((x / width, y / high, SMALL / width, SMALL / high))
        _draw_matrix(axes, table, f"client {client}")
        axes.set_xticks([])
        axes.set_yticks([])
    note_below(figure, note)
    return figure


def _draw_matrix(axes: Axes, table: Counts, title: str) -> None:
    clean_axes(axes)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest")
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT, linewidth=0.6)
    right = float(np.trace(table)) / max(int(table.sum()), 1)
    axes.set_title(f"{shorten(title, 24)}: {100 * right:.1f} %", loc="left", color=INK, fontsize=9)


def _name_classes(axes: Axes, names: Sequence[str], table: Counts) -> None:
    step = max(1, len(names) // 25)
    places = list(range(0, len(names), step))
    shown = [names[place] for place in places]
    slanted = max(map(len, shown), default=0) > 2
    axes.set_yticks(places, shown)
    name_columns(axes, places, names, slanted)
    axes.tick_params(labelcolor=INK, labelsize=8)
    axes.set_xlabel("predicted", color=FAINT)
    axes.set_ylabel("true class", color=FAINT)
    if len(names) > MOST_NUMBERED:
        return
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    for (row, column), value in np.ndenumerate(table):
        if value:
            color = "white" if shares[row, column] > 0.55 else INK
            axes.text(column, row, f"{value:,}", ha="center", va="center", fontsize=7.5, color=color)
