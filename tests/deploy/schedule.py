"""A schedule of kills, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sites

from potluck.core.rng import Rng

SERVICES = ("server", "superlink", "gate")
AT_A_SITE = {"supernode": "deploy.flower.node", "worker": "deploy.flower.worker", "join": ""}
TARGETS = (*SERVICES, *AT_A_SITE)
PHASES = ("training", "evaluation", "between")


@dataclass(frozen=True)
class Blow:
    """A signal to one process of the federation."""

    target: str
    client: str = ""
    stop: bool = False  # SIGSTOP for a minute; else SIGKILL

    def __str__(self) -> str:
        whose = f" of client {self.client}" if self.client else ""
        return f"{'STOP' if self.stop else 'KILL'} {self.target}{whose}"


@dataclass(frozen=True)
class Event:
    """One or two blows in a phase of a round; `gap` is the seconds between them."""

    round: int
    phase: str
    held: str  # the client that is held in training or evaluation while it happens
    first: Blow
    second: Blow | None = None
    gap: float = 0.0
    release: float = 0.0  # seconds until the held client goes on

    def __str__(self) -> str:
        more = f", after {self.gap:.0f} s {self.second}" if self.second else ""
        return f"round {self.round}, {self.phase}: {self.first}{more}"


def generator(seed: int) -> np.random.Generator:
    """Choices from a seed."""
    return Rng(seed).child("schedule").numpy()


def draw(seed: int, events: int, rounds: int) -> list[list[Event]]:
    """The events of several federations, one in every round; every target has its share of kills and stops."""
    rng = generator(seed)
    firsts = [(target, turn % 6 == 5) for turn in range(-(-events // len(TARGETS))) for target in TARGETS]
    order = rng.permutation(len(firsts))[:events]
    drawn = [_event(rng, *firsts[place], number % rounds + 1, number % 4 == 0)
             for number, place in enumerate(order)]  # fmt: skip
    return [drawn[start : start + rounds] for start in range(0, events, rounds)]


def _event(rng: np.random.Generator, target: str, stop: bool, round_: int, double: bool) -> Event:
    phase = "joining" if round_ == 1 else PHASES[rng.integers(len(PHASES))]
    first = _blow(rng, target, stop)
    second = _blow(rng, TARGETS[rng.integers(len(TARGETS))], False) if double else None
    soon = first != second and rng.random() < 0.5  # two at once; else the second while the first is made good
    gap = 0.0 if soon else rng.uniform(4, 25)
    held = sites.IDS[rng.integers(len(sites.IDS))]
    return Event(round_, phase, held, first, second, gap, rng.uniform(0, 10))


def _blow(rng: np.random.Generator, target: str, stop: bool) -> Blow:
    return Blow(target, sites.IDS[rng.integers(len(sites.IDS))] if target in AT_A_SITE else "", stop)
