"""How a command ends: one sentence on standard error, and an exit code.

Exit codes: 0 done; 1 a fault of potluck itself; 2 bad input; 130 stopped with Ctrl-C, 143 ended by SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec

import typer

from potluck.core.plain_values import printable
from potluck.errors import ConfigError, PotluckError, StoppedComplete, kind_and_message, of_a_warning
from potluck.front_door import about_exit, own_place
from potluck.signals import held_back

P = ParamSpec("P")
LONGEST = 10_000  # characters of a sentence
LIMITS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of processes, memory, open files
# What Python, torch and the loader of libraries say then.
AT_LIMIT = ("can't start new thread", "can't allocate memory", "failed to map segment")
LIMITED = (
    "the machine or its container has no more for this process: end others, or allow it more memory, processes or "
    "open files (ulimit -a shows what it may have)"
)


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP came; a run treats it like Ctrl-C and leaves a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stopped(KeyboardInterrupt):
    """The work was stopped and can be continued with `command`."""

    def __init__(self, command: str) -> None:
        super().__init__("stopped")
        self.command = command


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """The same command, with every exception turned into one sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        try:
            _check_here()
            command(*args, **options)
        except BaseException as error:
            with held_back(forget=True):  # a second Ctrl-C must not cut the sentence off
                _fail(error, debug=bool(options.get("debug")))

    return run


def _check_here() -> None:
    """Refuse to work in a folder that is gone: libraries that are loaded there end the process without a reason."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the folder where you are was removed; change to another one") from error


def _fail(error: BaseException, debug: bool) -> NoReturn:
    """Print the sentence and exit; usage errors and broken pipes are left to typer.

    A `sys.exit` in the user's own code is an error: the run has no result, and code 0 would say that it has.
    """
    leaves = isinstance(error, SystemExit) and own_place(error.__traceback__) is None
    if leaves or hasattr(error, "exit_code") or (isinstance(error, OSError) and error.errno == errno.EPIPE):
        raise error
    if debug:
        traceback.print_exception(error)
    raise typer.Exit(last_words(error))


def last_words(error: BaseException) -> int:
    """Print the sentence about an error; its exit code."""
    sentence, code = explained(error)
    with contextlib.suppress(OSError):  # a standard error that is full or closed
        typer.echo(printable(sentence, LONGEST), err=True)  # it may quote a file of somebody else's
    return code


def explained(error: BaseException) -> tuple[str, int]:
    """The sentence about an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        onwards = f"; continue with: {error.command}" if isinstance(error, Stopped) else ""
        said = str(error) if isinstance(error, StoppedComplete) else f"stopped{onwards}"
        return said, 128 + _signal(error)
    if isinstance(error, PotluckError):
        return f"error: {error}", 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        path = "check the path, its rights and the room on the disk"
        advice = LIMITED if error.errno in LIMITS else path
        return f"error: {where}{error.strerror or error}; {advice}", 2
    told = kind_and_message(error)
    place = own_place(error.__traceback__)
    if place is not None and isinstance(error, SystemExit):
        return f"error: {about_exit(place)}", 2
    if place is not None:
        return f"error: {place}: {told}; run again with --debug to see how it came there", 2
    if isinstance(error, MemoryError) or any(words in str(error) for words in AT_LIMIT):
        return f"error: {told}; {LIMITED}", 2
    if isinstance(error, Warning):
        return f"error: {of_a_warning(error)}", 2
    return f"internal error: {told}; run again with --debug to see where", 1


def _signal(error: BaseException | None) -> int:
    """The signal that caused an interrupt: SIGINT, unless an `Ended` is in its chain of causes."""
    while error is not None:
        if isinstance(error, Ended):
            return error.number
        error = error.__cause__ or error.__context__
    return signal.SIGINT


def end_on_signals() -> None:
    """Raise `Ended` on SIGTERM and SIGHUP, wherever they fall. An ignored signal stays so: nohup ignores SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    sys.unraisablehook = _send_again


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal once more, a moment later, if it fell into the removal of an object.

    Python drops exceptions there: between two runs, when much is removed, a SIGTERM would change nothing.
    """
    if isinstance(lost.exc_value, KeyboardInterrupt):
        later = threading.Timer(0.1, os.kill, [os.getpid(), _signal(lost.exc_value)])
        later.daemon = True
        later.start()
    else:
        sys.__unraisablehook__(lost)


def end_in_peace() -> None:
    """Ignore Ctrl-C from now on: all is said, and only the interpreter is left to end. SIGTERM still ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: object) -> NoReturn:
    raise Ended(number)
