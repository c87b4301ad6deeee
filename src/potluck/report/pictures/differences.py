"""Paired differences to a reference, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from potluck.report.measures import Measure
from potluck.report.pictures.style import (
    FAINT,
    GREY,
    INK,
    LABEL,
    PAPER,
    RULE,
    WIDTH,
    framed,
    label_right,
    own_style,
    room_for,
    row_styles,
    shorten,
)
from potluck.report.sheets import measure_in, reference_label, references_of, row_label, rows_of


def axes_of_differences(
    axes: Axes,
    entries: Sequence[Mapping[str, Any]],
    measure: Measure,
    comparison: Mapping[str, Any],
    note: str = "",
) -> None:
    """A row per entry from the top down, and along the bottom the difference to what they are compared with."""
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_yticks(range(len(entries)), [shorten(row_label(entry), LABEL) for entry in entries])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    reference = reference_of(comparison, entries)
    unit = "points" if measure.is_share else measure.name
    axes.set_xlabel(f"{unit} against {reference}{note}", color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))


def reference_of(comparison: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """What the differences of some entries are taken to, in words."""
    names = references_of(entries) or [str(comparison.get("baseline", "local"))]
    return reference_label(names[0], comparison) if len(names) == 1 else "the Local of its settings"


@own_style()
def interval_picture(comparison: Mapping[str, Any]) -> Figure:
    """Each method's paired difference to the baseline with its interval; ties are hollow."""
    measure = measure_in(comparison)
    entries = [row for row in rows_of(comparison) if row.get("difference")]
    entries.sort(key=lambda entry: measure.rank(entry["difference"]["mean"]))
    figure, axes = framed(WIDTH, 1.05 + 0.3 * len(entries), left=room_for(entries), right=1.4)
    axes.axvline(0, color=INK, linewidth=1.2, zorder=1)
    styles = row_styles(comparison)
    for row, entry in enumerate(entries):
        color = styles.get(row_label(entry), GREY).color
        _draw_interval(axes, row, entry["difference"], measure, color)
    axes_of_differences(axes, entries, measure, comparison)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0")
    )
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    return figure


def _draw_interval(axes: Axes, row: int, against: Mapping[str, Any], measure: Measure, color: str) -> None:
    if against["low"] is not None:
        ends = [measure.scale * against["low"], measure.scale * against["high"]]
        axes.plot(ends, [row, row], color=color, linewidth=2, solid_capstyle="round", zorder=2)
    face = PAPER if against["tie"] else color
    middle = measure.scale * against["mean"]
    axes.plot(
        [middle], [row], "o", color=color, markerfacecolor=face, markersize=6.5, markeredgewidth=1.6, zorder=3
    )
    label_right(axes, row, measure.difference(against["mean"]) + ("  tie" if against["tie"] else ""), color)
