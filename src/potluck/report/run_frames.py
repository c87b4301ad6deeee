"""The log of a run as pandas frames."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.errors import RunError
from potluck.report.reading import REMEDY, check_width, log_lines, reading

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("round", "client", "moment", "mode")
LAST = ("loss", "samples")  # of every split, after the measures of the task


def frame(log: Path, accuracy: Mapping[str, Any]) -> pd.DataFrame:
    """A row per round, client, moment and mode: the test measures, then those of validation.

    `accuracy` is that of the summary; a log that has fewer lines is refused.
    """
    import pandas as pd

    lines = read_lines(log)
    check_whole(log, lines, accuracy)
    rows = [_row(line) for line in lines if "missing" not in line]
    with reading(log):
        check_width({name for row in rows for name in row}, len(rows), log.stat().st_size)
    found = pd.DataFrame(rows)
    order = [*KEYS, *_columns(found, ""), *_columns(found, "validation_"), "held_out"]
    counts = {
        name: "Int64" if found[name].isna().any() else "int64" for name in order if name.endswith("samples")
    }
    return found.reindex(columns=order).astype({"held_out": bool, **counts})


def comparable(values: pd.DataFrame, log: Path) -> pd.DataFrame:
    """The rows of a frame that can be compared from round to round; all of them where nobody was missing.

    At each moment and mode these are the rows of clients that were not missing in the last round with any
    measurement, in the rounds in which none of these was.
    """
    missing: dict[tuple[str, str], dict[int, set[str]]] = {}
    for line in read_lines(log):
        if "missing" in line:
            rounds = missing.setdefault((line["when"], line["mode"]), {})
            rounds.setdefault(line["round"], set()).add(line["client"])
    for (moment, mode), absent in missing.items():
        here = (values["moment"] == moment) & (values["mode"] == mode)
        left = absent.get(int(values[here]["round"].max()), set()) if here.any() else set()
        unlike = [round_ for round_, clients in absent.items() if not clients <= left]
        values = values[~(here & (values["client"].isin(left) | values["round"].isin(unlike)))]
    return values


def curves(values: pd.DataFrame) -> pd.DataFrame:
    """The mean over clients per round, moment and mode, without held-out clients; `clients` counts them."""
    measures = [name for name in values.columns if name not in (*KEYS, "held_out", "metric")]
    numbers = [name for name in measures if not name.endswith("samples")]
    groups = values[~values["held_out"]].groupby(["round", "moment", "mode"], sort=False)
    means = groups[numbers].mean()
    means.insert(0, "clients", groups.size())
    return means.reset_index()


def read_lines(log: Path, round_: int | None = None) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, of all rounds or of one."""
    if not log.exists():
        raise RunError(f"{log} is missing; {REMEDY}")
    begin = b"" if round_ is None else f'{{"round": {round_},'.encode()
    try:
        lines = enumerate(log_lines(log), 1)
        return [_measured(log, number, line) for number, line in lines if line.startswith(begin)]
    except OSError as error:
        raise RunError(f"{log} cannot be read: {error}; {REMEDY}") from error


def _measured(log: Path, number: int, text: bytes) -> dict[str, Any]:
    """A line of the log; one that is no measurement is refused."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{log}, line {number} is damaged: it is not JSON; {REMEDY}") from error
    whole = isinstance(line, dict) and type(line.get("round")) is int
    if not whole or not all(isinstance(line.get(key), str) for key in ("client", "when", "mode")):
        raise RunError(f"{log}, line {number} is damaged: it has no round, client, moment and mode; {REMEDY}")
    if not all(isinstance(line.get(split, {}), dict) for split in ("test", "validation")):
        raise RunError(f"{log}, line {number} is damaged: a split of it has no measures; {REMEDY}")
    measured: dict[str, Any] = line
    return measured


def check_whole(log: Path, lines: Iterable[Mapping[str, Any]], accuracy: Mapping[str, Any]) -> None:
    """Refuse a log that lacks a client which the summary's block `accuracy` has in its last round."""
    last = (accuracy.get("rounds") or {}).get("last")
    wanted = {*(accuracy.get("per_client") or {})} if last is not None else set()
    there = {line.get("client") for line in lines if line["round"] == last}
    if not wanted <= there:
        raise RunError(
            f"{log} has lost lines: the summary has {len(wanted)} clients in round {last}, the log "
            f"{len(wanted & there)}; {REMEDY}"
        )


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    row = {"round": line["round"], "client": line["client"], "moment": line["when"], "mode": line["mode"]}
    for split, prefix in (("test", ""), ("validation", "validation_")):
        measures = {
            name: value for name, value in line.get(split, {}).items() if name not in ("score", "metric")
        }
        row |= {f"{prefix}{name}": value for name, value in measures.items()}
    return row | {"held_out": bool(line.get("held_out"))}


def _columns(found: pd.DataFrame, prefix: str) -> list[str]:
    """The measures of a split, its loss and number of samples last."""
    others = [name for name in found.columns if name not in (*KEYS, "held_out")]
    own = [name for name in others if name.startswith("validation_") == bool(prefix)]
    last = [f"{prefix}{name}" for name in LAST if f"{prefix}{name}" in own]
    return [name for name in own if name not in last] + last
