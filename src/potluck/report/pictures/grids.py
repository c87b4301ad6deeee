"""Heat maps: a table of scores over settings, coloured by how good they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from potluck.report.grids import Grid, shares
from potluck.report.measures import Measure
from potluck.report.pictures.style import (
    FAINT,
    INK,
    LABEL,
    PALETTE,
    WIDTH,
    clean_axes,
    note_below,
    own_style,
    shorten,
)

FOOT = 0.3  # inches below a heat map, for a note


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
    share_of, top = shares(grids, measure), whole
    for grid, height in zip(grids, heights, strict=True):
        top -= height
        share = cell * len(grid.columns) / width
        rows = 0.34 * len(grid.rows)
        axes = figure.add_axes((left / width, (top + 0.55) / whole, share, rows / whole))
        _draw_grid(axes, grid, measure, share_of)
    note_below(figure, note)
    return figure


def _draw_grid(axes: Axes, grid: Grid, measure: Measure, share_of: Callable[[float], float]) -> None:
    clean_axes(axes)
    for row, values in enumerate(grid.values):
        for column, value in enumerate(values):
            if value is not None:
                color = to_rgba(PALETTE[0], 0.08 + 0.57 * share_of(value))
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
