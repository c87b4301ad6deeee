"""What all pictures share: colours, lines, fonts, margins and labels.

The colours are Okabe and Ito's, which colour-blind readers can tell apart. Lines also differ in their marks, and
from the seventh on in their dashes, so that a picture can be read in grey. Pages replace the few colours by
variables, so that one picture serves light and dark pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter

from potluck.errors import harmless
from potluck.report.format import shortened
from potluck.report.measures import Measure
from potluck.report.sheets import in_order_of_looks, row_label
from potluck.report.ticks import tick_texts

INK = "#24292f"
FAINT = "#6e7781"
RULE = "#d8dee4"
PAPER = "#fefefe"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKS = ("o", "s", "^", "D", "v", "P", "X")  # of lines, in turn; seven, so that colours and marks meet anew
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # of lines, when the colours begin again
MOST_MARKED = 12  # points of a line that are all marked; of longer lines only some are
LEFT = 0.85  # inches for the name and the values of an axis
ROOM = 5.4  # inches for lines and the axis at their left
LABEL = 60  # characters of a name beside a line
LABEL_GAP = 0.19  # inches from one such name to the next
GAP, KEY = 0.11, 0.34  # inches from the axes to names beside them, and for a piece of line before a name
SLANT, SLANTED = 45, 0.2  # degrees of names that do not fit side by side, and the inches each then needs

WIDTH = 9.0  # inches
FONT = "DejaVu Sans"  # comes with matplotlib, so layouts are the same everywhere
# For characters that it lacks, where one of these is installed.
FURTHER_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
    "Arial Unicode MS",
)

Comparison = Mapping[str, Any]


@cache
def _fonts() -> list[str]:
    there = set(font_manager.get_font_names())
    return [FONT, *(name for name in FURTHER_FONTS if name in there)]


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Use our settings instead of the user's matplotlibrc, and restore the user's afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        own: dict[Any, Any] = {
            "font.family": _fonts(),
            "font.size": 9.5,
            "svg.hashsalt": "potluck",
            "svg.fonttype": "none",
        }
        matplotlib.rcParams.update(own)
        yield


@dataclass(frozen=True)
class Style:
    """How a line looks."""

    color: str
    dash: Any = "-"
    mark: str = ""


REFERENCE, GREY = Style(INK, "--"), Style(FAINT)
Styles = Mapping[str, Style]  # label → how its line looks; those left out are thin and grey


def styles_for(labels: Sequence[str], reference: str | None = None) -> dict[str, Style]:
    """A look for each label: colours and marks in turn, then again with dashes and with dots."""
    pairs = [(color, dash) for dash in DASHES for color in PALETTE]
    looks = [Style(*pair, MARKS[place % len(MARKS)]) for place, pair in enumerate(pairs)]
    others = [label for label in labels if label != reference]
    found = dict(zip(others, looks, strict=False))
    return found | {label: REFERENCE for label in labels if label == reference}


def row_styles(comparison: Mapping[str, Any]) -> dict[str, Style]:
    """One look per row of a comparison, the same in all its pictures; the plain reference is black and dashed."""
    looks = len(DASHES) * len(PALETTE)
    rows, baseline = in_order_of_looks(comparison, looks), str(comparison.get("baseline", "local"))
    reference = next((row_label(row) for row in rows if row["method"] == baseline), None)
    return styles_for([row_label(row) for row in rows], reference)


def framed(
    width: float, height: float, left: float = LEFT, right: float = 1.9, below: float = 0.5
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes and margins in inches; labels stand in the right one."""
    figure = Figure(figsize=(width, height))
    above = 0.15
    box = (left / width, below / height, 1 - (left + right) / width, 1 - (below + above) / height)
    axes = figure.add_axes(box)
    clean_axes(axes)
    return figure, axes


def with_names(
    height: float, right: float, below: float = 0.5, room: float | None = None
) -> tuple[Figure, Axes]:
    """A figure of lines with their names at the right; long names make it wider, and the lines keep their room."""
    width = max(WIDTH, ROOM + right) if room is None else room + right
    return framed(width, height, right=right, below=below)


def clean_axes(axes: Axes) -> None:
    """No frame and no tick marks."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=9)
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)


def label_right(axes: Axes, height: float, text: str, color: str, shift: float = 0.0) -> None:
    """Write into the right margin, at a height given in data coordinates, `shift` inches further out."""
    axes.annotate(
        text,
        xy=(1, height),
        xycoords=("axes fraction", "data"),
        xytext=(72 * (GAP + shift), 0),
        textcoords="offset points",
        va="center",
        color=color,
        fontsize=9,
    )


def note_below(figure: Figure, text: str) -> None:
    """A small line of text at the foot of a figure."""
    if text:
        figure.text(0.012, 0.03, text, color=FAINT, fontsize=8, va="bottom")


def shorten(text: str, most: int) -> str:
    """Text on one line, cut with an ellipsis if too long; `$` is escaped so that it is not read as a formula.

    Letters that nobody sees are question marks: they turn what follows around, or end the writing of a PDF.
    """
    return harmless(shortened(text, most)).replace("$", r"\$")


class _Scores(Formatter):
    """Values of an axis, with as many digits as tell each from the next."""

    def __init__(self, unit: str) -> None:
        self._unit = unit

    def __call__(self, value: float, pos: int | None = None) -> str:
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return [f"{text}{self._unit}" for text in tick_texts(values)]


def score_axis(axis: Axis, measure: Measure) -> None:
    """Name an axis by what it shows, and label it in percent, or in plain numbers."""
    axis.set_major_formatter(_Scores(" %" if measure.is_share else ""))
    axis.set_label_text(shorten(measure.name, 40), color=FAINT)


def marked(line: Line2D, style: Style, shift: int = 0) -> None:
    """Give a line its marks: at every point of a short line, at some of a long one, `shift` points further on."""
    points = len(np.asarray(line.get_xdata()))
    step = max(1, points // 8)
    every = 1 if points <= MOST_MARKED else (min(step // 2 + shift % step, points - 1), step)
    line.set(marker=style.mark, markersize=4.5, markevery=every, markeredgewidth=0)


def write_ends(axes: Axes, ends: Sequence[tuple[float, str, Style]]) -> None:
    """Names beside the ends of lines, each with a piece of its line, moved apart where they would touch."""
    low, high = axes.get_ylim()
    wide, tall = size_in_inches(axes)
    gap = (high - low) * LABEL_GAP / tall
    known = sorted(ends, key=lambda end: end[:2])
    heights = spread_apart([end for end, _, _ in known], gap, low, high)
    for (_, name, style), height in zip(known, heights, strict=True):
        if len(known) > 1:
            _draw_key(axes, height, style, wide)
        label_right(axes, height, name, style.color, shift=KEY if len(known) > 1 else 0.0)


def _draw_key(axes: Axes, height: float, style: Style, wide: float) -> None:
    """A piece of a line to the right of the axes, as the key to its name."""
    across = [1 + (GAP + share * (KEY - 0.06)) / wide for share in (0, 0.5, 1)]
    (line,) = axes.plot(
        across,
        [height] * 3,
        color=style.color,
        linestyle=style.dash,
        linewidth=1.6,
        clip_on=False,
        transform=axes.get_yaxis_transform(),
        zorder=3,
    )
    line.set(marker=style.mark, markersize=4.5, markevery=[1], markeredgewidth=0)


def size_in_inches(axes: Axes) -> tuple[float, float]:
    """The width and height of a pair of axes."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    box = axes.get_position()
    return box.width * figure.get_figwidth(), box.height * figure.get_figheight()


def short_value(value: float, measure: Measure) -> str:
    """A value beside a line: 91.2, or 0.412."""
    return f"{value:.1f}" if measure.is_share else measure.value(value)


def spread_apart(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ascending `values` so that they are at least `gap` apart, within `low` and `high` if they fit."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] + gap) if placed else max(value, low))
    ceiling = max(high, low + gap * (len(placed) - 1))
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def fits(names: Sequence[str], room: float) -> bool:
    """Whether names fit side by side, with `room` inches for each."""
    return room > 0.08 * max(map(len, names), default=1) + 0.06


def are_slanted(names: Sequence[str], room: float) -> bool:
    """Whether names fit only if they are written at a slant."""
    return bool(names) and not fits(names, room) and room >= SLANTED


def depth_of(names: Sequence[str]) -> float:
    """How many inches slanted names reach down, and to the left."""
    return 0.052 * max(map(len, names), default=0)


def name_columns(axes: Axes, places: Sequence[int], names: Sequence[str], slanted: bool) -> None:
    """Names below columns, side by side or at a slant."""
    axes.set_xticks(list(places), [names[place] for place in places])
    if slanted:
        for label in axes.get_xticklabels():
            label.set(rotation=SLANT, ha="right", rotation_mode="anchor")


def room_for(entries: Sequence[Mapping[str, Any]]) -> float:
    """The inches that the names of rows need at the left."""
    longest = max((len(shorten(row_label(entry), LABEL)) for entry in entries), default=0)
    return max(1.2, 0.3 + 0.075 * longest)
