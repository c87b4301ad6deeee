"""The page of `potluck watch --page` and `potluck serve --page`: one file, and the snapshots it asks for.

The page loads nothing from elsewhere, and its policy forbids it. Names are put in as text, never as markup.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import threading
import time
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from potluck.live.loopback import LOOPBACK, Page, answering
from potluck.live.snapshot import Watch

STATE = "/state.json"
OPEN = 4.0  # seconds; a page that is open asks every two
LEAVING = 0.2  # seconds an answer has to leave


@contextlib.contextmanager
def shown(port: int | None, watch: Watch) -> Iterator[str]:
    """Show runs on a port of this machine while the block runs; gives the address, nothing without a port.

    When the block ends by itself, whoever is looking still gets the last state.
    """
    asked, answered = [-math.inf], threading.Event()

    def pages(path: str, query: str) -> Page | None:
        if path != STATE:
            return _page() if path == "/" else None
        state = _state(watch, query)
        asked[0] = time.monotonic()
        answered.set()
        return state

    with answering(port, "--page", pages) as bound:
        try:
            yield "" if bound is None else f"http://{LOOPBACK}:{bound}/"
        except KeyboardInterrupt:
            raise
        except BaseException:
            _linger(asked[0], answered)
            raise
        _linger(asked[0], answered)


def _linger(asked: float, answered: threading.Event) -> None:
    """Wait for the next question of a page that is open, and until the answer has left."""
    if time.monotonic() - asked < OPEN:
        answered.clear()
        answered.wait(OPEN)
        time.sleep(LEAVING)


def _state(watch: Watch, query: str) -> Page:
    """All snapshots as JSON; nothing where the page has them already, `?have=` says which it has."""
    runs = json.dumps([one.to_json() for one in watch.look()], allow_nan=False)
    mark = hashlib.sha256(runs.encode()).hexdigest()[:16]
    if query == f"have={mark}":
        return Page("application/json", b"", 204)
    body = f'{{"mark": "{mark}", "now": {time.time()!r}, "runs": {runs}}}'
    return Page("application/json", body.encode())


@cache
def _page() -> Page:
    """The page itself; its policy names the one script and the one style that may be used."""
    style = _part("potluck.report", "style.css") + _part("potluck.live", "live.css")
    script = _part("potluck.live", "live.js")
    page = _part("potluck.live", "live.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; style-src 'sha256-{_hash(style)}'; script-src 'sha256-{_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page("text/html; charset=utf-8", page.encode(), headers={"Content-Security-Policy": policy})


def _part(package: str, name: str) -> str:
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
