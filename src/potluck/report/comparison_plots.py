"""Pictures of comparisons and sweeps: scores over rounds and against bytes, clients one by one, heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from potluck.report.format import method_label, size
from potluck.report.log import Curve
from potluck.report.measures import Measure
from potluck.report.plots import (
    FAINT,
    GREY,
    INK,
    LABEL,
    LABEL_GAP,
    PALETTE,
    RULE,
    WIDTH,
    Styles,
    accuracy_over_rounds,
    axes_of_differences,
    clean_axes,
    framed,
    label_right,
    note_below,
    own_style,
    room_for,
    row_styles,
    score_ticks,
    shorten,
    with_names,
    write_ends,
)
from potluck.report.sheets import measure_in, ranked, row_label, rows_of

Comparison = Mapping[str, Any]
FOOT = 0.3  # inches below a heat map, for a note
MOST_CLIENTS = 400  # dots in a row of the picture of gains; more are thinned out


def curves_picture(comparison: Comparison) -> Figure | None:
    """The scores of all methods over rounds, each labelled with its mode; None where nothing was logged."""
    rows = rows_of(comparison)
    curves = [_curve(row) for row in rows if row.get("curve")]
    baseline = str(comparison.get("baseline", "local"))
    reference = next((row_label(row) for row in rows if row["method"] == baseline), None)
    styles = row_styles(comparison)
    return accuracy_over_rounds(curves, reference, measure_in(comparison), styles) if curves else None


def _curve(entry: Mapping[str, Any]) -> Curve:
    curve = entry["curve"]
    low, high = (np.array(curve[end], float) if curve.get(end) else None for end in ("low", "high"))
    return Curve(
        row_label(entry), np.array(curve["rounds"], np.int64), np.array(curve["mean"], float), low, high
    )


# --- against bytes --------------------------------------------------------------------------------------


@own_style()
def bytes_picture(comparison: Comparison) -> Figure | None:
    """The score over what all clients have sent and received; a method that sends nothing is a dashed line."""
    measure = measure_in(comparison)
    rows = [row for row in rows_of(comparison) if row.get("curve")]
    if not any(map(_sent, rows)):
        return None
    styles = row_styles(comparison)
    ends = _ends(rows, styles, measure)
    longest = max(len(name) for _, name, _ in ends)
    height = max(3.7, 0.9 + LABEL_GAP * len(ends))
    figure, axes = with_names(height, 0.35 + 0.076 * longest)
    for row in rows:
        style, curve = styles.get(row_label(row), GREY), row["curve"]
        x, y = np.array(curve["bytes"], float), measure.scale * np.array(curve["mean"], float)
        if _sent(row):
            (drawn,) = axes.plot(x, y, color=style.color, linestyle=style.dash, linewidth=2, zorder=3)
            drawn.set(marker="o" if len(x) <= 12 else "", markersize=4.5)
        else:
            axes.axhline(y[-1], color=style.color, linewidth=1.2, linestyle="--", zorder=2)
    _bytes_axis(axes, measure, [one for row in rows if _sent(row) for one in row["curve"]["bytes"] if one])
    write_ends(axes, ends)
    return figure


def _ends(
    rows: Sequence[Mapping[str, Any]], styles: Styles, measure: Measure
) -> list[tuple[float, str, str]]:
    """The height, the name and the colour of every line's end; equal lines have one name together."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(str((row["curve"]["bytes"], row["curve"]["mean"])), []).append(row)
    ends = []
    for equal in found.values():
        curve = equal[0]["curve"]
        sent = size(curve["bytes"][-1]) if _sent(equal[0]) else "nothing"
        name = shorten(" = ".join(map(row_label, equal)), LABEL)
        color = styles.get(row_label(equal[0]), GREY).color
        ends.append((measure.scale * float(curve["mean"][-1]), f"{name}, {sent}", color))
    return ends


def _sent(entry: Mapping[str, Any]) -> bool:
    return any((entry.get("curve") or {}).get("bytes") or ())


def _bytes_axis(axes: Axes, measure: Measure, sent: Sequence[float]) -> None:
    """A logarithmic axis with several ticks, however little the sizes differ."""
    axes.set_xscale("log")
    ratio = max(sent) / min(sent)
    steps = (1.0,) if ratio > 1000 else (1.0, 3.0) if ratio > 30 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(
        LogLocator(subs=steps, numticks=8) if ratio > 10 else MaxNLocator(nbins=5, min_n_ticks=2)
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.set_xlabel("sent and received for training by all clients together", color=FAINT)
    score_ticks(axes.yaxis, measure)
    axes.grid(axis="y", color=RULE, linewidth=0.8)


# --- clients --------------------------------------------------------------------------------------------


@own_style()
def gains_picture(comparison: Comparison) -> Figure | None:
    """A row per method and a dot per client and seed: its difference to the reference. The bar is the median."""
    measure = measure_in(comparison)
    entries = [entry for entry in ranked(comparison["methods"], measure) if entry.get("by_client")]
    if not entries:
        return None
    figure, axes = framed(WIDTH, 1.05 + 0.36 * len(entries), left=room_for(entries), right=1.6)
    axes.axvline(0, color=INK, linewidth=1.2, zorder=1)
    styles = row_styles(comparison)
    for row, entry in enumerate(entries):
        color = styles.get(row_label(entry), GREY).color
        _draw_gains(axes, row, entry["by_client"], measure, color)
    axes_of_differences(axes, entries, measure, comparison, ", a dot per client and seed")
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    return figure


def _draw_gains(axes: Axes, row: int, by_client: Mapping[str, Any], measure: Measure, color: str) -> None:
    values = [
        value for seed in by_client["differences"].values() for value in seed.values() if value is not None
    ]
    shown = measure.scale * np.array(values[:: max(1, len(values) // MOST_CLIENTS)], float)
    if not len(shown):
        return
    shift = 0.24 * np.sin(2.4 * np.arange(len(shown)))  # equal differences lie beside each other
    axes.scatter(shown, row + shift, s=16, color=color, alpha=0.7, linewidth=0, zorder=2)
    median = measure.scale * float(np.median(values))
    axes.plot([median, median], [row - 0.32, row + 0.32], color=INK, linewidth=2, zorder=3)
    label_right(axes, row, f"{by_client['better']:,} of {len(values):,} gain", FAINT)


# --- heat maps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A table of values to be drawn as a heat map; None where there is no value."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    row_name: str = ""
    column_name: str = ""


def grids(
    changes: Mapping[str, Mapping[str, Any]], scores: Mapping[str, Mapping[str, float | None]]
) -> list[Grid]:
    """Heat maps over settings: `changes` has the values of each setting by key, `scores` a row per name.

    Two keys give a matrix for each name; anything else one matrix, with a row per name and a column per setting.
    """
    keys = list(dict.fromkeys(key for each in changes.values() for key in each))
    same = all(set(each) == set(keys) for each in changes.values())
    if len(keys) == 2 and same:
        return [_matrix(name, keys, changes, row) for name, row in scores.items()]
    columns = tuple(changes)
    values = tuple(tuple(row.get(setting) for setting in columns) for row in scores.values())
    return [Grid("", tuple(map(method_label, scores)), columns, values)]


def _matrix(
    name: str, keys: Sequence[str], changes: Mapping[str, Mapping[str, Any]], row: Mapping[str, float | None]
) -> Grid:
    down, across = (list(dict.fromkeys(str(each[key]) for each in changes.values())) for key in keys)
    place = {(str(each[keys[0]]), str(each[keys[1]])): setting for setting, each in changes.items()}
    values = tuple(tuple(row.get(place.get((one, other), "")) for other in across) for one in down)
    return Grid(method_label(name), tuple(down), tuple(across), values, keys[0], keys[1])


@own_style()
def heat_map(grids: Sequence[Grid], measure: Measure, note: str = "") -> Figure:
    """Tables of scores, one below the other; the better a value, the stronger its colour. `note` stands below."""
    cells = [(len(grid.rows), len(grid.columns)) for grid in grids]
    heights = [0.95 + 0.34 * rows for rows, _ in cells]
    longest = max(len(shorten(name, LABEL)) for grid in grids for name in (*grid.rows, grid.row_name))
    left, right = max(1.2, 0.4 + 0.074 * longest), 0.3
    across = max(columns for _, columns in cells)
    cell = min(max(0.8, (WIDTH - left - right) / across), 1.1)
    width = left + right + cell * across
    width, whole = max(width, 0.4 + 0.066 * len(note)), sum(heights) + FOOT
    figure = Figure(figsize=(width, whole))
    known = [value for grid in grids for row in grid.values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    top = whole
    for grid, height in zip(grids, heights, strict=True):
        top -= height
        share = cell * len(grid.columns) / width
        rows = 0.34 * len(grid.rows)
        axes = figure.add_axes((left / width, (top + 0.55) / whole, share, rows / whole))
        _draw_grid(axes, grid, measure, low, high)
    note_below(figure, note)
    return figure


def _draw_grid(axes: Axes, grid: Grid, measure: Measure, low: float, high: float) -> None:
    clean_axes(axes)
    for row, values in enumerate(grid.values):
        for column, value in enumerate(values):
            if value is not None:
                share = (value - low) / (high - low) if high > low else 0.5
                share = share if measure.higher_is_better else 1 - share
                color = to_rgba(PALETTE[0], 0.08 + 0.57 * share)
                axes.bar(column, 1, width=0.98, bottom=row - 0.49, color=color, linewidth=0)
            axes.text(column, row, measure.value(value), ha="center", va="center", color=INK, fontsize=8.5)
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(grid.columns)), [shorten(name, 16) for name in grid.columns])
    axes.set_yticks(range(len(grid.rows)), [shorten(name, LABEL) for name in grid.rows])
    axes.tick_params(labelcolor=INK, labelsize=8.5)
    axes.set_title(shorten(grid.title, 60), loc="left", color=INK, fontsize=9.5)
    axes.set_xlabel(shorten(grid.column_name, 40), color=FAINT)
    axes.set_ylabel(shorten(grid.row_name, 24), color=FAINT, rotation=0, ha="right", va="center", labelpad=6)
