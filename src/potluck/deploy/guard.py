"""Runs a command, and ends it with all that it has started when the process that asked for it is gone.

    python -I -S guard.py FD COMMAND …

FD is the reading end of a pipe; the parent holds the other end and never writes. However the parent ends, `kill -9`
included, the system closes the pipe. This is a program of its own, which needs nothing but the standard library: it
must start quickly and must not fail where the package cannot be imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 5.0  # seconds the group has to end by itself
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def die_with_the_guard() -> None:
    """Ask Linux to end this process politely when the guard is gone; other systems do without."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)


def end_with_the_parent(pipe: int) -> None:
    """Wait until the parent is gone, then end the whole group: first politely, so that a node signs off."""
    with contextlib.suppress(OSError):
        os.read(pipe, 1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command; its exit code is this program's."""
    pipe, *words = sys.argv[1:]
    # A handler, not SIG_IGN, which the command would inherit: SIGTERM goes to the group, and the command obeys.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        child = subprocess.Popen(words, preexec_fn=die_with_the_guard)
    except OSError as error:
        print(f"error: {words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        in_vain = isinstance(error, FileNotFoundError | PermissionError)
        os._exit(2 if in_vain else 1)  # for one more process there may be room later
    threading.Thread(target=end_with_the_parent, args=(int(pipe),), daemon=True).start()
    code = child.wait()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
