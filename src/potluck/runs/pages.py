"""The pages of runs, comparisons and sweeps, written anew from a folder that may have come from anywhere."""

from __future__ import annotations

from pathlib import Path

from potluck.report.comparison_page import write_comparison, write_sweep
from potluck.report.page import write_report
from potluck.report.reading import reading
from potluck.runs.comparisons.comparison import COMPARISON, SWEEP, Comparison, begun_runs
from potluck.runs.open import looked_at, runs_so_far
from potluck.runs.results.open_run import check_run


def write_pages(folder: Path) -> list[Path]:
    """Write all pages of a folder: that of a run, or those of a comparison or a sweep and of the runs in it.

    A comparison that is not finished has only those of its runs.
    """
    if begun := runs_so_far(folder):
        return list(map(_of_run, begun))
    found = looked_at(folder)
    if isinstance(found, Path):
        return [_of_run(found)]
    if isinstance(found, Comparison):
        return _of_comparison(found)
    parts = found.comparisons
    with reading(folder / SWEEP):
        about = {"name": found.name, "settings": found.settings}
        own = write_sweep(folder / "sweep.html", about, {name: one.comparison for name, one in parts.items()})
    return [own, *(page for one in parts.values() for page in _of_comparison(one))]


def _of_comparison(found: Comparison) -> list[Path]:
    with reading(found.folder / COMPARISON):
        own = write_comparison(found.folder / "comparison.html", found.comparison)
    return [own, *map(_of_run, begun_runs(found.folder))]


def _of_run(folder: Path) -> Path:
    check_run(folder)
    return write_report(folder)
