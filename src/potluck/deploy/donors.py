"""Who gave the first weights of a round, when nobody can train with them.

The server asks one client of each architecture for its first weights. Nobody else sends the like, so what is wrong
with them shows only when everyone fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from potluck.core.card import ClientId
from potluck.deploy.suspects import NOT_FINITE, Setback
from potluck.engine.protocol import Answer, Outcome, Request

Attempt = tuple[int, int, int]  # round, attempt, start of the server


class Donors:
    """Who gave first weights in the newest attempt at a round."""

    def __init__(self) -> None:
        self._attempt: Attempt = (0, 0, 0)
        self._gave: set[ClientId] = set()

    def note(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        """Take note of one exchange."""
        for one in requests[:1]:
            attempt = one.stamp.round, one.stamp.attempt, one.stamp.incarnation
            if attempt != self._attempt:
                self._attempt, self._gave = attempt, set()
        if any(one.purpose == "setup" for one in requests):
            self._gave |= {one.client for one in outcomes if isinstance(one, Answer)}
        else:  # whose first weights were refused is not asked again
            self._gave &= {one.client for one in requests}

    def of(self, round_: int, sizes: Mapping[ClientId, float]) -> ClientId | None:
        """Who gave first weights in a round, of several the one with the largest; None where nobody did.

        `sizes` say how large they were against those of a new model.
        """
        if self._attempt[0] != round_ or not self._gave:
            return None
        return max(sorted(self._gave), key=lambda client: sizes.get(client, 0.0))


def is_to_blame(donor: ClientId, setback: Setback) -> bool:
    """Whether everyone failed over values that are not finite after a client gave its first weights.

    One other client alone is not believed, unless the donor itself failed as well.
    """
    others = [client for client in setback.asked if client != donor and client not in setback.lost]
    failed = NOT_FINITE in setback.failures.get(donor, "")
    return setback.diverged(donor) and (failed or len(others) > 1)
