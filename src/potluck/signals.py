"""Ctrl-C and polite signals to end, kept away from what must not be cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def held_back(forget: bool = False) -> Iterator[None]:
    """Let signals wait until the block is done, or (`forget`) take no notice of them.

    Only the main thread receives signals in Python; elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    # A handler that was not set from Python reads as None and cannot be put back: it is left alone.
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
