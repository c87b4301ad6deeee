"""Scores over rounds, as lines with their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from potluck.report.log import Curve
from potluck.report.measures import ACCURACY, Measure
from potluck.report.pictures.style import (
    DASHES,
    FAINT,
    LABEL,
    LABEL_GAP,
    PALETTE,
    REFERENCE,
    RULE,
    Comparison,
    Style,
    Styles,
    marked,
    note_below,
    own_style,
    row_styles,
    score_axis,
    short_value,
    shorten,
    styles_for,
    with_names,
    write_ends,
)
from potluck.report.sheets import measure_in, row_label, rows_of


@own_style()
def accuracy_over_rounds(
    curves: Sequence[Curve],
    reference: str | None = None,
    measure: Measure = ACCURACY,
    styles: Styles | None = None,
    about: str = "",
    room: float | None = None,
) -> Figure:
    """Lines of accuracy over rounds with their bands, labelled at their ends; equal lines share a label.

    The curve called `reference` is dashed, and `about` stands below. If there are more lines than looks, the best
    have one and the others are grey. `room` is the width of the lines and the axis in inches, for narrow pictures.
    """
    shown = [curve for curve in curves if len(curve.rounds)]
    styles = _styles(shown, reference) if styles is None else styles
    grey = [curve.label for curve in shown if curve.label not in styles]
    others = f"Grey: {shorten(', '.join(grey), 130)}." if grey else ""
    note = " ".join(part for part in (about, others) if part)
    labelled = _merged([curve for curve in shown if curve.label in styles])
    longest = max((len(shorten(label, LABEL)) for label, _ in labelled), default=0)
    height = max(3.7, 0.9 + LABEL_GAP * len(labelled))
    figure, axes = with_names(height, 1.05 + 0.078 * longest, below=0.7 if note else 0.5, room=room)
    for shift, curve in reversed([*enumerate(shown)]):
        _draw_curve(axes, curve, styles.get(curve.label), measure, shift)
    _score_limits(axes, shown, measure)
    axes.set_xlabel("round", color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10], min_n_ticks=1))
    if shown:
        axes.set_xlim(*_round_limits(shown))
    _label_ends(axes, labelled, styles, measure)
    note_below(figure, note)
    return figure


def _round_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    first, last = min(int(c.rounds[0]) for c in curves), max(int(c.rounds[-1]) for c in curves)
    return (first, last) if last > first else (first - 0.5, last + 0.5)


def _styles(curves: Sequence[Curve], reference: str | None) -> dict[str, Style]:
    """The looks of all curves or, of many, of those that end highest."""
    others = [curve for curve in curves if curve.label != reference]
    best = sorted(others, key=lambda curve: -float(curve.mean[-1]))[: len(PALETTE) * len(DASHES)]
    return styles_for([one.label for one in curves if one in best or one.label == reference], reference)


def _merged(curves: Sequence[Curve]) -> list[tuple[str, Curve]]:
    """Each different line once, under the names of all curves that are equal to it."""
    found: dict[bytes, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.rounds.tobytes() + curve.mean.tobytes(), []).append(curve)
    return [(_together([one.label for one in equal]), equal[0]) for equal in found.values()]


def _together(labels: Sequence[str]) -> str:
    """Names of equal lines as one: `before = after training, by head`, if they end alike or begin alike."""
    parts = [label.partition(", ") for label in labels]
    firsts, rests = [dict.fromkeys(each) for each in ((one[0] for one in parts), (one[2] for one in parts))]
    if len(firsts) > 1 and len(rests) > 1:
        return " = ".join(labels)
    return ", ".join(" = ".join(each) for each in (firsts, rests) if any(each))


def _draw_curve(axes: Axes, curve: Curve, style: Style | None, measure: Measure, shift: int) -> None:
    mean = measure.scale * curve.mean
    if style is None:
        axes.plot(curve.rounds, mean, color=FAINT, linewidth=0.8, alpha=0.45, zorder=2)
        return
    if curve.low is not None and curve.high is not None:
        low, high = measure.scale * curve.low, measure.scale * curve.high
        axes.fill_between(curve.rounds, low, high, color=style.color, alpha=0.13, linewidth=0, zorder=1)
    (drawn,) = axes.plot(curve.rounds, mean, color=style.color, linestyle=style.dash, clip_on=False, zorder=3)
    drawn.set_linewidth(1.5 if style == REFERENCE else 2)
    marked(drawn, style, shift)


def _score_limits(axes: Axes, curves: Sequence[Curve], measure: Measure) -> None:
    """From a little below the lowest value to a little above the highest; a share never outside 0 to 100 %."""
    ends = [end for c in curves for end in (c.mean, c.low, c.high) if end is not None]
    low, high = (float(f(np.concatenate(ends))) if ends else v for f, v in ((np.min, 0.0), (np.max, 1.0)))
    low, high = measure.scale * low, measure.scale * high
    margin = max(2.0 if measure.is_share else 1e-3, 0.06 * (high - low))
    bounds = (0.0, 100.4) if measure.is_share else (-np.inf, np.inf)
    axes.set_ylim(max(bounds[0], low - margin), min(bounds[1], high + margin))
    score_axis(axes.yaxis, measure)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color=RULE, linewidth=0.8)


def _label_ends(axes: Axes, labelled: Sequence[tuple[str, Curve]], styles: Styles, measure: Measure) -> None:
    ends = [
        (measure.scale * float(curve.mean[-1]), shorten(label, LABEL), styles[curve.label])
        for label, curve in labelled
    ]
    write_ends(axes, [(end, f"{short_value(end, measure)}  {label}", style) for end, label, style in ends])


def curves_picture(comparison: Comparison, about: str = "") -> Figure | None:
    """The scores of all methods over rounds, each labelled with its mode; None where nothing was logged."""
    rows = rows_of(comparison)
    curves = [_curve(row) for row in rows if row.get("curve")]
    baseline = str(comparison.get("baseline", "local"))
    reference = next((row_label(row) for row in rows if row["method"] == baseline), None)
    styles = row_styles(comparison)
    measure = measure_in(comparison)
    return accuracy_over_rounds(curves, reference, measure, styles, about) if curves else None


def _curve(entry: Mapping[str, Any]) -> Curve:
    curve = entry["curve"]
    low, high = (np.array(curve[end], float) if curve.get(end) else None for end in ("low", "high"))
    return Curve(
        row_label(entry), np.array(curve["rounds"], np.int64), np.array(curve["mean"], float), low, high
    )
