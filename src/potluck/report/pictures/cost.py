"""What a score costs: scores against bytes, and against rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from potluck.report.format import size
from potluck.report.measures import Measure
from potluck.report.pictures.style import (
    FAINT,
    GREY,
    INK,
    LABEL,
    LABEL_GAP,
    LEFT,
    PALETTE,
    PAPER,
    RULE,
    WIDTH,
    Comparison,
    Style,
    Styles,
    clean_axes,
    framed,
    marked,
    own_style,
    row_styles,
    score_axis,
    shorten,
    write_ends,
)
from potluck.report.sheets import measure_in, row_label, rows_of


def _ends(
    rows: Sequence[Mapping[str, Any]], styles: Styles, measure: Measure
) -> list[tuple[float, str, Style]]:
    """The height, the name and the look of every line's end; equal lines have one name together."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(str((row["curve"]["bytes"], row["curve"]["mean"])), []).append(row)
    ends = []
    for equal in found.values():
        curve = equal[0]["curve"]
        sent = size(curve["bytes"][-1]) if _sent(equal[0]) else "nothing sent"
        name = shorten(" = ".join(map(row_label, equal)), LABEL)
        style = styles.get(row_label(equal[0]), GREY)
        ends.append((measure.scale * float(curve["mean"][-1]), f"{name}, {sent}", style))
    return ends


def _sent(entry: Mapping[str, Any]) -> bool:
    return any((entry.get("curve") or {}).get("bytes") or ())


def _bytes_axis(axes: Axes, sent: Sequence[float], ticks: int = 8) -> None:
    """A logarithmic axis with several ticks, however little the sizes differ."""
    axes.set_xscale("log")
    ratio = max(sent) / min(sent)
    steps = (1.0,) if ratio > 1000 else (1.0, 3.0) if ratio > 30 else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(
        LogLocator(subs=steps, numticks=ticks)
        if ratio > 10
        else MaxNLocator(nbins=min(ticks, 5), min_n_ticks=2)
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value).replace(".0 ", " ")))
    axes.set_xlabel("sent and received for training, all clients together", color=FAINT)
    axes.grid(axis="y", color=RULE, linewidth=0.8)


@own_style()
def accuracy_against_bytes(curve: Sequence[Mapping[str, Any]], option: str, chosen: int) -> Figure:
    """The validation accuracy of each candidate value against the bytes it sends; the chosen one is filled."""
    figure, axes = framed(WIDTH, 3.0, right=0.9)
    sent = [point["bytes"] for point in curve]
    reached = [100 * point["validation"] for point in curve]
    axes.plot(sent, reached, color=PALETTE[0], linewidth=1.5, zorder=2)
    for x, y, point in zip(sent, reached, curve, strict=True):
        face = PALETTE[0] if point["value"] == chosen else PAPER
        axes.plot(
            [x], [y], "o", color=PALETTE[0], markerfacecolor=face, markersize=7, zorder=3, clip_on=False
        )
        label = shorten(f"{option} = {point['value']}", 20)
        axes.annotate(
            label, (x, y), xytext=(-6, 6), textcoords="offset points", ha="right", color=INK, fontsize=9
        )
    axes.margins(x=0.08, y=0.25)
    axes.set_xlabel("per client and round", color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    score_axis(axes.yaxis, Measure("validation accuracy"))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    return figure


# --- rounds and bytes side by side ----------------------------------------------------------------------


@own_style()
def cost_picture(comparison: Comparison) -> Figure | None:
    """Scores over rounds, and beside them over what all clients have sent and received until then."""
    measure = measure_in(comparison)
    rows = [row for row in rows_of(comparison) if row.get("curve")]
    if not any(map(_sent, rows)):
        return None
    styles = row_styles(comparison)
    ends = _ends(rows, styles, measure)
    right = 0.65 + 0.076 * max(len(name) for _, name, _ in ends)
    height, each, left, gap = max(3.7, 0.9 + LABEL_GAP * len(ends)), 3.3, LEFT, 0.45
    width = left + 2 * each + gap + right
    figure = Figure(figsize=(width, height))
    tall = 1 - 0.65 / height
    over_rounds = figure.add_axes((left / width, 0.5 / height, each / width, tall))
    over_bytes = figure.add_axes(
        ((left + each + gap) / width, 0.5 / height, each / width, tall), sharey=over_rounds
    )
    clean_axes(over_rounds)
    clean_axes(over_bytes)
    for shift, row in reversed([*enumerate(rows)]):
        style, curve = styles.get(row_label(row), GREY), row["curve"]
        mean = measure.scale * np.array(curve["mean"], float)
        _draw_line(over_rounds, curve["rounds"], mean, style, shift)
        if _sent(row):
            _draw_line(over_bytes, curve["bytes"], mean, style, shift)
        else:
            over_bytes.axhline(mean[-1], color=style.color, linewidth=1.2, linestyle="--", zorder=2)
    over_rounds.set_xlabel("round", color=FAINT)
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    score_axis(over_rounds.yaxis, measure)
    over_rounds.grid(axis="y", color=RULE, linewidth=0.8)
    sent = [one for row in rows if _sent(row) for one in row["curve"]["bytes"] if one]
    _bytes_axis(over_bytes, sent, ticks=4)
    over_bytes.tick_params(axis="y", labelleft=False)
    write_ends(over_bytes, ends)
    return figure


def _draw_line(axes: Axes, x: Sequence[float], y: Any, style: Style, shift: int) -> None:
    (drawn,) = axes.plot(x, y, color=style.color, linestyle=style.dash, linewidth=2, zorder=3)
    marked(drawn, style, shift)
