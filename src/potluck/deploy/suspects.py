"""Whose message of a round stands out, when nobody can go on after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from potluck.core.card import ClientId
from potluck.engine.norms import SETTING

FACTOR = 10.0  # times the median of the others' messages; honest ones are nearer to each other
NOT_FINITE = "not finite"  # what every sentence about such values says, the site's and the server's


@dataclass(frozen=True)
class Suspect:
    """A client whose message was `times` as large as the median of the others', which was `others`."""

    client: ClientId
    times: float
    others: float = field(default=1.0, compare=False)  # times what a new model has


def find_suspects(
    norms: Mapping[ClientId, float], absent: Mapping[ClientId, float] | None = None
) -> list[Suspect]:
    """The clients whose messages stand out against those of more than half of all, themselves counted; the one that
    stands out most comes first.

    So a minority cannot put the blame on another by sending little; of two nobody stands out. Clients that were
    `absent` count with what they sent before, and are not suspected.
    """
    found, voices = [], {**(absent or {}), **norms}
    for client, norm in norms.items():
        others = [other for name, other in voices.items() if name != client]
        middle = median(others) if others else 0.0
        times = norm / middle if middle > 0 else 0.0
        most = sum(norm > FACTOR * other for other in others) > len(voices) / 2
        if most and times > FACTOR:
            found.append(Suspect(client, times, middle))
    return sorted(found, key=lambda one: -one.times)


def find_suspect(
    norms: Mapping[ClientId, float], absent: Mapping[ClientId, float] | None = None
) -> Suspect | None:
    """The client whose message stands out most, if one does."""
    return next(iter(find_suspects(norms, absent)), None)


@dataclass(frozen=True)
class Tie:
    """One half of the clients sent at least `times` as much as the other: nobody can say which is wrong."""

    larger: tuple[ClientId, ...]
    smaller: tuple[ClientId, ...]
    times: float


def find_tie(norms: Mapping[ClientId, float]) -> Tie | None:
    """The two halves of the clients, if their messages are as far from each other as that of a suspect."""
    ordered, half = sorted(norms, key=lambda client: norms[client]), len(norms) // 2
    if not ordered or len(ordered) % 2 or norms[ordered[half - 1]] <= 0:
        return None
    times = norms[ordered[half]] / norms[ordered[half - 1]]
    return Tie(tuple(ordered[half:]), tuple(ordered[:half]), times) if times > FACTOR else None


@dataclass(frozen=True)
class Setback:
    """Who failed in a round that had `asked` them, and why; `lost` are those from which no answer came.

    `ended` says that too few were left to finish it.
    """

    round: int
    asked: tuple[ClientId, ...]
    failures: Mapping[ClientId, str]
    lost: Collection[ClientId] = ()
    ended: bool = False

    def diverged(self, *aside: ClientId | None) -> bool:
        """Whether nobody can go on, whatever the clients `aside` do."""
        return have_diverged(self.failures, self.asked, {*self.lost, *aside}, self.ended)

    @property
    def diverging(self) -> list[ClientId]:
        """Who failed over values that are not finite, or far too large."""
        return [client for client in self.asked if diverges(self.failures.get(client, ""))]


class Failing:
    """Who failed over values in the attempts at one round, also those that were drawn in the place of others."""

    def __init__(self) -> None:
        self._round, self._clients = 0, set[ClientId]()

    def note(self, setback: Setback) -> None:
        """Take note of an attempt."""
        known = self._clients if setback.round == self._round else set()
        self._round, self._clients = setback.round, known.union(setback.diverging)

    def forget(self) -> None:
        """A round was taken back, or has other first weights: who failed before may not fail any more."""
        self._clients = set()

    def are_most(self, setback: Setback, everyone: Collection[ClientId]) -> bool:
        """Whether they are more than half of all clients.

        Where a round asks some of them only, a few liars may be most of those.
        """
        known = self._clients if setback.round == self._round else set()
        return len(known.union(setback.diverging)) > len(everyone) / 2


def have_diverged(
    failures: Mapping[ClientId, str],
    asked: Collection[ClientId],
    aside: Collection[ClientId | None],
    ended: bool = False,
) -> bool:
    """Whether all but those `aside`, and more than half of all, have failed over values that are not finite, or are
    refused as far too large.

    A client's own word is no proof. That of more than half of those asked is, as long as most are honest. Where the
    round has `ended`, they are enough: one that says it can go on must not keep the others from going back.
    """
    failed = {client for client in asked if diverges(failures.get(client, ""))}
    if len(failed) <= len(asked) / 2:
        return False
    return ended or all(client in failed for client in asked if client not in aside)


def diverges(reason: str) -> bool:
    """Whether a client failed over values that are not finite, or was refused as its message is far too large."""
    return NOT_FINITE in reason or SETTING in reason
