"""Every method on a Ray cluster while its machines and processes die: no bit changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import potluck
from contract_cases import contract_case
from potluck import Client, client_step
from potluck.core.card import ClientId
from potluck.core.rng import Rng
from potluck.engine.settings import EngineSettings
from potluck.federation.builder import ClientBuilder
from potluck.methods.local import Local
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
from potluck.engine.ray import cluster as clusters  # noqa: E402
from potluck.engine.ray.engine import RayEngine  # noqa: E402
from potluck.engine.ray.handles import Home  # noqa: E402
from potluck.engine.ray.jobs import _Players  # noqa: E402

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
    """A head without work and two machines, all on this one, with room for several engines."""

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

    def mend(self, count: int = 2) -> None:
        """Have two machines again; it takes the head a while to notice that one is gone."""
        while len(self.nodes) > count:
            self.imitated.remove_node(self.nodes.pop())
        while len(self.nodes) < count:
            self.nodes.append(self._add())
        while sum("CPU" in node["Resources"] for node in ray.nodes() if node["Alive"]) > count:
            time.sleep(0.2)

    def close(self) -> None:
        WarmHomes.pool.clear()
        ray.shutdown()
        self.imitated.shutdown()

    def _add(self) -> Any:
        return self.imitated.add_node(num_cpus=8)


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
    found = Engines(machines.settings, open=2)  # a check may play two runs side by side
    found.kill_after()
    yield found
    found.close()


def let_states_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes send no state before somebody needs it: what a lost home had must be made again."""
    monkeypatch.setattr(RayEngine, "_behind", lambda engine, errand: -1e9)


@pytest.mark.parametrize("method", method_names())
def test_a_machine_dies(
    engines: Engines, machines: Machines, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """At a moment of its own for every method; half of them leave their states at the machines."""
    if Rng(0, (method, "owes")).integer % 2:
        let_states_wait(monkeypatch)
    monkeypatch.setattr(WarmHomes, "strike", lambda homes: machines.kill())
    engines.kill_after(1 + Rng(0, (method,)).integer % 4)
    played = Bench(*contract_case(method), make_engine=engines).play(SCHEDULE)
    assert engines.lost >= 1
    assert same(Bench(*contract_case(method)).play(SCHEDULE).states(), played.states())


@pytest.mark.parametrize("method", method_names())
def test_the_contract_holds_while_machines_and_processes_die(
    engines: Engines, machines: Machines, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A machine dies in one of the checks, a process in each of the others; half of the methods owe states."""
    if not Rng(0, (method, "owes")).integer % 2:
        let_states_wait(monkeypatch)
    struck = CHECKS[Rng(0, (method, "machine")).integer % len(CHECKS)]
    for check in CHECKS:
        engines.kill_after(1 + Rng(0, (method, check.__name__)).integer % 3)
        with monkeypatch.context() as patch:
            if check is struck:
                patch.setattr(WarmHomes, "strike", lambda homes: machines.kill())
            check(Bench(*contract_case(method), make_engine=engines))
        if check is struck:
            engines.close()
            machines.mend()
    assert engines.lost >= 2


def test_two_machines_die_at_once(
    engines: Engines, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the homes; a third has room. Until the head knows, it gives new homes to the dead ones."""
    monkeypatch.setattr(WarmHomes, "strike", lambda homes: [machines.kill(), machines.kill()])
    engines.kill_after(2)
    with_homes = [*machines.nodes]
    machines.mend(3)
    machines.nodes.insert(0, machines.nodes.pop())  # the new one is killed last
    assert machines.nodes[1:] == with_homes
    played = Bench("fedproto", make_engine=engines).play(SCHEDULE)
    assert engines.lost >= 1  # the other may have died at rest
    assert same(Bench("fedproto").play(SCHEDULE).states(), played.states())


def test_a_run_begins_just_after_a_machine_died(engines: Engines, machines: Machines) -> None:
    """The head does not know yet, and gives homes to that machine."""
    machines.kill()
    played = Bench("fedproto", make_engine=engines).play(SCHEDULE)
    assert any(sentence.startswith("a home could not be started: ") for sentence in engines.heard)
    assert same(Bench("fedproto").play(SCHEDULE).states(), played.states())


def test_a_comparison_goes_on_when_a_machine_dies(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine plays on with the run of the other; the folder is the same as if all were played here."""
    machines.mend()
    WarmHomes.pool.clear()
    begin, begun = _Players._begin, list[str]()

    def deadly(players: _Players, place: Any, job: Any) -> None:
        begin(players, place, job)
        begun.append(job.label)
        if len(begun) == 2:
            machines.kill()

    monkeypatch.setattr(_Players, "_begin", deadly)
    values: dict[str, Any] = {
        "data": "digits",
        "partition": {"kind": "iid", "clients": 3},
        "models": ["mlp-small"],
        "training": {"rounds": 2, "batch_size": 64},
        "methods": ["fedproto", "fedgh"],
        "progress": False,
    }
    there = potluck.compare(**values, engine=machines.settings.model_dump(), out=tmp_path / "there")
    here = potluck.compare(**values, engine={"device": "cpu"}, out=tmp_path / "here")
    assert len(begun) > 3  # local, fedproto and fedgh, and one of them twice
    logs = sorted(path.relative_to(here.folder) for path in here.folder.glob("*/*.jsonl"))
    assert {path.name for path in logs} >= {"metrics.jsonl", "ledger.jsonl"}
    for path in (path for path in logs if path.name in ("metrics.jsonl", "ledger.jsonl")):
        assert (there.folder / path).read_bytes() == (here.folder / path).read_bytes()


def hasty(engines: Engines, deadline: float) -> Callable[[ClientBuilder], RayEngine]:
    """Engines with a short deadline for answers; their homes may take longer to open."""

    def make(clients: ClientBuilder) -> RayEngine:
        engine = engines(clients)
        engine.homes.settings = engines.settings.model_copy(update={"deadline": deadline})
        return engine

    return make


def test_a_home_that_hangs_is_given_up(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(homes: WarmHomes) -> None:
        os.kill(homes.alive[-1].process, signal.SIGSTOP)

    monkeypatch.setattr(WarmHomes, "strike", freeze)
    engines.kill_after(2)
    played = Bench("fedproto", make_engine=hasty(engines, 5.0)).play(SCHEDULE)
    assert any("no answer and no work within engine.deadline, 5 s" in sentence for sentence in engines.heard)
    assert same(Bench("fedproto").play(SCHEDULE).states(), played.states())


def test_a_home_that_works_is_not_given_up(engines: Engines) -> None:
    """Each client works for longer than the deadline."""

    class Laborious(Local):
        name = "laborious"

        @client_step
        def train(self, client: Client) -> None:
            end = time.process_time() + 4
            while time.process_time() < end:
                torch.ones(1000).sum()
            super().train(client)

    played = Bench(Laborious, make_engine=hasty(engines, 1.0)).play([("0", "1")])
    assert not engines.lost
    assert same(Bench("local").play([("0", "1")]).states(), played.states())


@pytest.mark.parametrize("owes", [False, True], ids=["sent", "owed"])
@pytest.mark.parametrize("moment", range(20))
def test_twenty_moments_alone_and_in_pairs(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, moment: int, owes: bool
) -> None:
    """Whether states are sent with every reply or stay where they are."""
    if owes:
        let_states_wait(monkeypatch)
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
