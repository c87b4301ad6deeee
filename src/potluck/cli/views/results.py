"""The results of a run and of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from potluck.report import sheets
from potluck.report.render import Sheet
from potluck.report.split_file import read_split
from potluck.runs.folder import RunFolder
from potluck.runs.results.run_result import RunResult

MOST_CLIENTS = 20  # a run with more of them is shown as a whole


def run_sheet_of(result: RunResult) -> Sheet:
    """A row per client and the run as a whole; with many clients the whole alone."""
    split = read_split(result.folder / "split.json")
    models = RunFolder(result.folder).about().get("models", {})
    rows = sheets.client_rows(split, result.summary["accuracy"], models)
    kept = result.clients.models.kept_round
    sheet = sheets.run_sheet(result.summary, rows if len(rows) <= MOST_CLIENTS else [], kept)
    data = dict.fromkeys(one.get("data") for one in split.get("groups") or [split])
    named = ", ".join(str(name) for name in data if name)
    return replace(sheet, title=f"{sheet.title}, data {named}") if named else sheet


def comparison_sheets(comparison: Mapping[str, Any]) -> Iterator[Sheet]:
    """The table of the methods, then the further tables that were asked for."""
    yield sheets.comparison_sheet(comparison)
    further = (
        sheets.measured_sheet,
        sheets.clients_sheet,
        sheets.further_sheet,
        sheets.rounds_sheet,
        sheets.targets_sheet,
        sheets.gains_sheet,
    )
    for make in further:
        sheet = make(comparison)
        if sheet is not None:
            yield sheet
