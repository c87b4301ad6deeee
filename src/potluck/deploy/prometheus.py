"""The status of a server or a site for Prometheus: text over HTTP, on this machine alone."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from potluck.errors import ConfigError

TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = "127.0.0.1"
CONNECTIONS = 16  # at the same time
Sample = tuple[str, Mapping[str, str], float]

HELP = {
    "potluck_info": "versions, as labels",
    "potluck_round": "the last round that was played",
    "potluck_rounds": "the rounds of the run",
    "potluck_client_connected": "whether a client is connected",
    "potluck_client_last_reply_seconds": "when a client last answered, in seconds since 1970",
    "potluck_client_refusals_total": "answers of a client that could not be used, or did not come",
    "potluck_strangers": "nodes that were not taken in",
    "potluck_bytes_total": "bytes that crossed, envelopes included",
    "potluck_disk_free_bytes": "room on the disk of the folder",
    "potluck_started_seconds": "when the process started, in seconds since 1970",
    "potluck_node_last_pull_seconds": "when the site's node last asked for messages, in seconds since 1970",
    "potluck_orders_total": "orders that the site's worker has answered or refused",
}


def exposition(facts: Mapping[str, Any]) -> str:
    """The facts in the text format of Prometheus."""
    groups: dict[str, list[str]] = {}
    for name, labels, value in _samples(facts):
        told = ",".join(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in labels.items())
        groups.setdefault(name, []).append(f"{name}{{{told}}} {value!r}" if told else f"{name} {value!r}")
    lines: list[str] = []
    for name, samples in groups.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}", *samples]
    return "\n".join([*lines, ""])


def _samples(facts: Mapping[str, Any]) -> Iterator[Sample]:
    versions = {"kind": facts["kind"], "potluck": facts.get("potluck"), "flower": facts.get("flower")}
    yield "potluck_info", {key: str(text) for key, text in versions.items() if text}, 1
    for key in ("round", "rounds"):
        if facts.get(key) is not None:
            yield f"potluck_{key}", {}, facts[key]
    for name, entry in facts.get("clients", {}).items():
        label = {"client": name}
        yield "potluck_client_connected", label, int(entry["connected"])
        yield "potluck_client_refusals_total", label, entry["refusals"]
        if entry["replied"] is not None:
            yield "potluck_client_last_reply_seconds", label, entry["replied"]
    if "strangers" in facts:
        yield "potluck_strangers", {}, len(facts["strangers"])
    for direction in ("sent", "received"):
        if facts.get(direction) is not None:
            yield "potluck_bytes_total", {"direction": direction}, facts[direction]
    for outcome, number in facts.get("orders", {}).items():
        yield "potluck_orders_total", {"outcome": outcome}, number
    for key, name in (
        ("disk_free", "potluck_disk_free_bytes"),
        ("started", "potluck_started_seconds"),
        ("pulled", "potluck_node_last_pull_seconds"),
    ):
        if facts.get(key) is not None:
            yield name, {}, facts[key]


@contextlib.contextmanager
def exposed(port: int | None, facts: Callable[[], Mapping[str, Any]]) -> Iterator[int | None]:
    """Answer `/metrics` on a port of this machine while the block runs; no port, no server."""
    if port is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds a connection may be silent

        def do_GET(self) -> None:
            """Answer with the facts of now."""
            host = (self.headers.get("Host") or LOOPBACK).rpartition(":")[0] or self.headers.get("Host")
            if host not in (
                LOOPBACK,
                "localhost",
                None,
            ):  # a page in a browser may have been led here by name
                self.send_error(421)
                return
            known = self.path.partition("?")[0] == "/metrics"
            body = exposition(facts()).encode() if known else b"there is only /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", TYPE if known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        room = threading.BoundedSemaphore(CONNECTIONS)

        def process_request(self, request: Any, client_address: Any) -> None:
            """One more connection, or none beyond so many."""
            if self.room.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            """As before; its place is free afterwards."""
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.room.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: whoever asked has no answer, and asks again."""

    try:
        server = Server((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--prometheus: port {port} of {LOOPBACK} cannot be used: {error}") from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
