"""Which home plays which client: measured seconds, longest first, and at home where that costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

SLACK = 1.05  # a client stays at its home if that home is done within this share of the ideal time
NEWEST = 0.5  # weight of the newest measurement

H = TypeVar("H", bound=Hashable)
T = TypeVar("T")


def shared_out(
    items: Sequence[T],
    homes: Sequence[H],
    seconds: Callable[[T], float],
    home: Callable[[T], H | None],
    move: Callable[[T], float] = lambda item: 0.0,
) -> dict[H, list[T]]:
    """Deal items out to homes, in their order at each. `home` says who has the state of an item, if anybody.

    `move` says how many seconds it takes to bring the state elsewhere.
    """
    cost = {place: seconds(item) for place, item in enumerate(items)}
    loads, shares = dict.fromkeys(homes, 0.0), {one: list[int]() for one in homes}
    ideal = sum(cost.values()) / len(homes)
    for place in sorted(cost, key=lambda place: (-cost[place], place)):
        own = home(items[place])
        idle = min(homes, key=lambda one: loads[one])
        chosen = idle
        if own is not None and own in loads:
            in_time = loads[own] + cost[place] <= SLACK * max(ideal, cost[place])
            chosen = own if in_time or loads[own] <= loads[idle] + move(items[place]) else idle
        loads[chosen] += cost[place]
        shares[chosen].append(place)
    return {one: [items[place] for place in sorted(places)] for one, places in shares.items()}


class Seconds:
    """How long a kind of client takes per sample, measured as the run goes on."""

    def __init__(self) -> None:
        self._rates: dict[Hashable, float] = {}

    def note(self, kind: Hashable, samples: int, seconds: float) -> None:
        """Remember a measurement; newer ones count more."""
        rate = seconds / max(samples, 1)
        self._rates[kind] = NEWEST * rate + (1 - NEWEST) * self._rates.get(kind, rate)

    def expected(self, kind: Hashable, samples: int) -> float:
        """The seconds a client of a kind will take; a kind that is not known yet is like the others."""
        known: Mapping[Hashable, float] = self._rates
        usual = sum(known.values()) / len(known) if known else 1.0
        return known.get(kind, usual) * max(samples, 1)
