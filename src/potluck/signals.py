"""Delaying Ctrl-C, SIGTERM and SIGHUP during work that must not be interrupted halfway."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # a terminal that is closed sends the last, often twice


@contextlib.contextmanager
def held_back(forget: bool = False) -> Iterator[None]:
    """Delay signals until the block ends, or ignore them (`forget`).

    Python delivers signals to the main thread only; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    holding = True

    def received(number: int, frame: object) -> None:
        if holding:
            waiting.append(number)
        else:  # another signal has ended this function before it could put the handler back
            signal.signal(number, before[number])
            signal.raise_signal(number)

    # A handler that was not set from Python reads as None and cannot be restored, so it stays in place. So does an
    # ignored signal: under nohup, a process that is started here would no longer ignore SIGHUP.
    before: dict[int, Any] = {
        number: handler
        for number in SIGNALS
        if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN)
    }
    try:
        for number in before:
            signal.signal(number, received)
        yield
    finally:
        holding = False
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in () if forget else dict.fromkeys(waiting):  # each once, unless one before it raises
            signal.raise_signal(number)
