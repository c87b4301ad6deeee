"""A federation of real processes on Flower: SuperLink, SuperNodes, workers; the numbers are the simulation's."""

import contextlib
import os
import signal

import pytest
import sites
from federations import Federation, below, command, engine

from potluck.deploy.flower.processes import _started
from potluck.runs.api import run

flwr = pytest.importorskip("flwr")


@pytest.fixture
def federation(tmp_path):
    with contextlib.closing(Federation(tmp_path)) as found:
        yield found


def compare(federation, method, ids=sites.IDS, **others):
    for client in ids:
        load = f"def load():\n    return sites.part({client!r}, {ids!r})\n"
        federation.join(client, tampered=load)
    federation.finish(federation.serve(sites.federated(method, ids=ids, **engine(), **others)))
    run(sites.simulated(method, ids=ids, **others), out=federation.folder / "serial")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert sites.log(federation.run, name) == sites.log(federation.folder / "serial", name)


@pytest.mark.slow
def test_fedmrl_on_two_nodes_gives_the_numbers_of_the_simulation(federation):
    method, evaluate = {"name": "fedmrl", "d1": 8}, {"when": ["after_aggregation"], "every": 2}
    compare(federation, method, sites.IDS[:2], evaluate=evaluate)


@pytest.mark.faults
@pytest.mark.parametrize("method", ["fedproto", {"name": "fedin", "noise": 0.8, "project": "fixed"}, "fedre"])
def test_other_methods_give_the_numbers_of_the_simulation(federation, method):
    compare(federation, method)


@pytest.mark.faults
def test_a_run_survives_a_killed_worker_a_killed_node_and_a_killed_server(federation):
    method, rounds = {"name": "fedmrl", "d1": 8}, 4
    folder = federation.folder
    for client in sites.IDS:
        federation.join(client)
    server = federation.serve(sites.federated(method, rounds, **engine(deadline=60)))

    federation.wait(lambda: federation.rounds() == 1)
    (folder / "1" / "die").touch()  # its worker kills itself with -9 in the next training step

    federation.wait(lambda: federation.rounds() == 2)
    (folder / "2" / "hold").touch()
    federation.wait((folder / "2" / "held").exists)
    for process in federation.children("2", "deploy.flower.node"):
        os.kill(process, signal.SIGKILL)
    (folder / "2" / "hold").unlink()

    federation.wait(lambda: federation.rounds() == 3)
    (folder / "0" / "hold").touch()
    federation.wait((folder / "0" / "held").exists)
    os.kill(command(server), signal.SIGKILL)
    server.popen.wait()
    (folder / "0" / "hold").unlink()
    federation.finish(federation.serve(sites.federated(method, rounds, **engine(deadline=60))))

    told = federation.log("serve")
    assert "round 2 goes on without client 1: " in told
    assert "round 3 goes on without client 2: " in told
    assert "round 4 goes on without" not in told
    expected = sites.serial(method, folder / "serial", away={("1", 2), ("2", 3)}, rounds=rounds)
    assert sites.log(federation.run) == expected


@pytest.mark.faults
def test_a_killed_join_leaves_nobody_behind_and_its_successor_is_taken_in(federation):
    method, rounds = {"name": "fedmrl", "d1": 8}, 4
    known = federation.tied(sites.IDS)
    joins = {client: federation.join(client, *known[client]) for client in sites.IDS}
    server = federation.serve(sites.federated(method, rounds, **engine(deadline=90)))
    federation.wait(lambda: federation.rounds() == 1)
    (federation.folder / "1" / "hold").touch()
    federation.wait((federation.folder / "1" / "held").exists)
    left = [pid for pid, _ in below(command(joins["1"]))]
    os.kill(command(joins["1"]), signal.SIGKILL)
    (federation.folder / "1" / "hold").unlink()
    federation.join("1", *known["1"])
    federation.wait(lambda: not any(map(_started, left)), 30)
    federation.finish(server)
    expected = sites.serial(method, federation.folder / "serial", rounds=rounds)
    assert {line["client"] for line in sites.log(federation.run) if line["round"] == rounds} == {*sites.IDS}
    assert len(sites.log(federation.run)) == len(expected)
