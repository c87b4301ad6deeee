"""States that homes owe the driver: they stay where they were made, and are sent when somebody needs them.

To send a state takes longer than to train a small client, so a home may keep what it made. The driver remembers
what led to it: the state before, and the errand. If the home is lost, another one does the errand again. Randomness
depends on neither place nor attempt, so the same state comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.engine.protocol import Examination, Request
from potluck.engine.store.absent import Absent
from potluck.engine.store.transfers import size
from potluck.engine.transactions import Errand

PER_GB = 1.25  # seconds that a state takes on its way, for each GB
WORTH = 10.0  # a state is sent once it took so many times as long to train as it takes to send


def is_due(seconds: float, nbytes: int) -> bool:
    """Whether a state that took so long to train is sent: that adds little, and to lose it would cost more."""
    return seconds >= WORTH * PER_GB * nbytes / 1e9


class Owed(Absent):
    """A state that is at a home, under a version, and the errand that led to it."""

    def __init__(
        self,
        errand: Errand,
        version: int,
        nbytes: int,
        seconds: float,
        bring: Callable[[Sequence[Owed]], None],
    ) -> None:
        before = errand.state
        self.client, self.version, self.nbytes = errand.request.client, version, nbytes
        self.errand: Errand | None = errand  # None once the state is here
        self.seconds = seconds + seconds_behind(before)  # of training that would have to be done again
        self.kept: int = _size(errand.request.down) + _kept_for(
            before
        )  # bytes that are kept to make it again
        self._bring = bring
        self._state: State | None = None

    @property
    def arrived(self) -> State | None:
        """The state if it is here."""
        return self._state

    def arrive(self, state: State) -> None:
        """Take the state, and forget what led to it."""
        self._state, self.errand = state, None

    def here(self) -> State:
        """The state, fetched if need be."""
        if self._state is None:
            self._bring([self])
        assert self._state is not None, "who brings a state brings it or raises"
        return self._state

    def __getitem__(self, name: str) -> Tensor:
        return self.here()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.here())

    def __len__(self) -> int:
        return len(self.here())


@dataclass(frozen=True)
class Recall:
    """Asks for a state that is owed."""

    client: ClientId
    state: Owed


@dataclass(frozen=True)
class Replay:
    """Has an errand done again whose state is lost; another request of the client waits for it."""

    client: ClientId
    state: Owed


AnyRequest = Request | Examination | Recall | Replay


def seconds_behind(state: State | None) -> float:
    """How long the training took that led to a state since it was last here."""
    return state.seconds if isinstance(state, Owed) and state.arrived is None else 0.0


def _kept_for(state: State | None) -> int:
    if isinstance(state, Owed):
        return state.kept if state.arrived is None else state.nbytes
    return _size(state)


def _size(state: State | None) -> int:
    return 0 if state is None else size(state)
