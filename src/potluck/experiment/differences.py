"""Where two experiments differ, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A key with the value it has there (in a run folder) and the one it has here."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.there} there, {self.here} here"

    def is_below(self, *keys: str) -> bool:
        """Whether it is one of these keys, or inside the block or list of one."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)


def differences(there: Any, here: Any, key: str = "") -> Iterator[Difference]:
    """Every key under which two experiments, as `to_values` gives them, have other values.

    >>> [str(one) for one in differences({"seed": 0, "training": {"rounds": 5}}, {"seed": 0, "training": {}})]
    ['training.rounds: 5 there, None here']
    """
    if isinstance(there, dict) and isinstance(here, dict):
        for inner in dict.fromkeys([*there, *here]):
            path = f"{key}.{inner}" if key else str(inner)
            yield from differences(there.get(inner), here.get(inner), path)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for place, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from differences(one, other, f"{key}.{place}")
    elif there != here:
        yield Difference(key, there, here)
