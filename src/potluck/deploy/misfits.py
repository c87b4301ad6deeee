"""Who cannot begin a federation together with the others: another task, say, or other public samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from potluck.core.card import ClientId
from potluck.core.plain_values import printable
from potluck.errors import ConfigError, Misfits, PotluckError
from potluck.federation.federation import Federation

Roster = tuple[ClientId, ...]
Build = Callable[[Roster], Federation]
# Federations that are built to find who fits: so many, and so many for each client.
FEW_TRIES, TRIES = 2_000, 20
Facts = Mapping[ClientId, Mapping[str, Any]]  # what the card of each client says, by name


def without_misfits(
    roster: Roster, facts: Facts, build: Build, needed: int = 1
) -> tuple[Federation, dict[ClientId, str]]:
    """The federation of those who can begin together, and the others, each with the reason.

    Those who cannot take part whoever else does are left out first. Of the others the largest group begins whose
    members fit each other. Of two groups as large, those who are in both begin, if they are as many as are
    `needed`; else nobody can say which is wrong. Where no group fits, the experiment is to blame, and the error of
    building it with everyone is raised. Where there are hundreds of groups, the search ends before it has seen all.
    """
    try:
        return build(roster), {}
    except Misfits as error:
        left = tuple(client for client in roster if client not in error.reasons)
        if not left:
            raise
        federation, others = without_misfits(left, facts, build, needed)
        return federation, error.reasons | others
    except PotluckError as error:
        everyone: PotluckError = error
    except Exception as error:  # over a stranger's card, perhaps
        everyone = ConfigError(
            f"a federation of {', '.join(roster)} cannot be set up: {in_words(error)}; "
            "check what they told of themselves"
        )
        everyone.__cause__ = error
    groups = _Groups(roster, facts, build).largest()
    if not groups:
        raise everyone
    both = frozenset(groups[0]).intersection(*groups)
    left = tuple(client for client in roster if client in both)
    if len(groups) > 1 and len(left) < needed:
        one, other = (", ".join(group) for group in groups[:2])
        raise ConfigError(
            f"{everyone}; client {one} on one side and client {other} on the other fit among themselves, and "
            f"neither are more: have it put right there, or begin without one side (--exclude)"
        )
    out = [client for client in roster if client not in both]
    return build(left), {client: _reason(client, both, roster, build) for client in out}


def in_words(error: Exception) -> str:
    """What an error says, with its type where it is none of the library's own sentences."""
    told = str(error) if isinstance(error, PotluckError) else f"{type(error).__name__}: {error}"
    return printable(told)


class _Groups:
    """The groups of a roster whose members can begin together."""

    def __init__(self, roster: Roster, facts: Facts, build: Build) -> None:
        self.roster, self.facts, self.build = roster, facts, build
        self._fit: dict[frozenset[ClientId], bool] = {frozenset(roster): False}
        self._places = {client: place for place, client in enumerate(roster)}

    def largest(self) -> list[Roster]:
        """The groups that no other is larger than; none where nobody can begin."""
        found: list[frozenset[ClientId]] = []
        for seed in self._seeds():
            if len(self._fit) > FEW_TRIES + TRIES * len(self.roster):
                break
            if not any(seed <= group for group in found) and self._fits(seed):
                found.append(self._grown(seed, [one for one in self.roster if one not in seed]))
        if not found:  # a method may need several clients
            everyone = frozenset(self.roster)
            found = [left for client in self.roster if self._fits(left := everyone - {client})][:1]
        most = max(map(len, found), default=0)
        return [self._ordered(group) for group in dict.fromkeys(found) if len(group) == most]

    def _seeds(self) -> Iterator[frozenset[ClientId]]:
        """Groups to begin with: those whose cards agree in a fact, the largest first, then each client alone."""
        alike: dict[tuple[str, str], set[ClientId]] = {}
        for client in self.roster:
            for name, value in self.facts[client].items():
                alike.setdefault((name, repr(value)), set()).add(client)
        yield from map(frozenset, sorted(alike.values(), key=len, reverse=True))
        yield from (frozenset({client}) for client in self.roster)

    def _grown(self, group: frozenset[ClientId], others: Sequence[ClientId]) -> frozenset[ClientId]:
        """A group with all others that fit, looked for by halves: most of them do."""
        if not others:
            return group
        together = group.union(others)
        if self._fits(together):
            return together
        if len(others) == 1:
            return group
        half = len(others) // 2
        return self._grown(self._grown(group, others[:half]), others[half:])

    def _fits(self, group: frozenset[ClientId]) -> bool:
        if group not in self._fit:
            try:
                self._fit[group] = bool(group) and self.build(self._ordered(group)) is not None
            except Exception:  # over a stranger's card, perhaps: it is not these who can begin together
                self._fit[group] = False
        return self._fit[group]

    def _ordered(self, group: frozenset[ClientId]) -> Roster:
        return tuple(sorted(group, key=self._places.__getitem__))


def _reason(client: ClientId, left: Set[ClientId], roster: Sequence[ClientId], build: Build) -> str:
    """Why a client cannot begin with those that are left."""
    try:
        build(tuple(one for one in roster if one in left or one == client))
    except Exception as error:  # over a stranger's card
        return in_words(error)
    return f"client {client} fits those that are left, but not together with others"
