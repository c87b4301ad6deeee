"""Pictures of scores over settings in which runs differ: lines over one, heat maps over two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from potluck.errors import ConfigError
from potluck.report.format import capital, counted
from potluck.report.grids import Grid
from potluck.report.measures import Measure
from potluck.report.pictures.grids import heat_map
from potluck.report.pictures.options import OptionLine, Value, option_picture
from potluck.runs.pictures.asked import Asked, RunFiles
from potluck.runs.pictures.settings import flat, in_words, keys_over, labels, short, shown, varied


def option(asked: Asked) -> Figure:
    """Scores over the values of one setting, a line per method."""
    (key,) = keys_over(asked.runs, asked.options.over, 1)
    points: dict[str, dict[Value | None, list[float]]] = {}
    for run, label in zip(asked.runs, labels(asked.runs, [key]), strict=True):
        values = flat(run.config)
        value = _value(values[key]) if values.get(key) is not None else None
        points.setdefault(label, {}).setdefault(value, []).append(_score(run))
    lines = [_line(in_words(label), own) for label, own in points.items()]
    measure = asked.runs[0].measure
    lines.sort(key=lambda line: (line.flat, measure.rank(line.mean[-1])))
    about = _about(asked, measure, "; the band is one standard deviation over seeds")
    return option_picture(lines, key, measure, about, in_words("local"))


def _value(value: Any) -> Value:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else shown(value)


def _line(label: str, own: Mapping[Value | None, list[float]]) -> OptionLine:
    known: Mapping[Value | None, list[float]] = {
        value: scores for value, scores in own.items() if value is not None
    } or own
    numbers = all(isinstance(value, float) for value in known)
    ordered = sorted(known, key=lambda value: float(value or 0)) if numbers else list(known)
    means = tuple(math.fsum(known[value]) / len(known[value]) for value in ordered)
    spread = tuple(
        float(np.std(known[value], ddof=1)) if len(known[value]) > 1 else None for value in ordered
    )
    return OptionLine(label, tuple(ordered), means, spread)


def grid(asked: Asked) -> Figure:
    """Scores over the values of two settings, as a heat map per method."""
    down, across = keys_over(asked.runs, asked.options.over, 2)
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for run, label in zip(asked.runs, labels(asked.runs, [down, across]), strict=True):
        values = flat(run.config)
        if values.get(down) is not None and values.get(across) is not None:
            place = shown(values[down]), shown(values[across])
            found.setdefault(label, {}).setdefault(place, []).append(_score(run))
    if not found:
        raise ConfigError(f"no run has both {down} and {across}; name two settings of the same runs")
    keys = varied(asked.runs)
    maps = [_grid(label, own, short(down, keys), short(across, keys)) for label, own in found.items()]
    measure = asked.runs[0].measure
    return heat_map(maps, measure, _about(asked, measure))


def _grid(label: str, own: Mapping[tuple[str, str], list[float]], down: str, across: str) -> Grid:
    rows, columns = (list(dict.fromkeys(place[side] for place in own)) for side in (0, 1))
    values = tuple(
        tuple(float(np.mean(own[row, column])) if (row, column) in own else None for column in columns)
        for row in rows
    )
    return Grid(in_words(label), tuple(rows), tuple(columns), values, down, across)


def _score(run: RunFiles) -> float:
    last: float | None = run.scores["last"]
    if last is None:
        raise run.no_score()
    return last


def _about(asked: Asked, measure: Measure, more: str = "") -> str:
    seeds = len({str(run.config.get("seed")) for run in asked.runs})
    if seeds < 2:
        return f"{capital(measure.with_unit)}: mean over clients, last round, one seed."
    return f"{capital(measure.with_unit)}: mean over clients and {counted(seeds, 'seed')}, last round{more}."
