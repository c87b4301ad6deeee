"""What a page of a comparison draws itself: scores over rounds and against bytes, intervals, and single clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.report.charts import (
    ACROSS,
    FEW_POINTS,
    GREY,
    LOOKS,
    Box,
    Chart,
    Line,
    Tick,
    dots_of,
    looks_for,
    over_rounds,
    path_of,
    percent_of,
    places_in,
    score_limits,
    score_ticks,
    thinned,
)
from potluck.report.format import capital, size
from potluck.report.log import Curve
from potluck.report.measures import Measure
from potluck.report.sheets import (
    in_order_of_looks,
    measure_in,
    ranked,
    reference_label,
    references_of,
    row_label,
    rows_of,
)
from potluck.report.ticks import round_powers, round_values, tick_texts

Comparison = Mapping[str, Any]
Row = Mapping[str, Any]
TALL = 100  # the units of a strip, from top to bottom
MOST_CLIENTS = 400  # dots in a strip; more are thinned out
ROOM = 16  # percent of an axis that the words of a size take on a phone


def looks_of(comparison: Comparison) -> dict[str, str]:
    """How the line of each row looks, the same in all drawings; the plain reference is black and dashed."""
    rows, baseline = in_order_of_looks(comparison, LOOKS), str(comparison.get("baseline", "local"))
    reference = next((row_label(row) for row in rows if row["method"] == baseline), None)
    return looks_for([row_label(row) for row in rows], reference)


# --- lines ----------------------------------------------------------------------------------------------


def curves_chart(comparison: Comparison) -> Chart | None:
    """The scores of all methods over rounds, each with its mode; None where nothing was logged."""
    measure, rows = measure_in(comparison), rows_of(comparison)
    curves = [_curve(row_label(row), row["curve"]) for row in rows if row.get("curve")]
    return over_rounds(curves, measure, f"{capital(measure.name)} over rounds", looks_of(comparison))


def _curve(label: str, curve: Mapping[str, Any]) -> Curve:
    low, high = (np.array(curve[end], float) if curve.get(end) else None for end in ("low", "high"))
    return Curve(label, np.array(curve["rounds"], np.int64), np.array(curve["mean"], float), low, high)


def bytes_chart(comparison: Comparison) -> Chart | None:
    """The scores over what all clients have sent and received; a method that sends nothing is a level line."""
    measure, looks = measure_in(comparison), looks_of(comparison)
    rows = [row for row in rows_of(comparison) if (row.get("curve") or {}).get("mean")]
    sent = [amount for row in rows for amount in row["curve"].get("bytes") or () if amount]
    if not sent:
        return None
    low, high = math.log10(min(sent)), math.log10(max(sent))
    margin = max(0.05, 0.04 * (high - low))
    scores = np.concatenate([np.array(row["curve"]["mean"], float) for row in rows])
    box = (low - margin, high + margin, *score_limits(scores, measure))
    lines = [_sent_line(row, box, looks.get(row_label(row), GREY)) for row in reversed(rows)]
    ranking = sorted(rows, key=lambda row: measure.rank(row["curve"]["mean"][-1]))
    key = [_sent_key(row, looks.get(row_label(row), GREY), measure) for row in ranking]
    about = "sent and received by all clients together"
    return Chart(
        f"{capital(measure.name)} against bytes",
        lines,
        _byte_ticks(box),
        score_ticks(box, measure),
        about,
        key,
    )


def _sent_line(row: Row, box: Box, look: str) -> Line:
    sent, mean = np.array(row["curve"]["bytes"], float), np.array(row["curve"]["mean"], float)
    there = sent > 0
    if not there.any():
        ((_, height),) = places_in([box[0]], mean[-1:], box)
        return Line(f"{look} d1", f"M0 {height}H{ACROSS}")
    kept = thinned(mean[there])
    places = places_in(np.log10(sent[there][kept]), mean[there][kept], box)
    return Line(look, path_of(places), dots=dots_of(places) if len(places) <= FEW_POINTS else "")


def _sent_key(row: Row, look: str, measure: Measure) -> tuple[str, str, str]:
    total = row["curve"]["bytes"][-1]
    told = size(total) if total else "nothing sent"
    return (
        look if total else f"{look} d1",
        measure.full(row["curve"]["mean"][-1]),
        f"{row_label(row)}, {told}",
    )


def _byte_ticks(box: Box) -> list[Tick]:
    """A few round sizes along a logarithmic axis, however little they differ."""
    low, high = 10 ** box[0], 10 ** box[1]
    ticks = round_powers(low, high, 5)
    return _apart([(percent_of(math.log10(tick), box[0], box[1]), size(tick)) for tick in ticks])


def _apart(ticks: list[Tick]) -> list[Tick]:
    """The ticks from the left whose words have room on a phone, too.

    >>> _apart([(5.0, "1.0 MB"), (42.0, "2.0 MB"), (64.0, "3.0 MB"), (79.0, "4.0 MB")])
    [(5.0, '1.0 MB'), (42.0, '2.0 MB'), (64.0, '3.0 MB')]
    """
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick[0] - kept[-1][0] >= ROOM:
            kept.append(tick)
    return kept


# --- strips ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """A row with its name, what is drawn along the axis, and a value at its end."""

    name: str
    look: str
    value: str
    line: str = ""
    dots: str = ""
    mark: str = ""  # a short line across
    hollow: bool = False


@dataclass(frozen=True)
class Strips:
    """Rows above one axis of differences; `zero` is its place in percent."""

    label: str
    rows: Sequence[Strip]
    x: Sequence[Tick]
    zero: float
    about_x: str


def intervals_chart(comparison: Comparison) -> Strips | None:
    """Each row's paired difference to its reference with the interval; ties are hollow."""
    measure, looks = measure_in(comparison), looks_of(comparison)
    rows = [row for row in rows_of(comparison) if row.get("difference")]
    rows.sort(key=lambda row: measure.rank(row["difference"]["mean"]))
    ends = [row["difference"][end] for row in rows for end in ("low", "mean", "high")]
    box = _difference_box([end for end in ends if end is not None])
    strips = [_interval(row, box, measure, looks.get(row_label(row), GREY)) for row in rows]
    return _strips("Differences with their intervals", strips, box, comparison, rows) if rows else None


def _interval(row: Row, box: Box, measure: Measure, look: str) -> Strip:
    found = row["difference"]
    known = found["low"] is not None
    ends = places_in([found["low"], found["high"]], [0.5, 0.5], box, TALL) if known else []
    dot = places_in([found["mean"]], [0.5], box, TALL)
    told = measure.difference(found["mean"]) + (" tie" if found["tie"] else "")
    return Strip(
        row_label(row), look, told, path_of(ends) if ends else "", dots_of(dot), hollow=bool(found["tie"])
    )


def gains_chart(comparison: Comparison) -> Strips | None:
    """A row per method and a dot per client and seed: its difference to the reference. The bar is the median."""
    measure, looks = measure_in(comparison), looks_of(comparison)
    rows = [row for row in ranked(comparison["methods"], measure) if row.get("by_client")]
    values = {row["method"]: _differences(row) for row in rows}
    box = _difference_box([value for each in values.values() for value in each])
    strips = [_gains(row, values[row["method"]], box, looks.get(row_label(row), GREY)) for row in rows]
    return _strips("The difference of every client", strips, box, comparison, rows) if rows else None


def _differences(row: Row) -> list[float]:
    seeds = row["by_client"]["differences"].values()
    return [value for seed in seeds for value in seed.values() if value is not None]


def _gains(row: Row, values: Sequence[float], box: Box, look: str) -> Strip:
    shown = values[:: max(1, len(values) // MOST_CLIENTS)]
    heights = 0.5 + 0.28 * np.sin(2.4 * np.arange(len(shown)))  # equal differences lie beside each other
    dots = dots_of(places_in(shown, heights, box, TALL)) if shown else ""
    median = f"M{places_in([float(np.median(values))], [0.0], box, TALL)[0][0]} 10V90" if values else ""
    told = f"{row['by_client']['better']:,} of {len(values):,} gain"
    return Strip(row_label(row), look, told, dots=dots, mark=median)


def _difference_box(values: Sequence[float]) -> Box:
    low, high = min([0.0, *values]), max([0.0, *values])
    margin = 0.05 * (high - low) or 0.01
    return (low - margin, high + margin, 0.0, 1.0)


def _strips(
    label: str, strips: Sequence[Strip], box: Box, comparison: Comparison, rows: Sequence[Row]
) -> Strips:
    measure = measure_in(comparison)
    low, high = measure.scale * box[0], measure.scale * box[1]
    found = round_values(low, high, 5)
    shown = [
        (percent_of(tick, low, high), f"{'+' * (tick > 0)}{text}")
        for tick, text in zip(found, tick_texts(found), strict=True)
    ]
    names = references_of(rows) or [str(comparison.get("baseline", "local"))]
    reference = reference_label(names[0], comparison) if len(names) == 1 else "the Local of its settings"
    unit = "points" if measure.is_share else measure.name
    return Strips(label, strips, shown, percent_of(0.0, low, high), f"{unit} against {reference}")
