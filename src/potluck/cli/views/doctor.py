"""What `potluck doctor` found, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potluck.report.render import Sheet, words


def doctor_sheet(findings: Sequence[Any], usable: bool) -> Sheet:
    """A row for everything that was looked at."""
    columns = (
        words("about", lambda one: one.about),
        words("name", lambda one: one.name),
        words("state", lambda one: one.state),
        words("found", lambda one: one.found),
        words("what to do", lambda one: one.remedy if one.state != "ok" else None),
    )
    verdict = "Potluck works here." if usable else "Potluck does not work here: see what is broken above."
    return Sheet("doctor", columns, findings, (verdict,))
