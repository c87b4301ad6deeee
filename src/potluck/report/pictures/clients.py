"""Clients one by one: their scores, and what each gains over a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from potluck.report.measures import ACCURACY, Measure
from potluck.report.pictures.differences import axes_of_differences
from potluck.report.pictures.style import (
    FAINT,
    GREY,
    INK,
    PALETTE,
    RULE,
    WIDTH,
    Comparison,
    are_slanted,
    depth_of,
    fits,
    framed,
    label_right,
    name_columns,
    own_style,
    room_for,
    row_styles,
    score_ticks,
    short_value,
    shorten,
)
from potluck.report.sheets import measure_in, ranked, row_label

MOST_BARS = 100  # of more clients an outline is drawn
MOST_DOTS = 400  # in a row of the picture of gains; more are thinned out


@own_style()
def client_bars(accuracy: Mapping[str, float | None], measure: Measure = ACCURACY) -> Figure:
    """The score of each client, best first, and their mean as a line."""
    known = [(measure.scale * value, client) for client, value in accuracy.items() if value is not None]
    known.sort(key=lambda pair: measure.rank(pair[0]))
    mean = float(np.mean([value for value, _ in known])) if known else 0.0
    told = f"mean {short_value(mean, measure)}"
    names = [shorten(client, 40) for _, client in known]
    left, right = 0.6, max(1.0, 0.3 + 0.075 * len(told))
    width = min(WIDTH - left - right, 0.5 * max(len(known), 3))
    room = width / max(len(known), 3)
    slanted = are_slanted(names, room)
    deep = depth_of(names) if slanted else 0.0
    left = max(left, 0.15 + deep - room / 2)  # the first name reaches to the left of its bar
    figure, axes = framed(width + left + right, 2.5 + deep, right=right, left=left, below=0.5 + deep)
    _draw_bars(axes, [value for value, _ in known])
    axes.set_xlim(-0.6, max(len(known), 3) - 0.4)
    if measure.is_share:
        axes.set_ylim(0, 100.4)
    score_ticks(axes.yaxis, measure)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    every = range(len(known) if slanted or fits(names, room) else 0)
    name_columns(axes, every, names, slanted)
    axes.set_xlabel("clients, best to worst", color=FAINT)
    if known:
        axes.axhline(mean, color=INK, linewidth=1.2, zorder=3)
        label_right(axes, mean, told, INK)
    return figure


def _draw_bars(axes: Axes, heights: Sequence[float]) -> None:
    """Draw bars, or one filled outline where bars would be thinner than their gaps."""
    if len(heights) <= MOST_BARS:
        axes.bar(range(len(heights)), heights, width=0.78, color=PALETTE[0], linewidth=0, zorder=2)
    else:
        edges = np.arange(len(heights) + 1) - 0.5
        axes.stairs(heights, edges, fill=True, color=PALETTE[0], linewidth=0, zorder=2)


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
    shown = measure.scale * np.array(values[:: max(1, len(values) // MOST_DOTS)], float)
    if not len(shown):
        return
    shift = 0.24 * np.sin(2.4 * np.arange(len(shown)))  # equal differences lie beside each other
    axes.scatter(shown, row + shift, s=16, color=color, alpha=0.7, linewidth=0, zorder=2)
    median = measure.scale * float(np.median(values))
    axes.plot([median, median], [row - 0.32, row + 0.32], color=INK, linewidth=2, zorder=3)
    label_right(axes, row, f"{by_client['better']:,} of {len(values):,} gain", FAINT)
