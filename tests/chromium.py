"""A Chromium without a window: pages at any width, and what JavaScript says of them.

It is driven through its debugging pipe, so a page needs no script of ours, and its policy stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads what it is told from file 3 and answers in file 4.
STARTER = """
import fcntl, os, sys
told, answers = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(told, 3), os.dup2(answers, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
WIDE = """(() => {
  const shown = [...document.querySelectorAll("main *")].filter(one => one.getClientRects().length);
  const scrolls = one => ["auto", "scroll"].includes(getComputedStyle(one).overflowX);
  return {
    width: innerWidth,
    content: document.documentElement.scrollWidth,
    scrolling: shown.filter(one => scrolls(one) && one.scrollWidth > one.clientWidth + 1)
      .map(one => one.outerHTML.slice(0, 80)),
    broken: [...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src),
  };
})()"""


class Chromium:
    """One browser with one page; close it, or use it in a `with` block."""

    def __init__(self, profile: Path) -> None:
        assert PATH is not None
        told, self._to = os.pipe()
        self._from, answers = os.pipe()
        start = [sys.executable, "-c", STARTER, str(told), str(answers)]
        self._process = subprocess.Popen(
            [*start, PATH, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(told, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(told)
        os.close(answers)
        self._read, self._calls = b"", 0
        self._seen: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._do("Page.enable")

    def open(self, address: str, width: int, *, dark: bool = False) -> None:
        """Load a page in a window of this width."""
        self._do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", features=[scheme])
        self._seen.clear()
        self._do("Page.navigate", url=address)
        while not any(one.get("method") == "Page.loadEventFired" for one in self._seen):
            self._seen.append(self._next())

    def says(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self._do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, method: str, **values: Any) -> dict[str, Any]:
        return self._call(method, self._session, **values)

    def _call(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": values}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._seen.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._read += part
        one, self._read = self._read.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(one)
        return answer
