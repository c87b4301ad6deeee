"""Pictures of runs, as matplotlib figures that the caller owns; pyplot is never used.

The colours are Okabe and Ito's, which colour-blind readers can tell apart. `to_svg` gives the same text for the
same figure, and `page` replaces its few colours by variables, so that one picture serves light and dark pages.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from potluck.report.format import size
from potluck.report.log import Curve
from potluck.report.measures import ACCURACY, Measure
from potluck.report.sheets import measure_in, reference_label, references_of, row_label, rows_of

INK = "#24292f"
FAINT = "#6e7781"
RULE = "#d8dee4"
PAPER = "#fefefe"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # of lines, when the colours begin again
ROOM = 5.4  # inches for lines and the axis at their left
LABEL = 60  # characters of a name beside a line
SLANT, SLANTED = 45, 0.2  # degrees of names that do not fit side by side, and the inches each then needs
LABEL_GAP = 0.19  # inches from one such name to the next
MOST_CLIENTS = 100  # more columns are not readable; the picture says what it leaves out
MOST_CLASSES = 100
MOST_MARKS = 2000  # more marks are drawn as an image, to keep pages small
SMALL_CELL = 0.13  # inches; in smaller cells the areas of bubbles cannot be told apart

WIDTH = 9.0  # inches
FONT = "DejaVu Sans"  # comes with matplotlib, so layouts are the same everywhere


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Use our settings instead of the user's matplotlibrc, and restore the user's afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        own: dict[Any, Any] = {
            "font.family": FONT,
            "font.size": 9.5,
            "svg.hashsalt": "potluck",
            "svg.fonttype": "none",
        }
        matplotlib.rcParams.update(own)
        yield


# --- files ----------------------------------------------------------------------------------------------


@own_style()
def to_png(figure: Figure, dpi: int = 160) -> bytes:
    """The picture on white, as PNG."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


@own_style()
def to_svg(figure: Figure) -> str:
    """The picture as an `<svg>` element: real text, no background, no date, nothing from outside."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The text is drawn with the reader's fonts, so it does not matter which characters ours lack.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, dpi=160, metadata=nothing)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    return re.sub(r'<g id="[a-zA-Z]+\w*_\d+"', "<g", svg)


@own_style()
def to_pdf(figure: Figure) -> bytes:
    """The picture as PDF, for papers: vectors, real text, no date."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        figure.savefig(buffer, format="pdf", transparent=True, metadata={"CreationDate": None})
    return buffer.getvalue()


# --- accuracy over rounds -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How a line looks."""

    color: str
    dash: Any = "-"


REFERENCE, GREY = Style(INK, "--"), Style(FAINT)
Styles = Mapping[str, Style]  # label → how its line looks; those left out are thin and grey


def styles_for(labels: Sequence[str], reference: str | None = None) -> dict[str, Style]:
    """A look for each label: the colours in turn, then again with dashes and with dots."""
    looks = [Style(color, dash) for dash in DASHES for color in PALETTE]
    others = [label for label in labels if label != reference]
    found = dict(zip(others, looks, strict=False))
    return found | {label: REFERENCE for label in labels if label == reference}


def row_styles(comparison: Mapping[str, Any]) -> dict[str, Style]:
    """One look per row of a comparison, the same in all its pictures; the plain reference is black and dashed."""
    rows, baseline = rows_of(comparison), str(comparison.get("baseline", "local"))
    reference = next((row_label(row) for row in rows if row["method"] == baseline), None)
    return styles_for([row_label(row) for row in rows], reference)


@own_style()
def accuracy_over_rounds(
    curves: Sequence[Curve],
    reference: str | None = None,
    measure: Measure = ACCURACY,
    styles: Styles | None = None,
) -> Figure:
    """Lines of accuracy over rounds with their bands, labelled at their ends; equal lines share a label.

    The curve called `reference` is dashed. If there are more lines than looks, the best have one and the others
    are grey.
    """
    shown = [curve for curve in curves if len(curve.rounds)]
    styles = _styles(shown, reference) if styles is None else styles
    grey = [curve.label for curve in shown if curve.label not in styles]
    note = f"Grey: {shorten(', '.join(grey), 130)}." if grey else ""
    labelled = _merged([curve for curve in shown if curve.label in styles])
    longest = max((len(shorten(label, LABEL)) for label, _ in labelled), default=0)
    height = max(3.7, 0.9 + LABEL_GAP * len(labelled))
    figure, axes = with_names(height, 0.75 + 0.078 * longest, below=0.7 if note else 0.5)
    for curve in reversed(shown):
        _draw_curve(axes, curve, styles.get(curve.label), measure)
    _score_axis(axes, shown, measure)
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


def _draw_curve(axes: Axes, curve: Curve, style: Style | None, measure: Measure) -> None:
    mean = measure.scale * curve.mean
    if style is None:
        axes.plot(curve.rounds, mean, color=FAINT, linewidth=0.8, alpha=0.45, zorder=2)
        return
    if curve.low is not None and curve.high is not None:
        low, high = measure.scale * curve.low, measure.scale * curve.high
        axes.fill_between(curve.rounds, low, high, color=style.color, alpha=0.13, linewidth=0, zorder=1)
    marker = "o" if len(curve.rounds) <= 12 else ""
    (drawn,) = axes.plot(
        curve.rounds, mean, color=style.color, linestyle=style.dash, marker=marker, clip_on=False, zorder=3
    )
    drawn.set(linewidth=1.5 if style == REFERENCE else 2, markersize=4.5)


def _score_axis(axes: Axes, curves: Sequence[Curve], measure: Measure) -> None:
    """From a little below the lowest value to a little above the highest; a share never outside 0 to 100 %."""
    ends = [end for c in curves for end in (c.mean, c.low, c.high) if end is not None]
    low, high = (float(f(np.concatenate(ends))) if ends else v for f, v in ((np.min, 0.0), (np.max, 1.0)))
    low, high = measure.scale * low, measure.scale * high
    margin = max(2.0 if measure.is_share else 1e-3, 0.06 * (high - low))
    bounds = (0.0, 100.4) if measure.is_share else (-np.inf, np.inf)
    axes.set_ylim(max(bounds[0], low - margin), min(bounds[1], high + margin))
    score_ticks(axes.yaxis, measure)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color=RULE, linewidth=0.8)


def score_ticks(axis: Axis, measure: Measure) -> None:
    """Label an axis in percent, or in plain numbers."""
    unit = " %" if measure.is_share else ""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}".replace("-", "−")))


def _label_ends(axes: Axes, labelled: Sequence[tuple[str, Curve]], styles: Styles, measure: Measure) -> None:
    ends = [
        (measure.scale * float(curve.mean[-1]), shorten(label, LABEL), styles[curve.label].color)
        for label, curve in labelled
    ]
    write_ends(axes, [(end, f"{_short(end, measure)}  {label}", color) for end, label, color in ends])


def write_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names with their colours beside the ends of lines, moved apart where they would touch."""
    low, high = axes.get_ylim()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    gap = (high - low) * LABEL_GAP / (axes.get_position().height * figure.get_figheight())
    known = sorted(ends)
    heights = spread_apart([end for end, _, _ in known], gap, low, high)
    for (_, name, color), height in zip(known, heights, strict=True):
        label_right(axes, height, name, color)


def _short(value: float, measure: Measure) -> str:
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


# --- the split ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """The sizes and positions in the split picture, in inches."""

    cell: float
    columns: int
    rows: int
    left: float
    below: float = 0.66

    bars = 0.8
    gap = 0.12
    above = 0.3
    right = 1.25

    @property
    def size(self) -> tuple[float, float]:
        width = self.left + self.cell * self.columns + self.right
        return width, self.below + self.cell * self.rows + self.gap + self.bars + self.above

    def box(self, bottom: float, height: float) -> tuple[float, float, float, float]:
        width, total = self.size
        return self.left / width, bottom / total, self.cell * self.columns / width, height / total


@own_style()
def split_picture(
    counts: Sequence[Sequence[int]],
    clients: Sequence[str],
    class_names: Sequence[str] | None = None,
    total: int | None = None,
) -> Figure:
    """Who has which class: a column per client, a row per class, and bubbles whose area is the number of samples.

    With many clients, the bubbles become small squares that are darker for more samples. The bars above are the
    clients' training samples. Of more than 100 clients or classes the first 100 are shown; `total` is the number
    of clients, where not all are given.
    """
    everything = np.asarray(counts, np.int64).reshape(len(clients), -1)
    table = everything[:MOST_CLIENTS, :MOST_CLASSES]
    names = list(class_names or map(str, range(everything.shape[1])))[: table.shape[1]]
    shown = [shorten(client, 12) for client in clients[: table.shape[0]]]
    layout = _split_layout(table, names, shown)
    figure = Figure(figsize=layout.size)
    bubbles = figure.add_axes(layout.box(layout.below, layout.cell * layout.rows))
    bars = figure.add_axes(layout.box(layout.below + layout.cell * layout.rows + layout.gap, layout.bars))
    for axes in (bubbles, bars):
        clean_axes(axes)
        axes.set_xlim(-0.5, table.shape[0] - 0.5)
    _draw_split(bubbles, table, layout.cell)
    _split_ticks(bubbles, shown, names, layout.cell)
    _draw_sizes(bars, everything[: table.shape[0]].sum(1))
    _size_key(figure, layout, int(table.max(initial=0)))
    everyone = everything.shape if total is None else (total, everything.shape[1])
    note_below(figure, _left_out(everyone, table.shape))
    return figure


def _split_layout(table: npt.NDArray[np.int64], names: Sequence[str], clients: Sequence[str]) -> _Layout:
    left = 0.5 + 0.068 * max((len(shorten(name, 18)) for name in names), default=1)
    available = WIDTH - left - _Layout.right
    cell = float(np.clip(available / max(table.shape[0], 1), 0.068, 0.36))
    cell = min(cell, max(0.068, 7.5 / max(table.shape[1], 1)))
    below = _Layout.below + (_depth(clients) if _slanted(clients, cell) else 0.0)
    return _Layout(cell, table.shape[0], table.shape[1], left, below)


def _draw_marks(axes: Axes, x: Any, y: Any, share: npt.NDArray[np.float64], cell: float) -> None:
    """Draw a mark per value, a `share` of the largest: bubbles by area, or in small cells squares by opacity."""
    if cell < SMALL_CELL:
        strength = to_rgba_array([PALETTE[0]] * len(share), list(0.18 + 0.82 * share))
        marks = axes.scatter(x, y, s=(cell * 72) ** 2, marker="s", color=strength)
    else:
        area = (0.94 * cell * 72) ** 2 * share  # the largest just touches its neighbours
        marks = axes.scatter(x, y, s=np.maximum(area, 1.5), color=PALETTE[0], alpha=0.85, zorder=2)
    marks.set_linewidth(0)
    marks.set_rasterized(len(share) > MOST_MARKS)


def _draw_split(axes: Axes, table: npt.NDArray[np.int64], cell: float) -> None:
    client, label = np.nonzero(table)
    _draw_marks(axes, client, label, table[client, label] / table.max(initial=1), cell)
    axes.set_ylim(table.shape[1] - 0.5, -0.5)
    if cell > 0.15:
        axes.hlines(range(table.shape[1]), -0.5, table.shape[0] - 0.5, color=RULE, linewidth=0.6, zorder=1)


def _split_ticks(axes: Axes, clients: Sequence[str], names: Sequence[str], cell: float) -> None:
    slanted = _slanted(clients, cell)
    needed = SLANTED if slanted else 0.075 * max(2, *(len(c) + 1 for c in clients), 2) if clients else 1
    _name_clients(axes, _every(len(clients), cell, needed), clients, slanted)
    rows = _every(len(names), cell, 0.15)
    axes.set_yticks(rows, [shorten(names[i], 18) for i in rows])
    axes.tick_params(axis="both", labelsize=8, pad=4)
    axes.set_xlabel("client", color=FAINT, fontsize=9)
    axes.set_ylabel("label", color=FAINT, fontsize=9)


def _every(count: int, cell: float, needed: float) -> list[int]:
    """The positions to label when a label needs `needed` inches and positions are `cell` inches apart."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if step * cell >= needed or step == 100)
    return list(range(0, count, step))


def _draw_sizes(axes: Axes, samples: npt.NDArray[np.int64]) -> None:
    axes.bar(range(len(samples)), samples, width=0.72, color=FAINT, alpha=0.55, linewidth=0)
    axes.set_xticks([])
    top = int(samples.max(initial=1))
    axes.set_yticks([0, top], ["0", f"{top:,}"])
    axes.set_ylim(0, 1.02 * max(top, 1))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title("training samples", color=FAINT, fontsize=8.5, loc="left", pad=6)


def _size_key(figure: Figure, layout: _Layout, largest: int) -> None:
    """Draw the key to the areas, to the right of the bubbles."""
    key = figure.add_axes((0, 0, 1, 1))
    key.set_axis_off()
    width, height = layout.size
    key.set_xlim(0, width)
    key.set_ylim(0, height)
    step = max(layout.cell, 0.17) + 0.03
    top = layout.below + layout.cell * layout.rows - 0.1
    across = layout.left + layout.cell * layout.columns + 0.2
    key.text(across, top, "samples", color=FAINT, fontsize=8.5, va="center")
    for index, value in enumerate(_round_numbers(largest)):
        height_at = top - (index + 1) * step - 0.04
        _draw_marks(key, [across + 0.15], [height_at], np.array([value / largest]), layout.cell)
        key.text(
            across + 0.15 + layout.cell / 2 + 0.1, height_at, f"{value:,}", color=INK, fontsize=8, va="center"
        )


def _round_numbers(largest: int) -> list[int]:
    """Up to three round values for the key, largest first: about the largest, a third and a tenth of it."""
    values = []
    for share in (1.0, 0.35, 0.08):
        target = max(1, int(largest * share))
        scale = 10 ** (len(str(target)) - 1)
        values.append(target // scale * scale)
    return list(dict.fromkeys(values)) if largest else []


def _left_out(all_of: tuple[int, ...], shown: tuple[int, ...]) -> str:
    parts = [
        f"the first {few:,} of {many:,} {word}"
        for many, few, word in zip(all_of, shown, ("clients", "classes"), strict=True)
        if few < many
    ]
    return f"Shown: {' and '.join(parts)}." if parts else ""


# --- clients and methods --------------------------------------------------------------------------------


@own_style()
def client_bars(accuracy: Mapping[str, float | None], measure: Measure = ACCURACY) -> Figure:
    """The score of each client, best first, and their mean as a line."""
    known = [(measure.scale * value, client) for client, value in accuracy.items() if value is not None]
    known.sort(key=lambda pair: measure.rank(pair[0]))
    mean = float(np.mean([value for value, _ in known])) if known else 0.0
    told = f"mean {_short(mean, measure)}"
    names = [shorten(client, 40) for _, client in known]
    left, right = 0.6, max(1.0, 0.3 + 0.075 * len(told))
    width = min(WIDTH - left - right, 0.5 * max(len(known), 3))
    room = width / max(len(known), 3)
    slanted = _slanted(names, room)
    deep = _depth(names) if slanted else 0.0
    left = max(left, 0.15 + deep - room / 2)  # the first name reaches to the left of its bar
    figure, axes = framed(width + left + right, 2.5 + deep, right=right, left=left, below=0.5 + deep)
    _draw_bars(axes, [value for value, _ in known])
    axes.set_xlim(-0.6, max(len(known), 3) - 0.4)
    if measure.is_share:
        axes.set_ylim(0, 100.4)
    score_ticks(axes.yaxis, measure)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    fits = slanted or _fits(names, room)
    _name_clients(axes, range(len(known) if fits else 0), names, slanted)
    axes.set_xlabel("clients, best to worst", color=FAINT)
    if known:
        axes.axhline(mean, color=INK, linewidth=1.2, zorder=3)
        label_right(axes, mean, told, INK)
    return figure


def _fits(names: Sequence[str], room: float) -> bool:
    """Whether names fit side by side, with `room` inches for each."""
    return room > 0.08 * max(map(len, names), default=1) + 0.06


def _slanted(names: Sequence[str], room: float) -> bool:
    """Whether names fit only if they are written at a slant."""
    return bool(names) and not _fits(names, room) and room >= SLANTED


def _depth(names: Sequence[str]) -> float:
    """How many inches slanted names reach down, and to the left."""
    return 0.052 * max(map(len, names), default=0)


def _name_clients(axes: Axes, places: Sequence[int], names: Sequence[str], slanted: bool) -> None:
    axes.set_xticks(list(places), [names[place] for place in places])
    if slanted:
        for label in axes.get_xticklabels():
            label.set(rotation=SLANT, ha="right", rotation_mode="anchor")


def _draw_bars(axes: Axes, heights: Sequence[float]) -> None:
    """Draw bars, or one filled outline where bars would be thinner than their gaps."""
    if len(heights) <= MOST_CLIENTS:
        axes.bar(range(len(heights)), heights, width=0.78, color=PALETTE[0], linewidth=0, zorder=2)
    else:
        edges = np.arange(len(heights) + 1) - 0.5
        axes.stairs(heights, edges, fill=True, color=PALETTE[0], linewidth=0, zorder=2)


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
    names = references_of(entries) or [str(comparison.get("baseline", "local"))]
    reference = reference_label(names[0], comparison) if len(names) == 1 else "the Local of its settings"
    unit = "points" if measure.is_share else measure.name
    axes.set_xlabel(f"{unit} against {reference}{note}", color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))


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


def room_for(entries: Sequence[Mapping[str, Any]]) -> float:
    """The inches that the names of rows need at the left."""
    longest = max((len(shorten(row_label(entry), LABEL)) for entry in entries), default=0)
    return max(1.2, 0.3 + 0.075 * longest)


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


# --- accuracy against bytes -----------------------------------------------------------------------------


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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    return figure


# --- shared ---------------------------------------------------------------------------------------------


def framed(
    width: float, height: float, left: float = 0.62, right: float = 1.9, below: float = 0.5
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes and margins in inches; labels stand in the right one."""
    figure = Figure(figsize=(width, height))
    above = 0.15
    box = (left / width, below / height, 1 - (left + right) / width, 1 - (below + above) / height)
    axes = figure.add_axes(box)
    clean_axes(axes)
    return figure, axes


def with_names(height: float, right: float, below: float = 0.5) -> tuple[Figure, Axes]:
    """A figure of lines with their names at the right; long names make it wider, and the lines keep their room."""
    return framed(max(WIDTH, ROOM + right), height, right=right, below=below)


def clean_axes(axes: Axes) -> None:
    """No frame and no tick marks."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelsize=9)
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)


def label_right(axes: Axes, height: float, text: str, color: str) -> None:
    """Write into the right margin, at a height given in data coordinates."""
    axes.annotate(
        text,
        xy=(1, height),
        xycoords=("axes fraction", "data"),
        xytext=(8, 0),
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
    """Text on one line, cut with an ellipsis if too long; `$` is escaped so that it is not read as a formula."""
    text = " ".join(text.split())
    text = text if len(text) <= most else text[: most - 1] + "…"
    return text.replace("$", r"\$")
