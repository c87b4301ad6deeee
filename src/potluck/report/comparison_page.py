"""`comparison.html` and `sweep.html`: methods side by side, and comparisons side by side, as pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from potluck.files import read_bounded, write_anew
from potluck.report.again import SETTINGS
from potluck.report.comparison_charts import bytes_chart, curves_chart, gains_chart, intervals_chart
from potluck.report.format import VIEW_NAMES, capital, counted, method_label
from potluck.report.grids import Grid, grids, shares
from potluck.report.html import in_words, render
from potluck.report.measures import Measure
from potluck.report.page import split_part
from potluck.report.reading import reading
from potluck.report.render import Column, Sheet, words
from potluck.report.sheets import (
    about_means,
    clients_sheet,
    comparison_sheet,
    differences_sheet,
    further_sheet,
    gains_sheet,
    has_modes,
    in_given_order,
    measure_in,
    measured_sheet,
    moments_of,
    rounds_sheet,
    row_label,
    sweep_sheet,
    targets_sheet,
)
from potluck.report.split_file import read_split

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_comparison(path: Path, comparison: Mapping[str, Any]) -> Path:
    """Write the page that shows several methods side by side, from the result of `compare_runs`.

    The split and the settings are read from the folder of the page, where there are any.
    """
    path = Path(path)
    methods = comparison_sheet(comparison)
    makers = (measured_sheet, clients_sheet, further_sheet, rounds_sheet, targets_sheet)
    others = [sheet for make in makers if (sheet := make(comparison))]
    seeds = comparison.get("seeds") or ()
    context = {
        "title": methods.title,
        "subtitle": f"{_seeds(comparison)} · {_view(comparison)}",
        "measure": capital(measure_in(comparison).name),
        "several_seeds": len(seeds) > 1,
        "lower": "" if measure_in(comparison).higher_is_better else " Lower is better.",
        "means": capital(about_means(comparison)),
        "moments": moments_of(comparison["methods"]),
        "by_reported_mode": _by_reported_mode(comparison),
        "sheets": [("Methods", methods), *((sheet.title, sheet) for sheet in others)],
        "gains": gains_sheet(comparison),
        "differences": differences_sheet(comparison),
        "clients": gains_chart(comparison),
        "intervals": intervals_chart(comparison),
        "heat": Heat(_variants_grids(comparison), measure_in(comparison)),
        "curves": curves_chart(comparison),
        "bytes": bytes_chart(comparison),
        "split": _split(path.parent, comparison),
        "runs": _runs(comparison),
        "variants": _variants(comparison),
        "settings": _settings(path.parent),
    }
    write_anew(path, render("comparison.html.j2", context))
    return path


def _view(comparison: Mapping[str, Any]) -> str:
    return VIEW_NAMES.get(comparison.get("view", "last"), "")


@dataclass(frozen=True)
class Heat:
    """Tables of scores on a page, coloured by how good they are among all."""

    grids: Sequence[Grid]
    measure: Measure

    def cells(self, values: Sequence[float | None]) -> list[tuple[str, float | None]]:
        """Every value of a row in words, and how good it is."""
        share = shares(self.grids, self.measure)
        return [(self.measure.value(value), None if value is None else share(value)) for value in values]


def variants_heat_map(comparison: Mapping[str, Any]) -> Figure | None:
    """The scores of variants over the two keys that they change, a map for every product; None without one."""
    from potluck.report.pictures.grids import heat_map

    drawn, measure = _variants_grids(comparison), measure_in(comparison)
    note = f"{capital(measure.with_unit)}: {about_means(comparison)}{_by_reported_mode(comparison)}"
    return heat_map(drawn, measure, note) if drawn else None


def _variants_grids(comparison: Mapping[str, Any]) -> list[Grid]:
    changes = {
        label: {key: in_words(value) for key, value in each.items()}
        for label, each in (comparison.get("variants") or {}).items()
    }
    found = {entry["method"]: entry["accuracy"]["mean"] for entry in comparison["methods"]}
    measure, drawn = measure_in(comparison), list[Grid]()
    for keys in dict.fromkeys(tuple(each) for each in changes.values()):
        part = {label: each for label, each in changes.items() if tuple(each) == keys}
        if len(keys) == 2 and len(part) >= 4:
            drawn += grids(part, {measure.head: found})
    return drawn


def _by_reported_mode(comparison: Mapping[str, Any]) -> str:
    """Where methods have several modes, that the reported one is shown."""
    return ", by the reported mode of each method" if any(map(has_modes, comparison["methods"])) else ""


def _split(folder: Path, comparison: Mapping[str, Any]) -> dict[str, Any] | None:
    """The split of the first seed."""
    runs = comparison["methods"][0].get("runs") or {}
    seed, name = next(iter(runs.items()), (None, ""))
    split = read_split(folder / name / "split.json") if name else {}
    part = split_part(split)
    return None if part is None else part | {"seed": seed}


def _runs(comparison: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The reports of all runs by method, as seed and address."""
    return [
        (
            method_label(entry["method"]),
            [(seed, f"{quote(name)}/report.html") for seed, name in entry["runs"].items()],
        )
        for entry in comparison["methods"]
        if entry.get("runs")
    ]


def _seeds(comparison: Mapping[str, Any]) -> str:
    seeds = comparison.get("seeds") or ()
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def _variants(comparison: Mapping[str, Any]) -> Sheet | None:
    """What each variant changes."""
    variants = comparison.get("variants") or {}
    keys = list(dict.fromkeys(key for changes in variants.values() for key in changes))
    if not set(keys) - {"method"}:  # which the other tables name
        return None

    def column(key: str) -> Column:
        return words(key, lambda entry: in_words(entry[1][key]) if key in entry[1] else None)

    columns = (words("variant", lambda entry: entry[0]), *map(column, keys))
    return Sheet("What each variant changes", columns, list(variants.items()))


def _settings(folder: Path) -> str:
    path = folder / SETTINGS
    with reading(path):
        return read_bounded(path, follow=False).decode("utf-8") if path.exists() else ""


# --- sweeps ---------------------------------------------------------------------------------------------


def write_sweep(path: Path, sweep: Mapping[str, Any], comparisons: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the page of a sweep: a heat map over its settings, a table of all, and links to the comparisons."""
    first = next(iter(comparisons.values()))
    measure = measure_in(first)
    context = {
        "title": f"{counted(len(comparisons), 'setting')} of {sweep['name']}",
        "subtitle": f"{_seeds(first)} · {_view(first)}",
        "measure": capital(measure.name),
        "lower": "" if measure.higher_is_better else " Lower is better.",
        "means": capital(about_means(first)),
        "heat": Heat(_sweep_grids(sweep, comparisons), measure),
        "sheet": sweep_sheet(sweep["settings"], comparisons),
        "links": [(setting, f"{quote(setting)}/comparison.html") for setting in comparisons],
        "settings": _settings(Path(path).parent / next(iter(comparisons))),
    }
    write_anew(Path(path), render("sweep.html.j2", context))
    return Path(path)


def sweep_heat_map(sweep: Mapping[str, Any], comparisons: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The score of every method in every setting and mode."""
    from potluck.report.pictures.grids import heat_map

    first = next(iter(comparisons.values()))
    measure = measure_in(first)
    note = f"{capital(measure.with_unit)}: {about_means(first)}"
    return heat_map(_sweep_grids(sweep, comparisons), measure, note)


def _sweep_grids(sweep: Mapping[str, Any], comparisons: Mapping[str, Mapping[str, Any]]) -> list[Grid]:
    scores: dict[str, dict[str, float | None]] = {}
    for setting, comparison in comparisons.items():
        for row in in_given_order(comparison):
            scores.setdefault(row_label(row), {})[setting] = row["accuracy"]["mean"]
    changes = {
        setting: {key: in_words(value) for key, value in sweep["settings"][setting].items()}
        for setting in comparisons
    }
    return grids(changes, scores)
