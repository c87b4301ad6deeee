"""Watching the two processes of a site, so that one that has ended, or only seems to live, is started again."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from potluck.core.plain_values import printable
from potluck.deploy.flower.processes import PULSE, Process
from potluck.deploy.node_pulse import (
    ANSWERED,
    BAD_INPUT,
    REFUSED,
    STALL,
    UNAUTHORISED,
    Pulse,
    gone,
    trouble,
    untrusted,
)
from potluck.engine import frames
from potluck.errors import ConfigError, PotluckError, RunError

SIGNALLED = 128  # plus the number of a signal: the exit code of a process that it has ended
PAUSE = 1.0  # seconds between two checks
LONGEST = 30.0  # seconds between two starts of a process that keeps ending
ALIVE = "alive"  # the question whether a worker is there; it is answered at once, whatever the worker does
ASK_EVERY = 60.0  # seconds between two such questions
ANSWER_WAIT = 30.0  # seconds it has to answer one
LASTS = 30.0  # seconds after which it is told that a server refuses the node, or has gone
TRIAL = ".room"  # a file that is written to see whether there is room, and removed
TRIED = 1 << 16  # bytes of it
TRY_EVERY = 10.0  # seconds between two trials
MISSES = 2  # questions in a row without an answer, after which it is started again


@dataclass
class Watched:
    """A process that is restarted with growing pauses when it ends, or when it lives but no longer works.

    `reason` says why it ended, where more is known than its last line; while `hushed` says so, that is not told,
    nor is it told again where the process ends soon for the same reason.
    `stalled` says that it hangs. One that `works` once is started again whatever it says when it ends: what it
    lacks now, such as a place for its socket on a full disk, may come back.
    """

    start: Callable[[], Process]
    process: Process
    since: float
    pause: float = PAUSE
    reason: Callable[[], str] = lambda: ""
    hushed: Callable[[], bool] = lambda: False
    stalled: Callable[[float], str] = lambda lived: ""
    works: bool = False
    _down: bool = field(default=False, init=False)  # it has ended, and could not be started again so far
    _told: str = field(default="", init=False)  # the reason that was told last

    def look(self, notice: Callable[[str], None]) -> None:
        """Restart the process if it has ended or hangs; the pause doubles each time it ends soon."""
        lived = time.monotonic() - self.since
        hangs = self.stalled(lived) if self.process.alive else ""
        if self.process.alive and not hangs:
            return
        self.pause = PAUSE if lived > LONGEST else min(2 * self.pause, LONGEST)
        self._told = "" if lived > LONGEST else self._told
        if not self._down:
            self._end(hangs, notice)
        time.sleep(self.pause)
        self._start_again(notice)

    def _end(self, hangs: str, notice: Callable[[str], None]) -> None:
        """End what is left of the process, and tell why; raises what starting it again would not help."""
        if self.process.popen.returncode == BAD_INPUT and not self.works:
            raise ConfigError(self.process.tail().removeprefix("error: "))
        self.process.end()  # its own children may have outlived it
        reason = self.reason()
        why = f"hangs: {hangs}" if hangs else f"ended: {reason or self._last_words()}"
        if hangs or not (self.hushed() or (reason and reason == self._told)):
            self._told = reason
            notice(f"{self.process.name} {why}; it is started again")

    def _start_again(self, notice: Callable[[str], None]) -> None:
        """Start the process; where there is no room for it now, on a full disk for one, it is tried again."""
        try:
            self.process, self._down = self.start(), False
        except (PotluckError, OSError) as error:
            if not self._down:
                notice(f"{self.process.name} cannot be started: {error}; it is tried again")
            self._down = True
        self.since = time.monotonic()

    def _last_words(self) -> str:
        """The signal that has ended the process, which its guard tells as the shell does, or what it said last."""
        code = self.process.popen.returncode
        if code < 0:  # the guard itself was killed
            return f"killed by signal {-code}"
        if code > SIGNALLED:
            return f"killed by signal {code - SIGNALLED}"
        return self.process.tail().removeprefix("error: ")


class NodeWatch:
    """What the pulse of a site's SuperNode says: why it was refused, and whether its loop stands still."""

    def __init__(self, flower: Path, server: str = "the server") -> None:
        self.server = server
        self.pulse, self.mark = flower / PULSE, flower / "taken-in"  # the mark: a server has taken this node
        self._refused_at: float | None = None
        self._dropped = False  # the server has taken this node's key off its register, or this clock was set
        self._seen, self._seen_at = Pulse(), -math.inf  # the last pulse, and when it was new by our own clock

    def reason(self) -> str:
        """Why the server refuses the node, or the node the server; empty where that is not why it ended."""
        pulse = Pulse.read(self.pulse)
        self._dropped = pulse.dropped
        if pulse.dropped and not pulse.clock_is_off:
            self._forget()
        elif pulse.since is not None:
            self._remember()
        if pulse.status not in (UNAUTHORISED, REFUSED):
            self._refused_at = None
            why = printable(pulse.distrusted)
            return untrusted(self.server, why) if why else ""
        self._refused_at = time.monotonic() if self._refused_at is None else self._refused_at
        return trouble(pulse, self.mark.exists(), time.monotonic() - self._refused_at)

    def hushed(self) -> bool:
        """Whether the node is refused, and not for long: a server that is just starting soon knows its key.

        That a node was dropped which had been taken in is told at once.
        """
        if self._refused_at is None or self._dropped:
            return False
        return time.monotonic() - self._refused_at < LASTS

    def stalled(self, lived: float) -> str:
        """A sentence if no call has ended for long, whoever sets the clock meanwhile.

        While the site works on an order, only heartbeats are to be expected.
        """
        pulse = Pulse.read(self.pulse)
        pulse = pulse if pulse.working is not None else replace(pulse, beat=None)
        if pulse.since is not None:
            self._refused_at = None  # it was taken in since
            self._remember()
        if pulse != self._seen:
            self._seen, self._seen_at = pulse, time.monotonic()
        silent = min(lived, time.monotonic() - self._seen_at)
        return f"no call to the server has ended for {silent:.0f} s" if silent > STALL else ""

    def _remember(self) -> None:
        """Note that a server has taken this node; a full disk does not disturb the watching."""
        if not self.mark.exists():
            with contextlib.suppress(OSError):
                self.mark.touch()

    def _forget(self) -> None:
        """The server knows the key no more: its refusals do not mean that the node is online still."""
        with contextlib.suppress(OSError):
            self.mark.unlink(missing_ok=True)


class Connection:
    """Tells when the site's node is connected, when the server has gone, and when it is back."""

    def __init__(self, pulse: Path, server: str, clock: Callable[[], float] = time.time) -> None:
        self.pulse, self.server, self.clock = pulse, server, clock
        self._heard: float | None = None  # the last call that was answered
        self._told = False  # that it is connected

    def look(self, notice: Callable[[str], None]) -> None:
        """Tell what has changed; a call or two without an answer are nothing to tell."""
        pulse = Pulse.read(self.pulse)
        before, self._heard = self._heard, self._heard if pulse.pulled is None else pulse.pulled
        if pulse.answered and pulse.pulled is not None and not self._told:
            self._told = True
            notice(f"connected to {self.server}{'' if before is None else ' again'}")
        elif self._told and self._is_gone(pulse):
            self._told = False
            assert self._heard is not None
            why = printable(pulse.distrusted)
            told = f"{untrusted(self.server, why)}; it is called again" if why else ""
            notice(told or f"{self.server} {gone(self._heard)}")

    def _is_gone(self, pulse: Pulse) -> bool:
        """Whether calls go unanswered for long; a node that was started again has not called so far."""
        failing = bool(pulse.at) and pulse.status not in (ANSWERED, UNAUTHORISED, REFUSED)
        return failing and self._heard is not None and self.clock() - self._heard >= LASTS


class DiskWatch:
    """Tells when nothing more can be written into a site's home, and when that is over.

    Nobody else can: the worker's log, its announcements and the site's status are in that home.
    """

    def __init__(
        self,
        home: Path,
        clock: Callable[[], float] = time.monotonic,
        check_place: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_place` raises where the home is no longer the folder it was."""
        self.home, self.clock, self.check_place = home, clock, check_place
        self._next, self._told = -math.inf, False

    def look(self, notice: Callable[[str], None]) -> None:
        """Try now and then, and tell what has changed."""
        if self.clock() < self._next:
            return
        self._next = self.clock() + TRY_EVERY
        why = self._why_not()
        if why and not self._told:
            notice(
                f"nothing can be written into {self.home} ({why}): the site refuses orders until that is possible; "
                "make room, or put the folder back"
            )
        elif self._told and not why:
            notice(f"{self.home} can be written into again: the site goes on")
        self._told = bool(why)

    def _why_not(self) -> str:
        """Why nothing can be written, or nothing."""
        try:
            self.check_place()
        except RunError:
            return "it was moved or removed"
        trial = self.home / TRIAL
        try:
            trial.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(trial, flags, 0o600), "wb") as file:
                file.write(bytes(TRIED))
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with contextlib.suppress(OSError):
                trial.unlink(missing_ok=True)
        return ""


class OtherHalf:
    """Tells at a node on its own that no worker takes its calls, and when one does again."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.clock = path, clock
        self._next, self._there, self._told = -math.inf, clock(), False

    def look(self, notice: Callable[[str], None]) -> None:
        """Try now and then, and tell what has changed; a worker that is started again needs a moment."""
        now = self.clock()
        if now < self._next:
            return
        self._next = now + TRY_EVERY
        why = why_not(self.path)
        if not why:
            if self._told:
                notice(f"the worker at {self.path} takes calls: orders are answered")
            self._there, self._told = now, False
        elif not self._told and now - self._there >= LASTS:
            self._told = True
            notice(
                f"no worker takes calls at {self.path} ({why}): no order is answered until one does; start it with "
                "join --only worker and the same --socket, whose folder this user's group may enter"
            )


class WorkerWatch:
    """Asks the worker now and then whether it is there; it answers also while it trains."""

    def __init__(self, path: Path) -> None:
        self.path, self._misses, self._lived = path, 0, 0.0
        self._opened = False  # whether this worker's socket was there
        self._next = time.monotonic() + ASK_EVERY

    def stalled(self, lived: float) -> str:
        """A sentence if the worker has not answered several questions, or its socket was there and is gone."""
        self._opened = self.path.is_socket() or (self._opened and lived >= self._lived)
        self._lived = lived
        if time.monotonic() < self._next:
            return ""
        self._misses = 0 if answers(self.path, opened=self._opened) else self._misses + 1
        self._next = time.monotonic() + ASK_EVERY
        if self._misses < MISSES:
            return ""
        self._misses = 0
        return "it does not answer at its socket"


def takes_calls(path: Path) -> bool:
    """Whether a worker listens at its socket."""
    return not why_not(path)


def why_not(path: Path) -> str:
    """Why no worker can be called at a socket, or nothing."""
    try:
        frames.connect(str(path), ANSWER_WAIT).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def answers(path: Path, wait: float = ANSWER_WAIT, opened: bool = False) -> bool:
    """Whether a worker is alive: one that takes a connection and stays silent is not.

    One that has not `opened` its socket yet is loading its data. If it has, and a cleaner of temporary files took
    it away, no order reaches the worker any more.
    """
    try:
        channel = frames.connect(str(path), wait)
    except OSError:
        return not opened
    with channel:
        try:
            frames.send(channel, {"ask": ALIVE})
            frames.receive(channel)
        except TimeoutError:
            return False
        except (EOFError, OSError):
            return True
    return True
