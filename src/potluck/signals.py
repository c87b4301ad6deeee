"""Delaying Ctrl-C and SIGTERM during work that must not be interrupted halfway."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_back(forget: bool = False) -> Iterator[None]:
    """Delay signals until the block ends, or ignore them (`forget`).

    Python delivers signals to the main thread only; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    # A handler that was not set from Python reads as None and cannot be restored, so it stays in place.
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}
    for number in before:
        signal.signal(number, lambda received, frame: waiting.append(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting and not forget:
            signal.raise_signal(waiting[0])
