"""A snapshot for Prometheus: text over HTTP, on this machine alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from potluck.live.loopback import Page, answering
from potluck.live.snapshot import Snapshot

TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[str, Mapping[str, str], float | None]

HELP = {
    "potluck_info": "versions, as labels",
    "potluck_round": "the last finished round",
    "potluck_rounds": "the rounds of the run",
    "potluck_score": "the mean over clients of what they are judged by, when they were last measured",
    "potluck_loss": "the mean test loss over clients, when they were last measured",
    "potluck_round_seconds": "how long a round takes, the median of the last ones",
    "potluck_left_seconds": "how long the run takes to its end, if its rounds take as long as the last ones",
    "potluck_client_connected": "whether a client is connected",
    "potluck_client_last_reply_seconds": "when a client last answered, in seconds since 1970",
    "potluck_client_refusals_total": "answers of a client that could not be used, or did not come",
    "potluck_client_train_seconds": "how long a client takes to train in a round, the last ones weighing most",
    "potluck_strangers": "nodes that were not taken in",
    "potluck_bytes_total": "bytes that crossed, envelopes included",
    "potluck_memory_bytes": "memory of the process, on the machine and on its GPUs",
    "potluck_disk_free_bytes": "room on the disk of the folder",
    "potluck_started_seconds": "when the process started, in seconds since 1970",
    "potluck_node_last_pull_seconds": "when the site's node last asked for messages, in seconds since 1970",
    "potluck_orders_total": "orders that the site's worker has answered or refused",
}


def exposition(now: Snapshot) -> str:
    """A snapshot in the text format of Prometheus."""
    groups: dict[str, list[str]] = {}
    for name, labels, value in _samples(now):
        if value is not None:
            told = ",".join(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in labels.items())
            groups.setdefault(name, []).append(f"{name}{{{told}}} {value!r}" if told else f"{name} {value!r}")
    lines: list[str] = []
    for name, samples in groups.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}", *samples]
    return "\n".join([*lines, ""])


def _samples(now: Snapshot) -> Iterator[Sample]:
    versions = {"kind": now.kind, "potluck": now.potluck, "flower": now.flower}
    yield "potluck_info", {key: text for key, text in versions.items() if text}, 1
    yield from _site(now) if now.kind == "site" else _run(now)
    for direction, number in (("sent", now.sent), ("received", now.received)):
        yield "potluck_bytes_total", {"direction": direction}, number
    for where, number in now.memory.items():
        yield "potluck_memory_bytes", {"where": where}, number
    yield "potluck_disk_free_bytes", {}, now.disk_free
    yield "potluck_started_seconds", {}, now.started


def _run(now: Snapshot) -> Iterator[Sample]:
    yield "potluck_round", {}, now.round
    yield "potluck_rounds", {}, now.rounds
    yield "potluck_score", {"measure": now.measure.name}, now.score
    yield "potluck_loss", {}, now.loss
    yield "potluck_round_seconds", {}, now.seconds_per_round
    yield "potluck_left_seconds", {}, now.left(time.time())
    for name, entry in now.clients.items():
        label = {"client": name}
        yield "potluck_client_connected", label, int(entry.connected)
        yield "potluck_client_refusals_total", label, entry.refusals
        yield "potluck_client_last_reply_seconds", label, entry.replied
        yield "potluck_client_train_seconds", label, entry.seconds
    yield "potluck_strangers", {}, len(now.strangers)


def _site(now: Snapshot) -> Iterator[Sample]:
    yield "potluck_round", {}, now.site.get("round")
    yield "potluck_node_last_pull_seconds", {}, now.site.get("pulled")
    for outcome, number in now.site.get("orders", {}).items():
        yield "potluck_orders_total", {"outcome": outcome}, number


def exposed(port: int | None, look: Callable[[], Snapshot]) -> AbstractContextManager[int | None]:
    """Answer `/metrics` on a port of this machine; no port, no server."""

    def pages(path: str, query: str) -> Page | None:
        return Page(TYPE, exposition(look()).encode()) if path == "/metrics" else None

    return answering(port, "--prometheus", pages)
