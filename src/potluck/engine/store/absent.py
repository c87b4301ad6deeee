"""Stored states that are not in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from potluck.core.packed import State


class Absent(Mapping[str, Tensor]):
    """A state that is elsewhere, and takes no memory here until it has arrived."""

    nbytes: int

    @property
    @abstractmethod
    def arrived(self) -> State | None:
        """The state if it is here."""

    @abstractmethod
    def here(self) -> State:
        """The state, fetched if need be."""
