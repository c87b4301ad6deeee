"""How long clients are at work, for whoever looks for the slowest."""

from __future__ import annotations

from potluck.core.card import ClientId
from potluck.engine.protocol import Examination, Request


class WorkTimes:
    """Seconds that each client was at work on the steps of the newest round; another attempt begins anew."""

    def __init__(self) -> None:
        self.seconds: dict[ClientId, float] = {}
        self._attempt = 0, 0

    def add(self, order: Request | Examination, seconds: float) -> None:
        """Count the work on an order; examinations do not count."""
        if isinstance(order, Examination):
            return
        attempt = order.stamp.round, order.stamp.attempt
        if attempt != self._attempt:
            self._attempt, self.seconds = attempt, {}
        self.seconds[order.client] = self.seconds.get(order.client, 0.0) + seconds
