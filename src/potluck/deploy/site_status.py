"""Where a site stands: what its worker notes of the server's orders, beside what its node notes of its calls.

The worker writes to a small file in its home; `potluck join` reads it and keeps the status of both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from potluck.core.plain_values import printable
from potluck.deploy.announcements import Announcements
from potluck.deploy.logs import Log
from potluck.deploy.node_pulse import REFUSED, UNAUTHORISED, Pulse, clock_time, gone, trouble, untrusted
from potluck.deploy.progress import JOIN, Progress
from potluck.files import read_bounded
from potluck.live.status_file import is_finite, write_small

FILE = "worker.json"
RECENT = 60.0  # seconds; a node whose last call was answered within them is connected
LINES, SPAN = 1000, 3600.0  # so many lines a worker writes in so many seconds, whatever a server asks
AWAY = (502, 503, 504)  # what a gate answers while its SuperLink is away


@dataclass
class OrderFacts:
    """What a worker was asked to do, and what it did; times are seconds since 1970."""

    run: str = ""
    round: int | None = None
    order: str = ""  # the last one, in words
    ordered: float | None = None  # when it came
    busy: bool = False  # it is being done
    over: bool = False  # the last round of the run was played, and nothing came since
    orders: dict[str, int] = field(default_factory=lambda: {"answered": 0, "refused": 0})
    refused: str = ""  # why the last one was that was
    refused_at: float | None = None
    unwelcome: str = ""  # why the server has not taken this site in, as its last greeting says
    sent: int = 0
    received: int = 0


class Room:
    """The room for lines in a log: a server that asks without end fills no disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left, self._clock, self._since = LINES, clock, clock()

    def taken(self) -> bool:
        """Take the room of one line; false if there is none in this hour."""
        if self._clock() - self._since >= SPAN:
            self.left, self._since = LINES, self._clock()
        self.left -= 1
        return self.left >= 0


class OrderNotes:
    """Notes what becomes of every order: in the log, and with a `home` in a file there."""

    def __init__(self, home: Path | None = None) -> None:
        """A worker that starts again knows the run and the round it was in; it counts anew."""
        before = read_orders(home) if home is not None else {}
        self.home, self.log, self.room = home, Log(), Room()
        self.facts = OrderFacts(run=before.get("run", ""), round=before.get("round"))
        self.announce = Announcements(home)
        self.progress = Progress(self._announced)
        self._begun = time.monotonic()  # the last order
        self._keep()

    def begin(self, run: str, round_: int | None, order: str) -> None:
        """An order has come; a welcome belongs to no round."""
        facts, known = self.facts, printable(run, 64)
        kept = facts.round if known == facts.run else None
        facts.run, facts.order = known, printable(order, 200)
        facts.round = kept if round_ is None else round_
        facts.ordered, facts.busy, facts.over = time.time(), True, False
        self._begun = time.monotonic()
        self.progress.begin(facts.run, round_, facts.order)
        self._keep()

    def greeted(self, refused: str) -> None:
        """It agreed to a run; `refused` is why the server has not taken it in after the greeting before."""
        self.facts.unwelcome = printable(refused)
        self.progress.joined()
        self.progress.unwelcome(self.facts.unwelcome)

    def answered(self, received: int, sent: int, exchange: int = 0, steps: int = 0) -> None:
        """It was done, or was done before: so many bytes came, so many leave, after so many gradient steps."""
        facts = self.facts
        took = time.monotonic() - self._begun
        if facts.round is not None and facts.order != JOIN:
            facts.unwelcome = ""  # it takes part
        self.progress.answered(facts.order, exchange, steps, took, received, sent)
        self._ended("answered", received, sent)
        if self.home is not None:
            self._say(
                f"answered: {facts.order}, {sent:,} bytes, {took:.1f} s",
                order=facts.order,
                sent=sent,
                seconds=round(took, 3),
            )

    def refused(self, reason: str, received: int = 0, sent: int = 0) -> None:
        """It is not done, for this reason."""
        facts = self.facts
        facts.refused, facts.refused_at = printable(reason), time.time()
        self.progress.refused(facts.order if facts.busy else "", facts.refused)
        self._ended("refused", received, sent)
        self._say(f"refused: {reason}")

    def idle(self) -> None:
        """No order is at hand."""
        self.progress.idle()
        if self.progress.is_over and not self.facts.over:
            self.facts.over = True
            self._keep()

    def _announced(self, sentence: str, **facts: Any) -> None:
        """Have the people at the site told, unless a server that asks without end has taken all the room."""
        if self.room.left > 0:
            self.announce(sentence, **facts)

    def _say(self, sentence: str, **more: Any) -> None:
        """Write a line of the log, which must not disturb the work either."""
        if not self.room.taken():
            return
        round_ = self.facts.round
        where = "" if round_ is None else f"round {round_}: "
        with contextlib.suppress(OSError, ValueError):
            self.log(f"{where}{sentence}", run=self.facts.run or None, round=round_, **more)
            if not self.room.left:
                self.log(
                    f"{LINES:,} lines were written in this hour; until it is over, orders are only counted"
                )

    def _ended(self, outcome: str, received: int, sent: int) -> None:
        facts = self.facts
        facts.busy = False
        facts.orders[outcome] += 1
        facts.received, facts.sent = facts.received + received, facts.sent + sent
        self._keep()

    def _keep(self) -> None:
        """Write the file; a full disk does not disturb the work."""
        if self.home is not None:
            with contextlib.suppress(OSError):
                write_small(self.home / FILE, asdict(self.facts))


def read_orders(home: Path) -> dict[str, Any]:
    """What the worker of a home has noted last; empty if nothing, or nothing that can be read."""
    try:
        facts = asdict(_ORDERS.validate_json(read_bounded(home / FILE, follow=False), strict=True))
    except (OSError, ValueError):
        return {}
    return {name: _shown(value) for name, value in facts.items()} if is_finite(facts) else {}


_ORDERS = TypeAdapter(OrderFacts)


def _shown(value: Any) -> Any:
    """A value that can be shown: texts are made printable."""
    if isinstance(value, dict):
        return {printable(name): number for name, number in value.items()}
    return printable(value) if isinstance(value, str) else value


class SiteStatus:
    """The status of a site, or of one half of it (`only`)."""

    def __init__(self, client: str, server: str, home: Path, pulse: Path, only: str = "") -> None:
        self.client, self.server, self.home, self.pulse, self.only = client, server, home, pulse, only
        self.started = time.time()
        self.ended = False
        self.notice, self.noticed = "", self.started
        self._trouble, self._fine = "", time.monotonic()  # since when there is some, whatever the clock says
        self._since: float | None = (
            None  # when its node was last taken in, also one that was started again since
        )
        self._heard: float | None = None  # its node was last answered, also one that was started again since

    def say(self, sentence: str) -> None:
        """Keep the last thing that was said."""
        self.notice, self.noticed = printable(sentence), time.time()

    def facts(self) -> dict[str, Any]:
        """All of it as plain values."""
        about = {
            "kind": "site",
            "client": self.client,
            "half": self.only or "both",
            "started": self.started,
            "notice": self.notice,
            "noticed": self.noticed,
        }
        states = []
        if self.only != "worker":
            node = self._node()
            about |= node
            states.append(self._connection(node["connected"]))
        if self.only != "node":
            orders = read_orders(self.home)
            about |= orders
            states.append(f"at work: {orders['order']}" if orders.get("busy") else "waiting for orders")
            about["trouble"] = "; ".join(filter(None, [self._trouble, *_complaints(orders)]))
        if self.ended:  # nothing is called again
            return about | {"state": "stopped", "trouble": ""}
        return about | {"state": "; ".join(states)}

    def _node(self) -> dict[str, Any]:
        """What the pulse of the node says; a node that is started again has none for a moment."""
        pulse, now = Pulse.read(self.pulse), time.time()
        self._heard = self._heard if pulse.pulled is None else pulse.pulled
        self._since = self._since if pulse.since is None else pulse.since
        connected = pulse.answered and pulse.pulled is not None and now - pulse.pulled < RECENT
        if connected:
            self._trouble, self._fine = "", time.monotonic()
        else:
            self._trouble = self._why(pulse) or self._trouble
        return {
            "server": self.server,
            "connected": connected,
            "taken_in": self._since,
            "pulled": self._heard,
            "trouble": self._trouble,
        }

    def _connection(self, connected: bool) -> str:
        since = "" if self._heard is None else f" since {clock_time(self._heard)}"
        return "connected" if connected else f"not connected{since}"

    def _why(self, pulse: Pulse) -> str:
        if pulse.status in (UNAUTHORISED, REFUSED):
            return trouble(pulse, self.pulse.with_name("taken-in").exists(), time.monotonic() - self._fine)
        if pulse.status in AWAY:
            return f"{self.server} answers, but Flower's SuperLink behind it is away"
        if pulse.at and pulse.distrusted:
            return untrusted(self.server, printable(pulse.distrusted))
        if pulse.at and not pulse.status:
            since = "does not answer" if self._heard is None else gone(self._heard)
            return f"{self.server} {since}"
        return ""


def _complaints(orders: dict[str, Any]) -> list[str]:
    """What is wrong between a worker and the server."""
    refused, unwelcome = orders.get("orders", {}).get("refused", 0), orders.get("unwelcome", "")
    told = [f"the server has not taken this site in: {unwelcome}"] if unwelcome else []
    number = "an order was" if refused == 1 else f"{refused:,} orders were"
    return told + ([f"{number} refused here, the last: {orders['refused']}"] if refused else [])
