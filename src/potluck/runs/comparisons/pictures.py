"""The pictures of a comparison by kind; loaded when one is asked for, as they need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from potluck.report.comparison_page import variants_heat_map
from potluck.report.pictures.clients import gain_bars
from potluck.report.pictures.cost import cost_picture
from potluck.report.pictures.curves import curves_picture
from potluck.report.pictures.differences import interval_picture


def _has_differences(comparison: Mapping[str, Any]) -> bool:
    return any(entry.get("difference") for entry in comparison["methods"])


PICTURES: dict[str, Callable[[Mapping[str, Any]], Figure | None]] = {
    "curves": curves_picture,
    "differences": lambda found: interval_picture(found) if _has_differences(found) else None,
    "cost": cost_picture,
    "gains": gain_bars,
    "grid": variants_heat_map,
}
