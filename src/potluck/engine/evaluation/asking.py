"""Asking clients to measure themselves, and again those that gave no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from potluck.core.card import ClientId
from potluck.engine.cohort import clients_needed
from potluck.engine.evaluation.lapses import Lapses
from potluck.engine.protocol import Engine, Examination, Failure, Outcome
from potluck.engine.retries import Tries, Waits


class Asking:
    """How the clients of a run are asked: how often, with which waits, and who has less time than others.

    Clients that gave no answer are asked `attempts` times, with `waits` in between; where fewer than `quorum`,
    a share of them, have answered, as long as the waits' patience lasts.
    """

    def __init__(
        self, engine: Engine, notice: Callable[[str], None], attempts: int, waits: Waits, quorum: float
    ) -> None:
        self.engine, self.notice = engine, notice
        self.attempts, self.waits, self.quorum = attempts, waits, quorum
        self._away: set[ClientId] = set()  # who gave no answer the last time
        self.lapses = Lapses()

    def outcomes(self, asked: Sequence[Examination], round_: int, is_last: bool) -> dict[ClientId, Outcome]:
        """The outcome of every examination; who gave no answer is asked again.

        Nobody waits round after round for a client that is known to be away, except in the last one; nor there for
        one that has let the server wait in vain before.
        """
        self.lapses.begin(round_)
        doubted = {one.client for one in asked if self.lapses.is_doubted(one.client)}
        not_awaited = doubted if is_last else doubted | self._away
        outcomes = self._first_outcomes(asked, doubted, is_last)
        needed = clients_needed(self.quorum, len(asked))
        tries = Tries(self.attempts, self.waits, self.waits.patience)
        while lost := _lost(outcomes.values()):
            enough = len(outcomes) - len(lost) >= needed
            wait = tries.next_wait(lost=True)
            if wait is None or (enough and (tries.made >= self.attempts or lost <= not_awaited)):
                break
            if not enough:
                self.notice(
                    f"round {round_}: not evaluated yet: {', '.join(sorted(lost))}; trying again in {wait:g} s"
                )
            tries.again(wait)
            again = [one for one in asked if one.client in lost]
            outcomes |= self._timed(again, self.lapses.short_time if enough else None)
        self._away = lost
        return outcomes

    def _first_outcomes(
        self, asked: Sequence[Examination], doubted: set[ClientId], is_last: bool
    ) -> dict[ClientId, Outcome]:
        """The outcomes of asking once: first those that are trusted, then the others, who have less time."""
        dropped = {one for one in doubted if not is_last and self.lapses.is_dropped(one)}
        found = self._timed([one for one in asked if one.client not in doubted])
        late = [one for one in asked if one.client in doubted - dropped]
        found |= self._timed(late, self.lapses.short_time)
        for client in dropped:
            found[client] = Failure(
                client, f"client {client}: not asked, as it left out evaluations before", True
            )
        return {one.client: found[one.client] for one in asked}

    def _timed(self, asked: Sequence[Examination], within: float | None = None) -> dict[ClientId, Outcome]:
        if not asked:
            return {}
        start = self.waits.clock.now()
        trusted = not any(self.lapses.is_doubted(one.client) for one in asked)
        found = self.engine.examine(asked) if within is None else self.engine.examine_within(asked, within)
        waited = self.engine.waited_for(_lost(found))
        self.lapses.note(waited, self.waits.clock.now() - start, trusted)
        return {one.client: one for one in found}


def _lost(outcomes: Iterable[Outcome]) -> set[ClientId]:
    """The clients that gave no answer."""
    return {one.client for one in outcomes if isinstance(one, Failure) and one.lost}
