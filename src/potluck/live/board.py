"""The board of a run: facts that its process gathers as it goes, beside what the logs say."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from potluck.core.plain_values import printable

REMEMBERED = 100  # nodes that were refused
NOTICES = 20  # the last sentences that were said
SMOOTH = 0.8  # how much of a client's time is that of earlier rounds
MOST_CLIENTS = 500  # on the board: those with trouble first, then the slowest


@dataclass
class ClientStatus:
    """What is known of one client; times are seconds since 1970."""

    connected: bool = False
    since: float | None = None  # it was taken in, or seen again after it had gone
    replied: float | None = None  # its last answer that could be used
    refused: str = ""  # why its last one was not, or why it was not taken in
    refused_at: float | None = None
    refusals: int = 0
    excluded: bool = False
    seconds: float | None = None  # that its training takes in a round, where that is known


@dataclass
class Board:
    """The facts of a run or a server; its engine and its observers write on it."""

    kind: str = "server"  # or run, whose clients are all here
    run: str = ""
    name: str = ""
    method: str = ""
    state: str = "waiting"  # for clients, or starting; then running, writing, finished or stopped
    why: str = ""  # it has stopped
    round: int = 0
    rounds: int = 0
    started: float = field(default_factory=time.time)
    clients: dict[str, ClientStatus] = field(default_factory=dict)
    strangers: dict[str, str] = field(default_factory=dict)  # nodes that were not taken in, and why
    sent: int = 0
    received: int = 0
    notice: str = ""
    noticed: float | None = None
    notices: list[tuple[float, str]] = field(default_factory=list)  # the last ones, each with its time
    clock: Callable[[], float] = field(default=time.time, repr=False)

    def __post_init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()  # who was refused since the last round ended, and why

    def client(self, name: str) -> ClientStatus:
        """The entry of a client."""
        return self.clients.setdefault(name, ClientStatus())

    def seen(self, present: Collection[str]) -> None:
        """Note who is connected now."""
        for name in present:
            self.client(name)
        for name, entry in self.clients.items():
            if (name in present) != entry.connected:
                entry.connected = name in present
                entry.since = self.clock() if entry.connected else entry.since

    def replied(self, name: str) -> None:
        """Note an answer that could be used."""
        self.client(name).replied = self.clock()

    def refused(self, name: str, reason: str) -> None:
        """Note an answer that could not be used, or that none came."""
        entry, told = self.client(name), _reason(name, reason)
        entry.refused, entry.refused_at = told, self.clock()
        entry.refusals += 1
        self._noted.add((name, told))

    def dropped(self, name: str, reason: str) -> None:
        """Note that a client dropped out of a round, unless that is noted already."""
        if (name, _reason(name, reason)) not in self._noted:
            self.refused(name, reason)

    def ended(self, round_: int, dropped: Mapping[str, str]) -> None:
        """Note a round that has ended, and who dropped out of it."""
        self.round = round_
        for name, reason in dropped.items():
            self.dropped(name, reason)
        self._noted.clear()

    def worked(self, seconds: Mapping[str, float]) -> None:
        """Note how long clients trained in a round: a mean in which the last rounds weigh most."""
        for name, took in seconds.items():
            entry = self.client(name)
            before = took if entry.seconds is None else entry.seconds
            entry.seconds = round(SMOOTH * before + (1 - SMOOTH) * took, 6)
        if len(self.clients) > 2 * MOST_CLIENTS:
            self.clients = dict(self._chosen())

    def say(self, sentence: str) -> None:
        """Keep the last things that were said."""
        self.notice, self.noticed = printable(sentence), self.clock()
        self.notices = [*self.notices, (self.noticed, self.notice)][-NOTICES:]

    def stranger(self, node: str, reason: str) -> None:
        """Note a node that was not taken in."""
        if len(self.strangers) >= REMEMBERED:
            self.strangers.pop(next(iter(self.strangers)))
        self.strangers[node] = printable(reason)

    def facts(self) -> dict[str, Any]:
        """All of it as plain values."""
        known = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "clock"}
        known["clients"] = {name: asdict(entry) for name, entry in self._chosen()}
        return {**known, "strangers": dict(self.strangers)}

    def _chosen(self) -> list[tuple[str, ClientStatus]]:
        """All clients, or of very many those that somebody would look for."""
        known = [*self.clients.items()]
        if len(known) > MOST_CLIENTS:
            known.sort(key=lambda pair: _interest(pair[1]), reverse=True)
        return known[:MOST_CLIENTS]


def _interest(entry: ClientStatus) -> tuple[bool, int, float]:
    return entry.connected or entry.excluded, entry.refusals, entry.seconds or 0.0


def _reason(name: str, reason: str) -> str:
    return printable(reason.removeprefix(f"client {name}: "))
