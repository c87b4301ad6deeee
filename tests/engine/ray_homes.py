"""Ray engines for tests: their processes are used again by the next engine, and killed at chosen moments."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from potluck.core.packed import State
from potluck.engine.ray.engine import RayEngine
from potluck.engine.ray.handles import Home
from potluck.engine.ray.homes import Homes
from potluck.engine.ray.spots import Spot
from potluck.engine.settings import EngineSettings
from potluck.federation.builder import ClientBuilder


class WarmHomes(Homes):
    """Homes whose processes outlive their engine, as starting one takes seconds."""

    pool: list[tuple[str, Any]] = []  # machine and process
    kills: frozenset[int] = frozenset()  # after which replies, counted from 1, a home is killed
    seen = 0

    def _spots_with_room(self) -> list[Spot]:
        return self.spots  # those that are warm have theirs

    def _make(self, spot: Spot, anywhere: bool = False) -> Home:
        warm = next((one for one in self.pool if one[0] == spot.node and not anywhere), None)
        if warm is None:
            return super()._make(replace(spot, node="") if anywhere else spot, anywhere)
        self.pool.remove(warm)
        return Home(warm[1], spot)

    def replies(self) -> Iterator[Any]:
        for home, found in super().replies():
            yield home, found
            WarmHomes.seen += 1
            if self.seen in self.kills and self.alive:
                self.strike()

    def strike(self) -> None:
        """What happens after a chosen reply: a home is killed, of those that still live."""
        for home in reversed(self.alive):
            with contextlib.suppress(ProcessLookupError):
                return os.kill(home.process, signal.SIGKILL)

    def close(self) -> None:
        kept = [home for home in self.alive if home.call is None and home.spot.node]
        self.pool += [(home.spot.node, home.actor) for home in kept]
        self.alive = [home for home in self.alive if home not in kept]
        super().close()


class Engines:
    """Makes Ray engines with two homes and hears what they say; the last few are open, the others closed."""

    def __init__(self, settings: EngineSettings | None = None, open: int = 1) -> None:
        self.settings = settings or EngineSettings(name="ray", workers=2)
        self.open = open
        self.heard: list[str] = []
        self.made: list[RayEngine] = []

    def __call__(self, clients: ClientBuilder) -> RayEngine:
        while len(self.made) >= self.open:
            self.made.pop(0).close()
        self.made.append(RayEngine(clients, self.settings, notice=self.heard.append))
        return self.made[-1]

    def kill_after(self, *replies: int) -> None:
        """Kill a home after these replies from now on."""
        WarmHomes.seen, WarmHomes.kills = 0, frozenset(replies)

    @property
    def lost(self) -> int:
        """How many homes were lost so far."""
        return len([sentence for sentence in self.heard if "is lost" in sentence])

    def close(self) -> None:
        """Close all engines."""
        while self.made:
            self.made.pop().close()


def same(one: dict[str, State | None], other: dict[str, State | None]) -> bool:
    """Whether two sets of states are the same, bit for bit."""
    assert one.keys() == other.keys()
    return all(_same_state(state or {}, other[name] or {}) for name, state in one.items())


def _same_state(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
