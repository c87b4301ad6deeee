"""Snapshots as tables, for `potluck status` and for `potluck watch` in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from potluck.live.board import ClientStatus
from potluck.live.snapshot import ClientView, Snapshot
from potluck.report.format import NOTHING, count, counted, duration, number, size
from potluck.report.render import Column, Sheet, words

MOST_ROWS = 40  # clients, or runs
FULL = 1 << 16  # bytes of room on a disk below which nothing of use can be written
BLOCKS = "▁▂▃▄▅▆▇█"
Row = tuple[str, ClientView]


# --- words ----------------------------------------------------------------------------------------------


def ago(then: float | None, now: float) -> str:
    """How long ago something was, in words."""
    return "never" if then is None else f"{span(now - then)} ago"


def span(seconds: float) -> str:
    """A length of time, in words."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def state_in_words(now: Snapshot, moment: float) -> str:
    """The state of a run or a site, with the reason where there is one."""
    if now.state == "gone":
        silent = moment - (now.updated or moment)
        if silent < 0:
            return f"gone: its last news is {span(-silent)} ahead of the clock here"
        full = now.disk_free is not None and now.disk_free < FULL
        perhaps = "; the disk is full, so it may be there and unable to tell: make room" if full else ""
        return f"gone: its process has not been heard of for {span(silent)}{perhaps}"
    if now.state == "unfinished":
        return "unfinished, and no process reports on it"
    if now.state == "writing":
        return "writing models and report"
    if now.state == "waiting" and (away := _awaited(now)):
        return f"waiting for {away} to join"
    return f"{now.state}: {now.why}" if now.why else now.state


def _awaited(now: Snapshot) -> str:
    """The clients that are not there, the first few by name."""
    away = [name for name, one in now.clients.items() if not (one.excluded or one.connected)]
    return f"{', '.join(away[:4])}{f' and {len(away) - 4:,} more' * (len(away) > 4)}"


def progress(now: Snapshot) -> str:
    """How far a run is."""
    return f"round {now.round:,} of {now.rounds:,}" if now.rounds else NOTHING


def curve_in_blocks(now: Snapshot, width: int = 40) -> str:
    """The score over rounds as a line of blocks."""
    values = [value for value in now.curve.score if value is not None]
    if len(values) < 2:
        return ""
    chosen = [
        values[place * len(values) // min(width, len(values))] for place in range(min(width, len(values)))
    ]
    chosen[-1] = values[-1]
    low, high = min(chosen), max(chosen)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in chosen)


# --- several runs ---------------------------------------------------------------------------------------


def overview_sheet(found: Sequence[Snapshot], title: str, moment: float | None = None) -> Sheet:
    """Some runs side by side, a row each."""
    at = time.time() if moment is None else moment
    measures = {one.measure.name for one in found if one.score is not None}
    columns = (
        words("run", lambda one: one.label),
        words("method", lambda one: one.method or NOTHING),
        words("state", lambda one: one.state),
        Column("round", lambda one: f"{one.round:,}/{one.rounds:,}" if one.rounds else NOTHING),
        Column(measures.pop() if len(measures) == 1 else "score", lambda one: one.measure.full(one.score)),
        Column("loss", lambda one: number(one.loss)),
        Column("a round", lambda one: duration(one.seconds_per_round)),
        Column("left", lambda one: duration(one.left(at))),
        Column("messages", lambda one: size(sum(one.messages.values()) or None)),
        Column("memory", lambda one: size(one.memory.get("process"))),
    )
    notes = [f"{one.label}: {told}" for one in found if (told := trouble(one, at))]
    return Sheet(title, columns, found, tuple(notes)).without_empty_columns()


def trouble(now: Snapshot, moment: float) -> str:
    """What somebody should know of a run that does not go on as it should; empty where all is well."""
    if now.problem:
        return now.problem
    if now.kind == "site" and now.alive and now.site.get("trouble"):
        return str(now.site["trouble"])
    return state_in_words(now, moment) if now.why or now.state == "gone" else ""


# --- one run, or one site -------------------------------------------------------------------------------


def status_sheet(now: Snapshot, moment: float | None = None, rows: int = MOST_ROWS) -> Sheet:
    """Where a run, a server or a site stands."""
    at = time.time() if moment is None else moment
    return _site(now, at) if now.kind == "site" else _run(now, at, rows)


def _run(now: Snapshot, moment: float, rows: int) -> Sheet:
    shown: list[Row] = ranked(now)
    served = now.kind == "server"
    columns = [words("client", lambda row: row[0])]
    if served:
        columns += [
            words("connected", lambda row: _connected(row[1], now.alive, moment)),
            words("last reply", lambda row: ago(row[1].replied, moment)),
        ]
    columns += [
        Column(now.measure.name, lambda row: now.measure.full(row[1].score)),
        Column("trained in", lambda row: duration(row[1].seconds)),
        Column("refusals", lambda row: row[1].refusals or (0 if served else None), count),
        words("last refusal", lambda row: row[1].refused or NOTHING),
    ]
    title = f"{now.label} ({now.method})" if now.method else now.label
    columns = columns if shown else columns[:1]
    sheet = Sheet(f"{title}, {now.folder}", tuple(columns), shown, tuple(_notes(now, moment)))
    return sheet.without_empty_columns().first(rows, "--json")


def ranked(now: Snapshot) -> list[Row]:
    """The clients: few as they are listed, of many those with trouble first, then the slowest, then the worst."""
    rows = [*now.clients.items()]
    if len(rows) <= MOST_ROWS:
        return rows
    sign = 1.0 if now.measure.higher_is_better else -1.0

    def rank(row: Row) -> tuple[int, float, float]:
        one = row[1]
        return -one.refusals, -(one.seconds or 0.0), sign * one.score if one.score is not None else 0.0

    return sorted(rows, key=rank)


def _notes(now: Snapshot, moment: float) -> list[str]:
    notes = [_standing(now, moment)]
    if now.score is not None:
        best = "" if now.best == now.score else f", best {now.measure.full(now.best)}"
        lost = "" if now.loss is None else f"; loss {number(now.loss)}"
        notes.append(
            f"{now.measure.name} {now.measure.full(now.score)}{best}{lost}  {curve_in_blocks(now)}".rstrip()
        )
    if now.seconds_per_round is not None:
        left = f", {duration(now.left(moment))} left" if now.seconds_left else ""
        notes.append(f"a round takes {duration(now.seconds_per_round)}{left}{_slowest(now)}")
    notes += [_resources(now)] if _resources(now) else []
    if now.potluck:
        notes.append(_versions(now))
    notes += [f"not taken in: {node}: {reason}" for node, reason in now.strangers.items()]
    notes += [now.problem] if now.problem else []
    return notes + [f"{ago(at, moment)}: {sentence}" for at, sentence in now.notices[-3:]]


def _standing(now: Snapshot, moment: float) -> str:
    parts = [state_in_words(now, moment), progress(now)]
    if now.kind == "server":
        taking_part = [entry for entry in now.clients.values() if not entry.excluded]
        here = sum(entry.connected for entry in taking_part) if now.alive else 0
        parts.append(f"{here} of {counted(len(taking_part), 'client')} connected")
    parts.append(f"started {ago(now.started, moment)}" if now.started is not None else NOTHING)
    return "; ".join(part for part in parts if part != NOTHING)


def _slowest(now: Snapshot) -> str:
    known = sorted(
        ((one.seconds, name) for name, one in now.clients.items() if one.seconds is not None), reverse=True
    )
    if len(known) < 2:
        return ""
    return "; slowest: " + ", ".join(f"{name} ({duration(took)})" for took, name in known[:3])


def _resources(now: Snapshot) -> str:
    parts = []
    if any(now.messages.values()):
        parts.append(
            f"messages: {size(now.messages['up'])} up, {size(now.messages['down'])} down, evaluation included"
        )
    if now.kind == "server":
        parts.append(_crossed(now))
    if now.memory:
        parts.append("memory: " + ", ".join(f"{size(held)} ({where})" for where, held in now.memory.items()))
    if now.disk_free is not None:
        parts.append(f"{size(now.disk_free)} free on the disk")
    return "; ".join(parts)


def _connected(entry: ClientStatus, alive: bool, moment: float) -> str:
    if entry.excluded:
        return "excluded"
    if not alive:
        return "unknown"
    if not entry.connected:
        return "no"
    return "yes" if entry.since is None else f"for {span(moment - entry.since)}"


def _crossed(now: Snapshot) -> str:
    return f"{size(now.sent or 0)} sent, {size(now.received or 0)} received"


def _versions(now: Snapshot) -> str:
    flower = f", flower {now.flower}" if now.flower else ""
    return f"potluck {now.potluck}{flower}, process {now.pid}"


# --- a site ---------------------------------------------------------------------------------------------


def _site(now: Snapshot, moment: float) -> Sheet:
    half = now.site["half"]
    rows = [("state", state_in_words(now, moment)), ("started", ago(now.started, moment))]
    if now.alive:  # the trouble of one that has ended is past
        rows.append(("trouble", now.site["trouble"] or "none"))
    if half != "worker":
        rows += _node_rows(now, moment)
    if half != "node":
        rows += _worker_rows(now, moment)
    rows += [(f"memory ({where})", size(held)) for where, held in now.memory.items()]
    rows.append(("disk", f"{size(now.disk_free)} free"))
    columns = (words("", lambda row: row[0]), words("now", lambda row: row[1]))
    alone = "" if half == "both" else f", its {half} alone"
    last = [f"{ago(at, moment)}: {sentence}" for at, sentence in now.notices]
    return Sheet(f"client {now.name}{alone}, {now.folder}", columns, rows, (_versions(now), *last))


def _node_rows(now: Snapshot, moment: float) -> list[tuple[str, str]]:
    site = now.site
    return [
        ("server", site["server"]),
        ("taken in", ago(site["taken_in"], moment)),
        ("last call answered", ago(site["pulled"], moment)),
    ]


def _worker_rows(now: Snapshot, moment: float) -> list[tuple[str, str]]:
    site = now.site
    if not site.get("orders"):
        return [("orders", "none so far")]
    refused = f"{site['refused']} ({ago(site['refused_at'], moment)})" if site["refused"] else "none"
    return [
        ("run", site["run"] or NOTHING),
        ("round", NOTHING if site["round"] is None else str(site["round"])),
        ("last order", f"{site['order'] or NOTHING}, {ago(site['ordered'], moment)}"),
        ("orders", ", ".join(f"{number} {outcome}" for outcome, number in site["orders"].items())),
        ("last refusal", refused),
        ("bytes", _crossed(now)),
    ]
