"""Round numbers for axes. matplotlib has them too, but loading it takes longer than writing a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def round_values(
    low: float, high: float, most: int, steps: Sequence[float] = (1, 2, 2.5, 5), *, whole: bool = False
) -> list[float]:
    """Multiples of a round step from `low` to `high`, with at most so many steps between them.

    >>> round_values(0.12, 0.93, 5)
    [0.2, 0.4, 0.6, 0.8]
    >>> round_values(1, 7, 10, whole=True)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    if not 0 < high - low < math.inf:
        return []
    power = math.floor(math.log10((high - low) / most))
    while True:
        for step in steps:
            first, last = (end / (step * 10.0**power) for end in (low, high))
            places = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
            if len(places) <= most + 1 and not (whole and (step * 10.0**power) % 1):
                return [round(place * step * 10.0**power, 12 - power) for place in places]
        power += 1


def tick_texts(values: Sequence[float]) -> list[str]:
    """The values of an axis in words: six digits, or as many as tell each from the next.

    >>> tick_texts([1.0925, 1.093, 1.0935]), tick_texts([-123.4565, -123.457])
    (['1.0925', '1.093', '1.0935'], ['−123.4565', '−123.457'])
    """
    near = 0.01 * min((abs(one - other) for one, other in pairwise(values)), default=math.inf)
    digits = (
        most for most in range(6, 17) if all(abs(float(f"{one:.{most}g}") - one) <= near for one in values)
    )
    most = next(digits, 17)
    return [f"{one:.{most}g}".replace("-", "−") for one in values]


def round_powers(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from `low` to `high`, and three times each where there are few; round values if they are close.

    >>> round_powers(50, 20_000, 5)
    [100.0, 1000.0, 10000.0]
    """
    if high / low <= 10:
        return round_values(low, high, 3)
    digits = (1, 3) if high / low <= 30 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [digit * 10.0**power for power in powers for digit in digits]
    found = [value for value in found if low <= value <= high]
    return found[:: -(-len(found) // most)]
