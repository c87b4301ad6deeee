"""The tables of `potluck status`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from potluck.report.format import count, size
from potluck.report.render import Column, Sheet, words

Facts = Mapping[str, Any]


def status_sheet(facts: Facts, folder: str, now: float | None = None) -> Sheet:
    """Where a server or a site stands."""
    moment = time.time() if now is None else now
    return _server(facts, folder, moment) if facts["kind"] == "server" else _site(facts, folder, moment)


def ago(then: float | None, now: float) -> str:
    """How long ago something was, in words."""
    return "never" if then is None else f"{span(now - then)} ago"


def span(seconds: float) -> str:
    """A length of time, in words."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _state(facts: Facts) -> str:
    if facts.get("state") in ("finished", "stopped"):
        return str(facts["state"])
    if not facts["alive"]:
        return f"gone: its process has not been heard of for {span(facts['age'])}"
    return str(facts.get("state", "running"))


def _server(facts: Facts, folder: str, now: float) -> Sheet:
    columns = (
        words("client", lambda entry: entry[0]),
        words("connected", lambda entry: _connected(entry[1], facts["alive"], now)),
        words("last reply", lambda entry: ago(entry[1]["replied"], now)),
        Column("refusals", lambda entry: entry[1]["refusals"], count),
        words("last refusal", lambda entry: entry[1]["refused"] or "–"),
    )
    taking_part = [entry for entry in facts["clients"].values() if not entry["excluded"]]
    here = sum(entry["connected"] for entry in taking_part) if facts["alive"] else 0
    notes = [
        f"{_state(facts)}; round {facts['round']} of {facts['rounds']}; {here} of {len(taking_part)} clients "
        f"connected; started {ago(facts['started'], now)}",
        f"{_crossed(facts)}; {size(facts['disk_free'])} free on the disk",
        _versions(facts),
        *(f"not taken in: {node}: {reason}" for node, reason in facts["strangers"].items()),
        *_last(facts, now),
    ]
    return Sheet(
        f"{facts['name']} ({facts['method']}), {folder}", columns, [*facts["clients"].items()], tuple(notes)
    )


def _connected(entry: Facts, alive: bool, now: float) -> str:
    if entry["excluded"]:
        return "excluded"
    if not alive:
        return "unknown"
    if not entry["connected"]:
        return "no"
    return "yes" if entry["since"] is None else f"for {span(now - entry['since'])}"


def _last(facts: Facts, now: float) -> list[str]:
    """What was said last, with its time."""
    return [f"{ago(facts['noticed'], now)}: {facts['notice']}"] if facts.get("notice") else []


def _site(facts: Facts, folder: str, now: float) -> Sheet:
    rows = [("state", _state(facts)), ("started", ago(facts["started"], now))]
    if facts["half"] != "worker":
        rows += _node_rows(facts, now)
    if facts["half"] != "node":
        rows += _worker_rows(facts, now)
    rows.append(("disk", f"{size(facts['disk_free'])} free"))
    columns = (words("", lambda row: row[0]), words("now", lambda row: row[1]))
    half = "" if facts["half"] == "both" else f", its {facts['half']} alone"
    notes = (_versions(facts), *_last(facts, now))
    return Sheet(f"client {facts['client']}{half}, {folder}", columns, rows, notes)


def _node_rows(facts: Facts, now: float) -> list[tuple[str, str]]:
    return [
        ("server", facts["server"]),
        ("taken in", ago(facts["taken_in"], now)),
        ("last call answered", ago(facts["pulled"], now)),
        ("trouble", facts["trouble"] or "none"),
    ]


def _worker_rows(facts: Facts, now: float) -> list[tuple[str, str]]:
    if not facts["orders"]:
        return [("orders", "none so far")]
    refused = f"{facts['refused']} ({ago(facts['refused_at'], now)})" if facts["refused"] else "none"
    return [
        ("run", facts["run"] or "–"),
        ("round", "–" if facts["round"] is None else str(facts["round"])),
        ("last order", f"{facts['order'] or '–'}, {ago(facts['ordered'], now)}"),
        ("orders", ", ".join(f"{number} {outcome}" for outcome, number in facts["orders"].items())),
        ("last refusal", refused),
        ("bytes", _crossed(facts)),
    ]


def _crossed(facts: Facts) -> str:
    return f"{size(facts.get('sent') or 0)} sent, {size(facts.get('received') or 0)} received"


def _versions(facts: Facts) -> str:
    flower = f", flower {facts['flower']}" if facts.get("flower") else ""
    return f"potluck {facts['potluck']}{flower}, process {facts['pid']}"
