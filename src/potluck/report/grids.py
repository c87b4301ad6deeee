"""Tables of scores over settings, and how good each value is among all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.report.format import method_label
from potluck.report.measures import Measure


@dataclass(frozen=True)
class Grid:
    """A table of values to be drawn as a heat map; None where there is no value."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    row_name: str = ""
    column_name: str = ""


def grids(
    changes: Mapping[str, Mapping[str, Any]], scores: Mapping[str, Mapping[str, float | None]]
) -> list[Grid]:
    """Heat maps over settings: `changes` has the values of each setting by key, `scores` a row per name.

    Two keys give a matrix for each name; anything else one matrix, with a row per name and a column per setting.
    """
    keys = list(dict.fromkeys(key for each in changes.values() for key in each))
    same = all(set(each) == set(keys) for each in changes.values())
    if len(keys) == 2 and same:
        return [_matrix(name, keys, changes, row) for name, row in scores.items()]
    columns = tuple(changes)
    values = tuple(tuple(row.get(setting) for setting in columns) for row in scores.values())
    return [Grid("", tuple(map(method_label, scores)), columns, values)]


def _matrix(
    name: str, keys: Sequence[str], changes: Mapping[str, Mapping[str, Any]], row: Mapping[str, float | None]
) -> Grid:
    down, across = (list(dict.fromkeys(str(each[key]) for each in changes.values())) for key in keys)
    place = {(str(each[keys[0]]), str(each[keys[1]])): setting for setting, each in changes.items()}
    values = tuple(tuple(row.get(place.get((one, other), "")) for other in across) for one in down)
    return Grid(method_label(name), tuple(down), tuple(across), values, keys[0], keys[1])


def shares(grids: Sequence[Grid], measure: Measure) -> Callable[[float], float]:
    """How good a value is among all that are drawn, from 0 to 1."""
    known = [value for grid in grids for row in grid.values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)

    def share(value: float) -> float:
        found = (value - low) / (high - low) if high > low else 0.5
        return found if measure.higher_is_better else 1 - found

    return share
