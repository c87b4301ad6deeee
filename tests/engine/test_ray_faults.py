"""Every method on a Ray cluster while its machines and processes die: no bit changes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from contract_cases import contract_case
from potluck.core.card import ClientId
from potluck.core.rng import Rng
from potluck.engine.settings import EngineSettings
from potluck.methods.registry import method_names
from potluck.testing.bench import ALL, Bench
from potluck.testing.contract import (
    clients_of_every_kind_work,
    faults_leave_no_trace,
    only_declared_crosses,
    order_does_not_matter,
    state_survives,
    unsampled_clients_stay,
)

ray = pytest.importorskip("ray")

from ray_homes import Engines, WarmHomes, same  # noqa: E402

import potluck.engine.ray.engine as ray_engine  # noqa: E402
import potluck.engine.ray.homes as ray_homes  # noqa: E402
from potluck.engine.ray import cluster as clusters  # noqa: E402
from potluck.engine.ray.homes import Home  # noqa: E402

pytestmark = pytest.mark.faults

SCHEDULE: list[Sequence[ClientId]] = [ALL, ("0", "2"), ALL]
CHECKS = (
    clients_of_every_kind_work,
    state_survives,
    unsampled_clients_stay,
    only_declared_crosses,
    order_does_not_matter,
    faults_leave_no_trace,
)


class Machines:
    """A head without work and two machines with a home each, all on this one."""

    def __init__(self) -> None:
        clusters.check_installed()
        os.environ.update(clusters.OWN)
        clusters._stay_alone(True)
        from ray.cluster_utils import Cluster  # noqa: TID251

        self.imitated = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes = [self._add(), self._add()]

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings(name="ray", workers=2, address=self.imitated.address)

    def kill(self) -> None:
        """Kill a machine with all that runs on it."""
        self.imitated.remove_node(self.nodes.pop(), allow_graceful=False)

    def mend(self) -> None:
        """Have two machines again; it takes the head a while to notice that one is gone."""
        while len(self.nodes) < 2:
            self.nodes.append(self._add())
        while sum("CPU" in node["Resources"] for node in ray.nodes() if node["Alive"]) > 2:
            time.sleep(0.2)

    def close(self) -> None:
        WarmHomes.pool.clear()
        ray.shutdown()
        self.imitated.shutdown()

    def _add(self) -> Any:
        return self.imitated.add_node(num_cpus=1)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    found = Machines()
    connection = clusters.Cluster(found.imitated.address)
    yield found
    found.close()
    connection.close()


@pytest.fixture
def engines(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    machines.mend()
    monkeypatch.setattr(ray_engine, "Homes", WarmHomes)
    monkeypatch.setattr(ray_homes, "START", 120.0)  # tests share their cores with others
    found = Engines(machines.settings)
    found.kill_after()
    yield found
    found.close()


@pytest.mark.parametrize("method", method_names())
def test_a_machine_dies(
    engines: Engines, machines: Machines, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At a moment of its own for every method."""
    monkeypatch.setattr(WarmHomes, "strike", lambda homes: machines.kill())
    engines.kill_after(1 + Rng(0, (method,)).integer % 4)
    played = Bench(*contract_case(method), make_engine=engines).play(SCHEDULE)
    assert engines.lost >= 1
    assert same(Bench(*contract_case(method)).play(SCHEDULE).states(), played.states())


@pytest.mark.parametrize("method", method_names())
def test_the_contract_holds_while_processes_die(engines: Engines, method: str) -> None:
    for check in CHECKS:
        engines.kill_after(1 + Rng(0, (method, check.__name__)).integer % 3)
        check(Bench(*contract_case(method), make_engine=engines))
    assert engines.lost >= 1


@pytest.mark.parametrize("moment", range(20))
def test_twenty_moments_alone_and_in_pairs(engines: Engines, moment: int) -> None:
    first, later = (Rng(0, ("moment", moment, which)).integer for which in ("first", "later"))
    moments = [1 + first % 8, 2 + first % 8 + later % 4]  # of fifteen replies or more
    engines.kill_after(*moments[: 1 + moment % 2])
    played = Bench("fedmd", make_engine=engines).play(SCHEDULE)
    assert engines.lost >= 1
    assert same(Bench("fedmd").play(SCHEDULE).states(), played.states())


def test_a_client_that_kills_every_home_fails_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is asked to play client 1 dies; the others go on."""
    begin = Home.begin

    def deadly(home: Home, requests: Any, letters: Any, commons: Any) -> None:
        begin(home, requests, letters, commons)
        if requests[0].client == "1":
            ray.kill(home.actor)

    monkeypatch.setattr(Home, "begin", deadly)
    monkeypatch.setattr(ray_engine, "LARGEST", 1)  # a call per client
    played = Bench("local", make_engine=engines).play([ALL])
    assert list(played.cohorts[0].failures) == ["1"]
    assert "3 homes in a row were lost while it was at work" in played.cohorts[0].failures["1"]
    assert same(Bench("local").play([("0", "2", "3")]).states(), played.states())
