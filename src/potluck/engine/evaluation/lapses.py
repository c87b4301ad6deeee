"""Clients that had an evaluation wait for nothing: how long the server still waits for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from potluck.core.card import ClientId

COSTLY = 10.0  # seconds that an exchange took in vain; who is not even connected costs none
TURNS = 8  # evaluated rounds for which a client is doubted after its first lapse; then 16, 32, …
CHANCES = 2  # of these rounds; who leaves out its short time in so many of them is not asked any more
LEAST = 30.0  # seconds that a doubted client has, where the others need no more than half of it
MARGIN = 2.0  # times as long as the others took


@dataclass
class Doubt:
    """How often a client has lapsed while it was trusted, until when it is doubted, and its lapses since."""

    times: int
    until: int
    latest: int
    since: int = 0


class Lapses:
    """Remembers lapses. Turns are evaluated rounds, so that rounds without evaluation do not count."""

    def __init__(self) -> None:
        self.turn = 0
        self._round = 0
        self._usual: float | None = None
        self._doubts: dict[ClientId, Doubt] = {}

    def begin(self, round_: int) -> None:
        """An evaluation of this round begins; its three moments are one turn."""
        if round_ != self._round:
            self._round, self.turn = round_, self.turn + 1

    def is_doubted(self, client: ClientId) -> bool:
        """Whether a client is asked apart from the others, with less time."""
        return client in self._doubts and self.turn <= self._doubts[client].until

    def is_dropped(self, client: ClientId) -> bool:
        """Whether a doubted client has left out that time too, so that it is not asked."""
        return self.is_doubted(client) and self._doubts[client].since >= CHANCES

    @property
    def short_time(self) -> float | None:
        """The seconds that a doubted client has; None as long as it is not known what the others need."""
        return None if self._usual is None else max(LEAST, MARGIN * self._usual)

    def note(self, lost: Iterable[ClientId], seconds: float, trusted: bool = True) -> None:
        """An exchange took so many seconds, and these clients gave no answer; all that were asked are `trusted`.

        Only these tell how long it usually takes: a doubted client must not give itself more time by being slow.
        """
        missing = [*lost]
        if trusted and not missing:
            self._usual = seconds
        for client in missing if seconds >= COSTLY else ():
            self._lapsed(client)

    def kept(self) -> dict[ClientId, dict[str, int]]:
        """What is remembered of clients, to be written down: turns count from now on."""
        return {
            client: {"times": one.times, "left": max(one.until - self.turn, -1), "since": one.since}
            for client, one in self._doubts.items()
        }

    def recall(self, kept: Mapping[ClientId, Mapping[str, int]]) -> None:
        """Doubt clients as they were doubted when this was written down."""
        for client, one in kept.items():
            self._doubts[client] = Doubt(one["times"], self.turn + one["left"], self.turn, one["since"])

    def _lapsed(self, client: ClientId) -> None:
        known = self._doubts.get(client)
        if known is None or not self.is_doubted(client):
            times = 1 if known is None else known.times + 1
            self._doubts[client] = Doubt(times, self.turn + TURNS * 2 ** (times - 1), self.turn)
        elif known.latest < self.turn:
            known.latest, known.since = self.turn, known.since + 1
