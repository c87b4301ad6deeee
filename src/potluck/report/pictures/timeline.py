"""The time line of a run: what each round took, or what the device did in one round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from potluck.report.format import duration
from potluck.report.log import natural
from potluck.report.pictures.style import (
    FAINT,
    INK,
    LABEL,
    PALETTE,
    PAPER,
    RULE,
    WIDTH,
    clean_axes,
    label_right,
    note_below,
    own_style,
    shorten,
)

PHASES = {"train": ("training", PALETTE[0], ""), "evaluate": ("evaluation", PALETTE[4], "////")}
REST = ("other", FAINT, "....")
KINDS = {"kernels": (PALETTE[0], ""), "copies": (PALETTE[1], "////"), "operators": (PALETTE[0], "")}
MOST_LANES = 20
LEAST = 0.005  # share of a round that can be seen
MOST_BARS = 40  # of more rounds, several have one bar together


@own_style()
def rounds_picture(rounds: Sequence[Mapping[str, Any]], note: str = "") -> Figure:
    """A bar per round from the top down: training, evaluation and what else it took; of many, means of several."""
    each = math.ceil(len(rounds) / MOST_BARS)
    shown = [_mean(rounds[start : start + each]) for start in range(0, len(rounds), each)]
    together = f"A bar is the mean of {each} rounds." if each > 1 else ""
    height = 1.25 + 0.2 * len(shown)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.75 / WIDTH, 0.75 / height, 1 - 2.1 / WIDTH, 1 - 1.15 / height))
    clean_axes(axes)
    used: dict[str, Artist] = {}
    for place, line in enumerate(shown):
        reached = 0.0
        for seconds, (name, color, hatch) in _phases(line):
            bar = axes.barh(
                place,
                seconds,
                left=reached,
                height=0.72,
                color=color,
                hatch=hatch,
                edgecolor=PAPER,
                linewidth=0,
            )
            used.setdefault(name, bar[0])
            reached += seconds
        label_right(axes, place, duration(float(line["seconds"])), FAINT)
    step = max(1, len(shown) // 20)
    places = list(range(0, len(shown), step))
    axes.set_yticks(places, [str(shown[place]["round"]) for place in places])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_ylabel("round", color=FAINT)
    _seconds_axis(axes, max(float(line["seconds"]) for line in shown))
    figure.legend(
        list(used.values()),
        list(used),
        loc="upper left",
        bbox_to_anchor=(0.7 / WIDTH, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
    note_below(figure, " ".join(part for part in (together, note) if part))
    return figure


def _phases(line: Mapping[str, Any]) -> list[tuple[float, tuple[str, str, str]]]:
    known = [(float(line.get(key) or 0.0), look) for key, look in PHASES.items()]
    rest = max(0.0, float(line["seconds"]) - sum(seconds for seconds, _ in known))
    found = [*known, (rest, REST)]
    return [one for one in found if one[0] > LEAST * float(line["seconds"])]


def _mean(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several rounds as one, called by the first and the last of them."""
    first, last = rounds[0]["round"], rounds[-1]["round"]
    means = {key: float(np.mean([line.get(key) or 0.0 for line in rounds])) for key in (*PHASES, "seconds")}
    return {"round": str(first) if first == last else f"{first}–{last}", **means}


def _seconds_axis(axes: Axes, most: float) -> None:
    """Label an axis in one unit: milliseconds, seconds or minutes."""
    scale, unit = (1000.0, "ms") if most < 1 else (1.0, "s") if most < 300 else (1 / 60, "min")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{scale * value:g} {unit}" if value else "0")
    )
    axes.grid(axis="x", color=RULE, linewidth=0.8)


# --- one round, lane by lane ----------------------------------------------------------------------------


@own_style()
def trace_picture(trace: Mapping[str, Any], note: str = "") -> Figure:
    """A lane per stream of the GPU, or per thread of the CPU, with a bar wherever it worked."""
    lanes: dict[str, list[Mapping[str, Any]]] = {}
    for lane in trace["lanes"]:
        lanes.setdefault(str(lane["name"]), []).append(lane)
    busiest = sorted(lanes, key=lambda name: -_busy(lanes[name]))[:MOST_LANES]
    names = sorted(busiest, key=natural)
    end = max((float(span[1]) for lane in trace["lanes"] for span in lane["spans"]), default=0.0)
    height = 1.45 + 0.3 * len(names)
    left = 0.35 + 0.075 * max((len(shorten(name, LABEL)) for name in names), default=0)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left / WIDTH, 0.8 / height, 1 - (left + 1.35) / WIDTH, 1 - 1.25 / height))
    clean_axes(axes)
    used: dict[str, Artist] = {}
    for place, name in enumerate(names):
        for lane in lanes[name]:
            color, hatch = KINDS.get(str(lane["kind"]), (FAINT, ""))
            bars = [(float(start), float(stop) - float(start)) for start, stop in lane["spans"]]
            drawn = axes.broken_barh(
                bars, (place - 0.36, 0.72), facecolor=color, hatch=hatch, edgecolor=PAPER, linewidth=0
            )
            drawn.set_rasterized(len(bars) > 500)
            used.setdefault(str(lane["kind"]), drawn)
        label_right(axes, place, f"busy {100 * _busy(lanes[name]) / max(end, 1e-9):.0f} %", FAINT)
    axes.set_yticks(range(len(names)), [shorten(name, LABEL) for name in names])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(end, 1e-9))
    _seconds_axis(axes, end)
    axes.set_xlabel(f"round {trace['round']} on {shorten(str(trace['device']), 40)}", color=FAINT)
    figure.legend(
        list(used.values()),
        list(used),
        loc="upper left",
        bbox_to_anchor=((left - 0.1) / WIDTH, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
    more = f"Shown: the busiest {len(names)} of {len(lanes)} lanes." if len(lanes) > len(names) else ""
    note_below(figure, " ".join(part for part in (more, note) if part))
    return figure


def _busy(lanes: Sequence[Mapping[str, Any]]) -> float:
    """The seconds in which a lane did something; kernels and copies of one stream do not overlap."""
    spans = np.array([span for lane in lanes for span in lane["spans"]], float).reshape(-1, 2)
    return float((spans[:, 1] - spans[:, 0]).sum())
