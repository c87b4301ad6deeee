"""Clients one by one: their scores, and what each gains over a reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from potluck.report.measures import ACCURACY, Measure
from potluck.report.pictures.differences import reference_of
from potluck.report.pictures.style import (
    FAINT,
    INK,
    LABEL,
    LEFT,
    PALETTE,
    PAPER,
    RULE,
    WIDTH,
    Comparison,
    are_slanted,
    clean_axes,
    depth_of,
    fits,
    framed,
    label_right,
    name_columns,
    note_below,
    own_style,
    score_axis,
    short_value,
    shorten,
)
from potluck.report.sheets import measure_in, ranked, row_label

MOST_BARS = 100  # of more clients an outline is drawn
MOST_PANELS = 6  # methods in the picture of gains
MOST_DOTS = 400  # in a row of the picture of gains; more are thinned out


@own_style()
def client_bars(accuracy: Mapping[str, float | None], measure: Measure = ACCURACY) -> Figure:
    """The score of each client, best first, and their mean as a line."""
    known = [(measure.scale * value, client) for client, value in accuracy.items() if value is not None]
    known.sort(key=lambda pair: measure.rank(pair[0]))
    mean = float(np.mean([value for value, _ in known])) if known else 0.0
    told = f"mean {short_value(mean, measure)}"
    names = [shorten(client, 40) for _, client in known]
    left, right = LEFT, max(1.0, 0.3 + 0.075 * len(told))
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
    score_axis(axes.yaxis, measure)
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


# --- gains client by client -----------------------------------------------------------------------------


@own_style()
def gain_bars(comparison: Comparison) -> Figure | None:
    """A panel per method and a bar per client: its difference to the reference, a mean over seeds, largest first.

    Of many methods the best are drawn. Losses are hatched, so that they stand out in grey, too.
    """
    measure = measure_in(comparison)
    every = [entry for entry in ranked(comparison["methods"], measure) if _mean_gains(entry)]
    if not every:
        return None
    entries, names = every[:MOST_PANELS], {client for entry in every for client in _mean_gains(entry)}
    room = (WIDTH - 0.75 - 1.6) / max(len(names), 4)
    deep = depth_of([shorten(name, 12) for name in names]) if _are_slanted(names, room) else 0.0
    each, foot = 1.55 + deep, 0.62
    height = each * len(entries) + foot
    figure = Figure(figsize=(WIDTH, height))
    for place, entry in enumerate(entries):
        bottom = foot + each * (len(entries) - 1 - place) + deep + 0.25
        box = (0.75 / WIDTH, bottom / height, 1 - 2.35 / WIDTH, (each - deep - 0.55) / height)
        axes = figure.add_axes(box, sharey=figure.axes[0] if figure.axes else None)
        clean_axes(axes)
        _draw_gain_bars(axes, entry, measure, room)
    for axes, entry in zip(figure.axes, entries, strict=True):
        gained = [measure.is_gain(value) for value in _mean_gains(entry).values()]
        told = f"{sum(gained):,} of {len(gained):,} gain"
        label_right(axes, float(np.mean(axes.get_ylim())), told, INK)
    unit = f"{measure.name} in points" if measure.is_share else measure.name
    reference = reference_of(comparison, entries)
    more = f" Shown: the best {len(entries)} of {len(every)} methods." if len(every) > len(entries) else ""
    several = ", a mean over seeds" if len(comparison.get("seeds") or ()) > 1 else ""
    note_below(figure, f"A bar per client: {unit} against {reference}{several}.{more}")
    return figure


def _are_slanted(names: Iterable[str], room: float) -> bool:
    return are_slanted([shorten(name, 12) for name in names], room)


def _mean_gains(entry: Mapping[str, Any]) -> dict[str, float]:
    """The difference of every client, a mean over seeds."""
    found: dict[str, list[float]] = {}
    for seed in ((entry.get("by_client") or {}).get("differences") or {}).values():
        for client, value in seed.items():
            if value is not None:
                found.setdefault(client, []).append(value)
    return {client: float(np.mean(values)) for client, values in found.items()}


def _draw_gain_bars(axes: Axes, entry: Mapping[str, Any], measure: Measure, room: float) -> None:
    gains = sorted(_mean_gains(entry).items(), key=lambda one: measure.rank(one[1]))
    heights = np.array([measure.scale * value for _, value in gains])
    better = np.array([measure.is_gain(value) for _, value in gains])
    thin = 0.0 if len(gains) > MOST_BARS else 0.78
    for some, color, hatch in ((better, PALETTE[0], ""), (~better, PALETTE[1], "////")):
        if some.any():
            places = np.flatnonzero(some)
            axes.bar(
                places,
                heights[some],
                width=thin or 1.0,
                color=color,
                hatch=hatch,
                edgecolor=PAPER,
                linewidth=0,
            )
    axes.axhline(0, color=INK, linewidth=1.0)
    axes.set_xlim(-0.6, max(len(gains), 4) - 0.4)
    names = [shorten(client, 12) for client, _ in gains]
    slanted = are_slanted(names, room)
    name_columns(axes, range(len(names) if slanted or fits(names, room) else 0), names, slanted)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0")
    )
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_title(shorten(row_label(entry), LABEL), loc="left", color=INK, fontsize=9.5)
