"""The Ray engine: the bits of the serial engine, also when homes are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from potluck.core.card import ClientId
from potluck.core.packed import State
from potluck.engine.runner import StoringEngine
from potluck.engine.settings import EngineSettings
from potluck.federation.builder import ClientBuilder
from potluck.testing.bench import ALL, Bench

ray = pytest.importorskip("ray")

import potluck.engine.ray.engine as ray_engine  # noqa: E402
from potluck.engine.ray.cluster import Cluster  # noqa: E402
from potluck.engine.ray.engine import RayEngine  # noqa: E402
from potluck.engine.ray.homes import Home, Homes  # noqa: E402
from potluck.engine.ray.spots import Spot  # noqa: E402

SCHEDULE: list[Sequence[ClientId]] = [ALL, ("0", "2"), ALL]


class WarmHomes(Homes):
    """Homes whose processes are used again by the next engine, as starting one takes seconds."""

    pool: list[Any] = []
    kills: set[int] = set()  # after which replies, counted from 1, the home that answered is killed
    seen = 0

    def _make(self, spot: Spot, anywhere: bool = False) -> Home:
        return Home(self.pool.pop(), spot) if self.pool and not anywhere else super()._make(spot, anywhere)

    def replies(self) -> Iterator[Any]:
        for home, found in super().replies():
            yield home, found
            WarmHomes.seen += 1
            if self.seen in self.kills:
                kill(self.alive[-1])

    def close(self) -> None:
        self.pool += [home.actor for home in self.alive]
        self.alive = []
        super().close()


def kill(home: Home) -> None:
    os.kill(home.process, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(None)
    yield found
    WarmHomes.pool.clear()
    found.close()


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def engine(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, heard: list[str]
) -> Iterator[Callable[[ClientBuilder], StoringEngine]]:
    """Makes Ray engines with two homes each."""
    monkeypatch.setattr(ray_engine, "Homes", WarmHomes)
    monkeypatch.setattr(WarmHomes, "kills", set())
    monkeypatch.setattr(WarmHomes, "seen", 0)
    made: list[RayEngine] = []

    def make(clients: ClientBuilder) -> RayEngine:
        while made:
            made.pop().close()
        made.append(RayEngine(clients, EngineSettings(name="ray", workers=2), notice=heard.append))
        return made[0]

    yield make
    while made:
        made.pop().close()


def same(one: dict[str, State | None], other: dict[str, State | None]) -> bool:
    assert one.keys() == other.keys()
    return all(
        (state or {}).keys() == (other[name] or {}).keys()
        and all(torch.equal(value, (other[name] or {})[key]) for key, value in (state or {}).items())
        for name, state in one.items()
    )


@pytest.mark.parametrize("kills", [set(), {2}, {1, 5}], ids=["nobody", "one", "two"])
@pytest.mark.parametrize("method", ["fedproto", "scaffold", "fedmd"])
def test_the_bits_of_the_serial_engine(
    engine: Callable[[ClientBuilder], StoringEngine],
    monkeypatch: pytest.MonkeyPatch,
    heard: list[str],
    method: str,
    kills: set[int],
) -> None:
    monkeypatch.setattr(WarmHomes, "kills", kills)
    played = Bench(method, make_engine=engine).play(SCHEDULE)
    assert len([one for one in heard if "is lost" in one]) == len(kills)
    assert same(Bench(method).play(SCHEDULE).states(), played.states())
