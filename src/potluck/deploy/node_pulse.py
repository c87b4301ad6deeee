"""What a SuperNode notes of its calls to the server, and what is wrong with it when it is refused.

The node writes its `Pulse` to a file; `potluck join` reads it. Neither Flower nor torch is imported here.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from potluck.files import read_bounded

HEARTBEAT = "send-node-heartbeat"
ACTIVATE = "activate-node"
PULL = "pull-messages"
ANSWERED, UNAUTHORISED, REFUSED = 200, 401, 412
AHEAD, BEHIND = 5.0, 300.0  # seconds a node's clock may be ahead of Flower's server or behind it
STILL_ONLINE = 75.0  # seconds; a node that was killed counts as online for up to 60
BAD_INPUT = 2  # exit code of a half of a site whose input is bad: starting it again would not help
STALL = 180.0  # seconds without the end of a call; each has 30, and pauses between them at most 20
LATEST = 1e11  # seconds since 1970: the clock of no machine shows the year 5138
TIMES = ("skew", "since", "pulled", "working", "beat")


@dataclass(frozen=True)
class Pulse:
    """The newest call of a node: when it ended, which it was, and how the server answered (0: not at all)."""

    at: float = 0.0
    call: str = ""
    status: int = 0
    skew: float | None = None  # seconds this machine's clock is ahead of the server's
    since: float | None = None  # when the node was taken in
    pulled: float | None = None  # when it last asked for messages and was answered
    working: float | None = (
        None  # since when its loop waits for the answer to an order, for as long as that takes
    )
    beat: float | None = None  # its last heartbeat, which comes from a thread of its own
    distrusted: str = ""  # why the server's certificate was not taken

    @property
    def answered(self) -> bool:
        """Whether the server took its newest call."""
        return self.status == ANSWERED

    @property
    def clock_is_off(self) -> bool:
        """Whether this machine's clock is so far from the server's that no signature of the node is believed."""
        return self.skew is not None and not -BEHIND < self.skew < AHEAD

    @property
    def dropped(self) -> bool:
        """Whether the server had taken the node in, and does not believe it any more."""
        return self.status == UNAUTHORISED and self.since is not None

    @classmethod
    def read(cls, path: Path) -> Pulse:
        """The pulse in a file, an empty one if there is none."""
        try:
            known = json.loads(read_bounded(path))
            numbers = {name: _number(known.get(name)) for name in TIMES}
            told = str(known.get("distrusted", ""))
            return cls(
                float(known["at"]), str(known["call"]), int(known["status"]), **numbers, distrusted=told
            )
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ):
            return cls()


def _number(value: object) -> float | None:
    if value is None or (isinstance(value, int | float) and abs(value) < LATEST):
        return value
    raise ValueError(f"{value!r} is no time")


class PulseFile:
    """Keeps the pulse of a node in a file, whole at any time. A node calls from several threads at once."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self.clock = path, clock
        self._last, self._lock = Pulse(), threading.Lock()

    def note(self, call: str, status: int, date: str | None = None, distrusted: str = "") -> None:
        """Note the end of a call. Heartbeats come from a thread of their own and say nothing of the loop."""
        now, fine = self.clock(), status == ANSWERED
        if call == HEARTBEAT and status not in (UNAUTHORISED, REFUSED):
            self._change(beat=now)
            return
        times = (
            {"since": now} if call == ACTIVATE and fine else {"pulled": now} if call == PULL and fine else {}
        )
        self._change(
            at=now, call=call, status=status, skew=skew_of(date, now), distrusted=distrusted, **times
        )

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While an order is worked on, no call needs to end but heartbeats."""
        self._change(working=self.clock())
        try:
            yield
        finally:
            self._change(working=None)

    def _change(self, **changes: Any) -> None:
        """Change the pulse; where it cannot be written, on a full disk for one, a call must not fail over it."""
        with self._lock, contextlib.suppress(OSError):
            self._last = replace(self._last, **changes)
            unfinished = self.path.with_name(f".{self.path.name}")
            unfinished.write_text(json.dumps(asdict(self._last)))
            unfinished.replace(self.path)


def distrust_of(error: str) -> str:
    """Why a certificate was not taken, from the words of OpenSSL; empty where another thing went wrong.

    >>> distrust_of("[SSL: …] certificate verify failed: certificate has expired (_ssl.c:1006)")
    'certificate has expired'
    """
    _, failed, why = error.partition("certificate verify failed")
    return (why.partition(" (_ssl")[0].strip(":. ")[:200] or failed) if failed else ""


def is_out_of_time(why: str) -> bool:
    """Whether a certificate was not taken because of its dates, from the words of OpenSSL."""
    return "has expired" in why or "not yet valid" in why


def untrusted(server: str, why: str) -> str:
    """What is said of a certificate that a node does not take, and what to do about it."""
    advice = "compare its names and its authority with --server and --ca"
    if is_out_of_time(why):
        advice = "if the clock of this machine is right, whoever runs the server has to renew it"
    return f"the certificate of {server} is not taken: {why}; {advice}"


def skew_of(date: str | None, now: float) -> float | None:
    """How many seconds a clock is ahead of an HTTP `Date`; None where there is no such date."""
    try:
        return None if date is None else now - parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, ArithmeticError, OSError):  # a server may write what it likes
        return None


def clock_time(moment: float) -> str:
    """A moment on the clock of this machine, with the day where it is not today."""
    then, now = datetime.fromtimestamp(moment).astimezone(), datetime.now().astimezone()
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def gone(heard: float) -> str:
    """What is said of a server that was there."""
    return f"has not answered since {clock_time(heard)}; it is called again until it does"


def trouble(pulse: Pulse, known: bool, refused_for: float) -> str:
    """Why the server does not take a node, in one sentence; empty where the pulse does not say.

    `known` is whether it has taken this node before, `refused_for` for how many seconds it has refused it now.
    """
    if pulse.status == UNAUTHORISED and pulse.clock_is_off:
        assert pulse.skew is not None
        way = "ahead of" if pulse.skew > 0 else "behind"
        return (
            f"the clock of this machine is {abs(pulse.skew):,.0f} s {way} the server's, so the node's signature is "
            "not believed: set the clock (at most 5 s ahead, 300 s behind)"
        )
    if pulse.status == UNAUTHORISED:
        return (
            "the server does not believe the node's signature: its key was taken off the register, or its clock is "
            "off; ask the operator (flwr supernode list)"
        )
    if pulse.status != REFUSED:
        return ""
    if known and refused_for < STILL_ONLINE:
        return (
            "the server takes this node to be online still, as it does for about a minute after a node was killed, "
            "or another site uses this key; it is tried again"
        )
    if known:
        return (
            "the server refuses the node's key for longer than a killed node counts as online: another site uses "
            "this key, or it was taken off the register; ask the operator (flwr supernode list)"
        )
    return (
        "the server does not know the node's key, or another site uses this key; it is tried again, as a server "
        "that is just starting soon knows it; if this goes on, ask the operator to register it "
        "(flwr supernode register)"
    )
