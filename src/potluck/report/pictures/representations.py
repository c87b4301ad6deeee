"""What models make of the same samples: how alike clients are by stage, and maps of their features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from potluck.report.pictures.style import (
    FAINT,
    INK,
    MARKS,
    PALETTE,
    WIDTH,
    clean_axes,
    note_below,
    own_style,
    shorten,
)

Floats = npt.NDArray[np.float64]
MOST_NUMBERED = 8  # clients up to which every cell has its number
ACROSS = 3  # heat maps side by side
NAME = 0.15  # inches that the name of a client needs
KEY_LINE = 0.185  # inches of a line in a list of marks
MOST_MARKS = 2000  # more points are drawn as an image
# From white to dark blue: lighter is always less, in grey too.
SHADES = LinearSegmentedColormap.from_list("potluck", ["#ffffff", "#9ecae1", PALETTE[0], "#08306b"])
# Okabe and Ito's and four more that differ from them in lightness, for up to ten classes.
CLASS_COLORS = (*PALETTE, "#b8a500", "#000000", "#7f7f7f", "#8b4513")


# --- linear CKA -----------------------------------------------------------------------------------------


@own_style()
def cka_picture(stages: Mapping[str, Floats], clients: Sequence[str], note: str = "") -> Figure:
    """A heat map per stage: the linear CKA of every two clients, 1 where they represent samples alike."""
    names = [shorten(client, 24) for client in clients]
    columns = min(ACROSS, len(stages))
    rows = -(-len(stages) // columns)
    left, foot, gap = 0.35 + 0.072 * max(map(len, names)), 0.5, 0.5
    below = 0.3 + 0.055 * max(map(len, names))
    side = min(3.2, max(1.5, (WIDTH + 1 - left - gap * columns - 0.7) / columns))
    width, high = left + columns * (side + gap) + 0.6, rows * (side + below + 0.45) + foot
    figure = Figure(figsize=(width, high))
    shown = None
    for place, (stage, values) in enumerate(stages.items()):
        row, column = divmod(place, columns)
        x, y = left + column * (side + gap), foot + (rows - 1 - row) * (side + below + 0.45) + below
        axes = figure.add_axes((x / width, y / high, side / width, side / high))
        clean_axes(axes)
        shown = axes.imshow(values, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest")
        _number_cells(axes, values)
        _name_cells(axes, names, side / len(names), first=column == 0)
        axes.set_title(
            f"{shorten(stage, 30)}: mean {_mean_apart(values):.2f}", loc="left", color=INK, fontsize=9.5
        )
    assert shown is not None
    bar = figure.add_axes((1 - 0.5 / width, (foot + below) / high, 0.12 / width, min(side, 2.4) / high))
    figure.colorbar(shown, cax=bar)
    clean_axes(bar)
    note_below(figure, note)
    return figure


def _mean_apart(values: Floats) -> float:
    """The mean over pairs of different clients."""
    return float(values[~np.eye(len(values), dtype=bool)].mean())


def _number_cells(axes: Axes, values: Floats) -> None:
    if len(values) > MOST_NUMBERED:
        return
    for (row, column), value in np.ndenumerate(values):
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=7,
            color="white" if value > 0.55 else INK,
        )


def _name_cells(axes: Axes, names: Sequence[str], cell: float, first: bool) -> None:
    step = math.ceil(NAME / cell)
    places = list(range(0, len(names), step))
    axes.set_xticks(
        places, [names[place] for place in places], rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set_yticks(places, [names[place] for place in places] if first else [])
    axes.tick_params(labelcolor=INK, labelsize=7.5)


# --- maps of features -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureMap:
    """Points in the plane: a row per client and sample."""

    x: Floats
    y: Floats
    client: npt.NDArray[np.int64]  # places in `clients`
    label: npt.NDArray[np.int64]  # places in `classes`


@own_style()
def map_picture(
    maps: Sequence[FeatureMap], clients: Sequence[str], classes: Sequence[str], how: str, note: str = ""
) -> Figure:
    """Features in the plane. One map is drawn twice: by class, then by client; several have a client each."""
    if len(maps) == 1:
        panels = [(maps[0], "by class", False), (maps[0], "by client", True)]
    else:
        panels = [(one, f"client {clients[int(one.client[0])]}", False) for one in maps]
    columns = min(2 if len(panels) == 2 else 3, len(panels))
    rows = -(-len(panels) // columns)
    side, left, right, foot, gap = 3.6 if columns == 2 else 2.6, 0.2, 1.75, 0.45, 0.25
    width, high = left + columns * (side + gap) + right, rows * (side + 0.4) + foot
    figure = Figure(figsize=(width, high))
    for place, (points, title, by_client) in enumerate(panels):
        row, column = divmod(place, columns)
        x, y = left + column * (side + gap), foot + (rows - 1 - row) * (side + 0.4)
        axes = figure.add_axes((x / width, y / high, side / width, side / high))
        _draw_map(axes, points, by_client)
        axes.set_title(f"{how}, {shorten(title, 40)}", loc="left", color=INK, fontsize=9.5)
    present = np.unique(np.concatenate([one.label for one in maps])).tolist()
    _map_keys(figure, {place: classes[place] for place in present}, clients if len(maps) == 1 else ())
    note_below(figure, note)
    return figure


def class_color(place: int) -> str:
    """The colour of a class; it comes again after ten."""
    return CLASS_COLORS[place % len(CLASS_COLORS)]


def class_mark(place: int) -> str:
    """The number of a class, as the mark of its samples: colours alone are lost in grey."""
    return f"${place}$"


def _draw_map(axes: Axes, points: FeatureMap, by_client: bool) -> None:
    clean_axes(axes)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=True, color="#d8dee4", linewidth=0.8)
    every = points.client if by_client else points.label
    for place in np.unique(every).tolist():
        own = every == place
        color = PALETTE[place % len(PALETTE)] if by_client else class_color(place)
        mark, area = (MARKS[place % len(MARKS)], 13) if by_client else (class_mark(place), 26)
        drawn = axes.scatter(points.x[own], points.y[own], color=color, marker=mark, s=area, alpha=0.8)
        drawn.set(linewidth=0 if by_client else 0.2, rasterized=len(points.x) > MOST_MARKS)
    axes.margins(0.04)


def _map_keys(figure: Figure, classes: Mapping[int, str], clients: Sequence[str]) -> None:
    """Two lists at the right: the marks of classes, as many as there is room for, and those of clients."""
    high = figure.get_figheight()
    most = max(1, int((high - 1.2 - KEY_LINE * len(clients)) / KEY_LINE))
    few = list(classes.items())[:most]
    marks = [_mark(class_mark(place), class_color(place), 0.2) for place, _ in few]
    more = f"class ({len(few)} of {len(classes)})" if len(few) < len(classes) else "class"
    key = _key(figure, marks, [name for _, name in few], more, 0.3)
    if clients:
        figure.add_artist(key)
        ids = range(len(clients))
        own = [_mark(MARKS[place % len(MARKS)], PALETTE[place % len(PALETTE)], 0) for place in ids]
        _key(figure, own, clients, "client", 0.62 + KEY_LINE * len(few))


def _mark(mark: str, color: str, edge: float) -> Line2D:
    return Line2D([], [], linestyle="", marker=mark, color=color, markeredgewidth=edge)


def _key(figure: Figure, marks: Sequence[Line2D], names: Sequence[str], title: str, below: float) -> Legend:
    """A list of marks with their names, so many inches below the top."""
    width, high = figure.get_size_inches()
    key = figure.legend(
        marks,
        [shorten(name, 18) for name in names],
        loc="upper left",
        bbox_to_anchor=(1 - 1.72 / width, 1 - below / high),
        title=title,
        frameon=False,
        fontsize=8,
        title_fontsize=8.5,
        handletextpad=0.2,
        borderpad=0,
        alignment="left",
        labelcolor=INK,
    )
    key.get_title().set_color(FAINT)
    return key
