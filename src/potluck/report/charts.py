"""Lines, bars and dots that a page draws itself, at any width and in the colours of its theme.

A picture of matplotlib has one width; on a phone its text would be too small to read. Here the lines are an SVG
that stretches to the width of the page, and the text around it is HTML, which keeps its size. A line has at most a
few hundred points, so that a page stays small however many rounds were evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from potluck.report.log import Curve, Floats, Integers
from potluck.report.measures import Measure
from potluck.report.ticks import round_values, tick_texts

ACROSS, UP = 1000, 500  # the units of the drawing; the page stretches it
MOST_POINTS = 240  # of a line; a screen has few more pixels for it
FEW_POINTS = 12  # lines of so few have dots
COLORS, DASHES = 6, 3  # looks are numbered: the colours in turn, then again with dashes and with dots
LOOKS = COLORS * DASHES
MOST_DOTS = 500  # of a cloud of samples
NAMED = 32  # characters of names that fit below bars on a phone
REFERENCE, GREY = "reference", "grey"
PLAIN = Measure("value", is_share=False)  # numbers that are no scores

Box = tuple[float, float, float, float]  # left, right, bottom, top
Tick = tuple[float, str]  # a place in percent, and what stands there


@dataclass(frozen=True)
class Line:
    """A line as the page draws it; paths that are empty are left out."""

    look: str
    path: str
    band: str = ""
    dots: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing with its axes and its key."""

    label: str  # what screen readers say
    lines: Sequence[Line]
    x: Sequence[Tick]
    y: Sequence[Tick]
    about_x: str = ""
    key: Sequence[tuple[str, str, str]] = ()  # look, value and name of each line, best first
    bars: str = ""
    level: float | None = None  # a line across, in percent from the top


# --- lines over rounds ----------------------------------------------------------------------------------


def looks_for(labels: Sequence[str], reference: str | None = None) -> dict[str, str]:
    """How each line looks; of more lines than there are looks, the last are grey."""
    others = [label for label in labels if label != reference]
    looks = [f"c{place % COLORS} d{place // COLORS}" for place in range(LOOKS)]
    found = dict.fromkeys(others, GREY) | dict(zip(others, looks, strict=False))
    return found | ({reference: REFERENCE} if reference is not None else {})


def over_rounds(
    curves: Sequence[Curve], measure: Measure, label: str, looks: Mapping[str, str] | None = None
) -> Chart | None:
    """Scores over rounds with their bands, and a key that is sorted by the last value; equal lines share a name."""
    shown = [curve for curve in curves if len(curve.rounds)]
    if not shown:
        return None
    looks = looks or looks_for([curve.label for curve in shown])
    box = _box_of(shown, measure)
    lines = [_line(curve, box, looks[curve.label]) for curve in reversed(shown)]
    last: dict[tuple[bytes, bytes], tuple[float, str]] = {}
    named: dict[tuple[bytes, bytes], list[str]] = {}
    for curve in shown:
        same = (curve.rounds.tobytes(), curve.mean.tobytes())
        last.setdefault(same, (float(curve.mean[-1]), looks[curve.label]))
        named.setdefault(same, []).append(curve.label)
    ranked = sorted(last, key=lambda same: measure.rank(last[same][0]))
    key = [(last[same][1], measure.full(last[same][0]), " = ".join(named[same])) for same in ranked]
    return Chart(label, lines, _round_ticks(box), score_ticks(box, measure), "round", key)


def _box_of(curves: Sequence[Curve], measure: Measure) -> Box:
    """From the first round to the last, and a little more than all values; a share stays within 0 to 100 %."""
    ends = np.concatenate([end for c in curves for end in (c.mean, c.low, c.high) if end is not None])
    first, last = min(int(c.rounds[0]) for c in curves), max(int(c.rounds[-1]) for c in curves)
    left, right = (first, last) if last > first else (first - 0.5, first + 0.5)
    return (left, right, *score_limits(ends, measure))


def score_limits(values: Floats, measure: Measure) -> tuple[float, float]:
    """The ends of an axis that has room for all values."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    margin = max(0.02 if measure.is_share else 1e-3 * max(1.0, abs(high)), 0.06 * (high - low))
    low, high = low - margin, high + margin
    return (max(low, 0.0), min(high, 1.0)) if measure.is_share else (low, high)


def _round_ticks(box: Box) -> list[Tick]:
    found = round_values(box[0], box[1], 6, (1, 2, 5), whole=True)
    return [(percent_of(tick, box[0], box[1]), f"{tick:,.0f}") for tick in found if tick > 0 or not box[0]]


def score_ticks(box: Box, measure: Measure) -> list[Tick]:
    """Round values along the side, in percent where the score is a share."""
    low, high = measure.scale * box[2], measure.scale * box[3]
    unit = " %" if measure.is_share else ""
    found = round_values(low, high, 5)
    return [
        (100 - percent_of(tick, low, high), f"{text}{unit}")
        for tick, text in zip(found, tick_texts(found), strict=True)
    ]


def percent_of(value: float, low: float, high: float) -> float:
    """Where a value lies between two, in percent."""
    return round(100 * (value - low) / (high - low), 2)


def _line(curve: Curve, box: Box, look: str) -> Line:
    kept = thinned(curve.mean)
    rounds = curve.rounds[kept]
    band = ""
    if curve.low is not None and curve.high is not None:
        edge = places_in(rounds, curve.high[kept], box) + places_in(rounds, curve.low[kept], box)[::-1]
        band = path_of(edge) + "Z"
    places = places_in(rounds, curve.mean[kept], box)
    return Line(look, path_of(places), band, dots_of(places) if len(places) <= FEW_POINTS else "")


def thinned(values: Floats, most: int = MOST_POINTS) -> Integers:
    """The places of at most so many values: the first, the last, and the extremes of every stretch between."""
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (most - 2) // 2 + 1).astype(int)
    kept = {0, len(values) - 1}
    for start, end in pairwise(edges.tolist()):
        kept |= {start + int(values[start:end].argmin()), start + int(values[start:end].argmax())}
    return np.array(sorted(kept))


def places_in(
    x: Sequence[float] | Floats | Integers, y: Sequence[float] | Floats, box: Box, tall: int = UP
) -> list[tuple[int, int]]:
    """Values in the units of a drawing."""
    across = ACROSS * (np.asarray(x, float) - box[0]) / (box[1] - box[0])
    up = tall * (box[3] - np.asarray(y, float)) / (box[3] - box[2])
    return list(zip(np.rint(across).astype(int).tolist(), np.rint(up).astype(int).tolist(), strict=True))


def path_of(places: Sequence[tuple[int, int]]) -> str:
    """A line through all places."""
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def dots_of(places: Sequence[tuple[int, int]]) -> str:
    """Lines of no length, which their round ends make dots that do not stretch."""
    return "".join(f"M{x} {y}h0" for x, y in places)


# --- bars and dots --------------------------------------------------------------------------------------


def client_bars(scores: Mapping[str, float | None], measure: Measure, label: str) -> Chart | None:
    """The score of each client, best first, with a line at their mean; few clients have their names below."""
    known = [(value, client) for client, value in scores.items() if value is not None]
    known.sort(key=lambda pair: measure.rank(pair[0]))
    if not known:
        return None
    values = [value for value, _ in known]
    low, high = (0.0, 1.0) if measure.is_share else score_limits(np.array([*values, 0.0]), measure)
    box = (0.0, float(max(len(known), 4)), low, high)
    mean = float(np.mean(values))
    return Chart(
        label,
        lines=(),
        x=_bar_names([client for _, client in known], box),
        y=score_ticks(box, measure),
        about_x="clients, best to worst",
        key=[("mean", measure.full(mean), "mean over clients")],
        bars=bars_of(values, box),
        level=round(100 - percent_of(mean, low, high), 2),
    )


def bars_of(values: Sequence[float], box: Box) -> str:
    """A bar for each value; of many, there are no gaps between them."""
    gap = 0.12 if len(values) <= 100 else 0.0
    ((_, foot),) = places_in([0.0], [min(max(0.0, box[2]), box[3])], box)
    bars = ""
    for place, value in enumerate(values):
        (left, top), (right, _) = places_in([place + gap, place + 1 - gap], [value, value], box)
        bars += f"M{left} {foot}V{top}H{right}V{foot}Z"
    return bars


def _bar_names(names: Sequence[str], box: Box) -> list[Tick]:
    """The names below their bars, if they fit on a phone too."""
    if sum(len(name) + 1 for name in names) > NAMED:
        return []
    return [(percent_of(place + 0.5, box[0], box[1]), name) for place, name in enumerate(names)]


def calibration_chart(bins: Sequence[Mapping[str, Any]], percent: Callable[[float], str]) -> Chart:
    """The accuracy of predictions over their confidence; on the dashed diagonal both are equal."""
    box = (0.0, 1.0, 0.0, 1.0)
    places = places_in([one["confidence"] for one in bins], [one["accuracy"] for one in bins], box)
    lines = [Line(REFERENCE, f"M0 {UP}L{ACROSS} 0"), Line("c0 d0", path_of(places), dots=dots_of(places))]
    ticks = [(100 * share, percent(share)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    up = [(100 - place, text) for place, text in ticks]
    key = [("c0 d0", "", "accuracy"), (REFERENCE, "", "accuracy = confidence")]
    return Chart("Accuracy over confidence", lines, ticks, up, "confidence", key)


def against_truth(true: Floats, predicted: Floats, name: str) -> Chart:
    """Predicted over true values, a dot per sample (of many, for some); on the dashed diagonal both are equal."""
    known = np.flatnonzero(np.isfinite(true) & np.isfinite(predicted))
    chosen = known[:: max(1, -(-len(known) // MOST_DOTS))]
    low, high = score_limits(np.concatenate([true[chosen], predicted[chosen]]), PLAIN)
    box = (low, high, low, high)
    dots = dots_of(places_in(true[chosen], predicted[chosen], box))
    up = score_ticks(box, PLAIN)
    across = [(100 - place, text) for place, text in up]
    key = [("c0 d0 dot", "", f"{name}: a sample, as predicted"), (REFERENCE, "", "predicted = true")]
    lines = [Line(REFERENCE, f"M0 {UP}L{ACROSS} 0"), Line("c0 d0", "", dots=dots)]
    return Chart(f"Predicted over true values: {name}", lines, across, up, "true value", key)


# --- a small chart per client ---------------------------------------------------------------------------

SMALL_POINTS = 80
MOST_CLIENTS = 200  # of more, those with the lowest and the highest last values


@dataclass(frozen=True)
class ClientCurve:
    """One client over the rounds in which it was measured."""

    client: str
    last: str
    line: str
    dots: str


@dataclass(frozen=True)
class ClientCurves:
    """A small chart for every client, all with the same axes, and the mean behind each."""

    clients: Sequence[ClientCurve]
    mean: str
    rounds: str
    scores: str
    left_out: int


def client_curves(curves: Sequence[Curve], mean: Curve, measure: Measure) -> ClientCurves | None:
    """The curves of clients in the given order; None where there is at most one round."""
    shown = [curve for curve in curves if len(curve.rounds)]
    if not shown or len(mean.rounds) < 2:
        return None
    chosen = _extremes(shown, MOST_CLIENTS)
    box = _box_of([*chosen, mean], measure)
    small = [_small(curve, box, measure) for curve in chosen]
    kept = thinned(mean.mean, SMALL_POINTS)
    return ClientCurves(
        clients=small,
        mean=path_of(places_in(mean.rounds[kept], mean.mean[kept], box)),
        rounds=f"rounds {int(box[0]):,} to {int(box[1]):,}",
        scores=f"{measure.full(box[2])} to {measure.full(box[3])}",
        left_out=len(shown) - len(chosen),
    )


def _extremes(curves: Sequence[Curve], most: int) -> list[Curve]:
    """All curves or, of more than so many, those that end lowest and highest, in their given order."""
    if len(curves) <= most:
        return list(curves)
    order = np.argsort([float(curve.mean[-1]) for curve in curves], kind="stable")
    return [curves[place] for place in sorted([*order[: most // 2], *order[-(most // 2) :]])]


def _small(curve: Curve, box: Box, measure: Measure) -> ClientCurve:
    kept = thinned(curve.mean, SMALL_POINTS)
    places = places_in(curve.rounds[kept], curve.mean[kept], box)
    dots = dots_of(places) if len(places) <= FEW_POINTS else ""
    return ClientCurve(curve.label, measure.full(float(curve.mean[-1])), path_of(places), dots)
