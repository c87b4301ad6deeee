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
    if then is None:
        return "never"
    seconds = max(0.0, now - then)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _state(facts: Facts) -> str:
    if facts.get("state") in ("finished", "stopped"):
        return str(facts["state"])
    if not facts["alive"]:
        return f"gone: its process has not been heard of for {facts['age']:.0f} s"
    return str(facts.get("state", "running"))


def _server(facts: Facts, folder: str, now: float) -> Sheet:
    columns = (
        words("client", lambda entry: entry[0]),
        words("connected", lambda entry: _connected(entry[1], facts["alive"], now)),
        words("last reply", lambda entry: ago(entry[1]["replied"], now)),
        Column("refusals", lambda entry: entry[1]["refusals"], count),
        words("last refusal", lambda entry: entry[1]["refused"] or "–"),
    )
    here = sum(entry["connected"] for entry in facts["clients"].values()) if facts["alive"] else 0
    notes = [
        f"{_state(facts)}; round {facts['round']} of {facts['rounds']}; {here} of {len(facts['clients'])} clients "
        f"connected; started {ago(facts['started'], now)}",
        f"{_crossed(facts)}; {size(facts['disk_free'])} free on the disk",
        _versions(facts),
        *(f"not taken in: {node}: {reason}" for node, reason in facts["strangers"].items()),
        *([f"last: {facts['notice']}"] if facts.get("notice") else []),
    ]
    return Sheet(
        f"{facts['name']} ({facts['method']}), {folder}", columns, [*facts["clients"].items()], tuple(notes)
    )


def _connected(entry: Facts, alive: bool, now: float) -> str:
    if entry["excluded"]:
        return "excluded"
    if not alive:
        return "unknown"
    return f"since {ago(entry['since'], now)}" if entry["connected"] else "no"


def _site(facts: Facts, folder: str, now: float) -> Sheet:
    orders = facts.get("orders", {})
    rows = [
        ("state", _state(facts)),
        ("server", facts.get("server") or "–"),
        ("taken in", ago(facts.get("taken_in"), now)),
        ("last call answered", ago(facts.get("pulled"), now)),
        ("run", facts.get("run") or "–"),
        ("round", "–" if facts.get("round") is None else str(facts["round"])),
        ("last order", f"{facts.get('order') or '–'}, {ago(facts.get('ordered'), now)}"),
        ("orders", ", ".join(f"{number} {outcome}" for outcome, number in orders.items()) or "none"),
        ("last refusal", facts.get("refused") or "–"),
        ("bytes", _crossed(facts)),
        ("disk", f"{size(facts['disk_free'])} free"),
        ("trouble", facts.get("trouble") or "none"),
    ]
    columns = (words("", lambda row: row[0]), words("now", lambda row: row[1]))
    return Sheet(f"client {facts['client']}, {folder}", columns, rows, (_versions(facts),))


def _crossed(facts: Facts) -> str:
    return f"{size(facts.get('sent') or 0)} sent, {size(facts.get('received') or 0)} received"


def _versions(facts: Facts) -> str:
    flower = f", flower {facts['flower']}" if facts.get("flower") else ""
    return f"potluck {facts['potluck']}{flower}, process {facts['pid']}"
