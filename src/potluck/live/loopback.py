"""A small web server on this machine alone, which answers while a block runs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from potluck.errors import ConfigError

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")  # under which a browser may ask
CONNECTIONS = 16  # at the same time
LEAVING = 1.0  # seconds in which a connection that was ended makes room


@dataclass(frozen=True)
class Page:
    """What is answered."""

    kind: str  # as in Content-Type
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def answering(
    port: int | None, option: str, pages: Callable[[str, str], Page | None]
) -> Iterator[int | None]:
    """Answer on a port of this machine; `pages` gets path and query. No port, no server; port 0 is any free one.

    Whoever comes under another name than this machine's is refused: a page elsewhere may have led a browser here.
    """
    if port is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds a connection may be silent, or take to send an answer
        server_version, sys_version = "potluck", ""

        def do_GET(self) -> None:
            """Answer with what is known now."""
            path, _, query = self.path.partition("?")
            with server.at_work(self.request):
                found = pages(path, query) if is_ours(self.headers.get("Host")) else _MISLED
            self._send(found or _NOTHING)

        def _send(self, page: Page) -> None:
            self.send_response(page.status)
            self.send_header("Content-Type", page.kind)
            self.send_header("Content-Length", str(len(page.body)))
            for name, value in {**_SAFE, **page.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page.body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    try:
        server = _Server((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{option}: port {port} of {LOOPBACK} cannot be used: {why}; choose another one"
        ) from error
    threading.Thread(target=server.serve_forever, name=option.strip("-"), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


_SAFE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_MISLED = Page("text/plain", b"this address answers under its own name alone\n", 421)
_NOTHING = Page("text/plain", b"there is nothing here\n", 404)


def is_ours(host: str | None) -> bool:
    """Whether a request names this machine itself; the port may be that of a tunnel."""
    return host is None or host in NAMES or host.rpartition(":")[0] in NAMES


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 4 * CONNECTIONS

    def __init__(self, *given: Any) -> None:
        self.room = threading.BoundedSemaphore(CONNECTIONS)
        self.waiting: dict[Any, None] = {}  # connections that wait for who has called, the longest first
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        """One more connection; where there is no room, the one that has waited longest for its caller ends."""
        if not self.room.acquire(blocking=False):
            self._end_longest()
            if not self.room.acquire(timeout=LEAVING):
                return self.shutdown_request(request)
        self.waiting[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As before; its place is free afterwards."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    @contextlib.contextmanager
    def at_work(self, request: Any) -> Iterator[None]:
        """A connection whose answer is made: it does not wait for its caller, and is not ended."""
        self.waiting.pop(request, None)
        yield
        self.waiting[request] = None

    def _end_longest(self) -> None:
        longest = next(iter(self.waiting), None)
        if longest is not None:
            self.waiting.pop(longest, None)
            with contextlib.suppress(OSError):  # it has ended by itself
                longest.shutdown(socket.SHUT_RDWR)

    def _leave(self, request: Any) -> None:
        self.waiting.pop(request, None)
        self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever asked has no answer, and asks again."""
