"""Scores over the values of an option: lines with their spread, one per method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from potluck.report.measures import Measure
from potluck.report.pictures.style import (
    FAINT,
    LABEL,
    LABEL_GAP,
    REFERENCE,
    RULE,
    Style,
    marked,
    note_below,
    own_style,
    score_axis,
    short_value,
    shorten,
    styles_for,
    with_names,
    write_ends,
)

WIDE = 8  # largest over smallest value from which on the axis is logarithmic
Value = float | str


@dataclass(frozen=True)
class OptionLine:
    """The scores of one method over an option; a single score without a value where it does not have the option."""

    label: str
    values: tuple[Value | None, ...]
    mean: tuple[float, ...]
    spread: tuple[float | None, ...]  # standard deviation over seeds

    @property
    def flat(self) -> bool:
        """Whether the option does not concern this method."""
        return self.values == (None,)


@own_style()
def option_picture(
    lines: Sequence[OptionLine], option: str, measure: Measure, note: str = "", reference: str | None = None
) -> Figure:
    """A line per method over the values of an option; the band is one standard deviation over seeds.

    The line called `reference` is dashed, and so are those that the option does not concern.
    """
    places = _places(lines)
    numbers = all(isinstance(value, float) for value in places)
    styles = styles_for([line.label for line in lines if not line.flat], reference)
    longest = max(len(shorten(line.label, LABEL)) for line in lines)
    height = max(3.7, 1.1 + LABEL_GAP * len(lines))
    figure, axes = with_names(height, 1.05 + 0.078 * longest, below=0.75 if note else 0.5)
    ends = []
    for line in lines:
        style = REFERENCE if line.flat else styles.get(line.label, Style(FAINT))
        _draw_option_line(axes, line, places, style, measure)
        end = measure.scale * line.mean[-1]
        ends.append((end, f"{short_value(end, measure)}  {shorten(line.label, LABEL)}", style))
    _option_axis(axes, places, numbers, option)
    score_axis(axes.yaxis, measure)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    write_ends(axes, ends)
    note_below(figure, note)
    return figure


def _places(lines: Sequence[OptionLine]) -> dict[Value, float]:
    """Where each value stands: numbers at themselves, words side by side."""
    values = dict.fromkeys(value for line in lines for value in line.values if value is not None)
    if all(isinstance(value, float) for value in values):
        return {value: float(value) for value in sorted(values, key=float)}
    return {value: float(place) for place, value in enumerate(values)}


def _draw_option_line(
    axes: Axes, line: OptionLine, places: dict[Value, float], style: Style, measure: Measure
) -> None:
    mean = measure.scale * np.array(line.mean)
    if line.flat:
        axes.axhline(mean[0], color=style.color, linestyle=style.dash, linewidth=1.3, zorder=2)
        return
    x = [places[value] for value in line.values if value is not None]
    if all(one is not None for one in line.spread):
        spread = measure.scale * np.array(line.spread, float)
        axes.fill_between(
            x, mean - spread, mean + spread, color=style.color, alpha=0.13, linewidth=0, zorder=1
        )
    (drawn,) = axes.plot(x, mean, color=style.color, linestyle=style.dash, linewidth=2, zorder=3)
    marked(drawn, style)
    drawn.set_markersize(5.5)


def _option_axis(axes: Axes, places: dict[Value, float], numbers: bool, option: str) -> None:
    axes.set_xlabel(shorten(option, 60), color=FAINT)
    low, high = min(places.values()), max(places.values())
    if numbers and low > 0 and high / low >= WIDE:
        axes.set_xscale("log")
    elif low == high:
        axes.set_xlim(low - 1, high + 1)
    names = {
        place: shorten(f"{value:g}" if isinstance(value, float) else value, 20)
        for value, place in places.items()
    }
    axes.xaxis.set_major_locator(FixedLocator(list(names)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: names.get(value, "")))
