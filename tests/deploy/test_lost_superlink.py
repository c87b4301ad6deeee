"""Flower's own processes are killed: the run goes on, and ends with the bytes of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import sites
from federations import Federation, command, engine, found

from potluck.deploy.flower.connections import Security, free_port, is_open
from potluck.deploy.flower.processes import start_superlink

pytest.importorskip("flwr")
pytestmark = pytest.mark.faults

METHOD, ROUNDS = {"name": "fedmrl", "d1": 8}, 3


@pytest.fixture
def federation(tmp_path):
    with contextlib.closing(Federation(tmp_path)) as begun:
        yield begun


def superlinks(federation):
    """The processes of the SuperLink at the federation's address."""
    port = federation.address.partition(":")[2]
    return [one for one in found(f"--port {port}", "-e") if one in found("flower-superlink", "-e")]


def kill(processes):
    assert processes
    for process in processes:
        os.kill(process, signal.SIGKILL)


def relays(federation):
    port = federation.address.partition(":")[2]
    return [one for one in found("flwr-serverapp", "-e") if one in found(f":{port}", "-e")]


def undisturbed(federation):
    """That nobody was missing, and that the numbers are the simulation's."""
    assert "goes on without" not in federation.log("serve")
    assert sites.log(federation.run) == sites.serial(METHOD, federation.folder / "serial", rounds=ROUNDS)


def test_a_killed_superlink_is_started_again_and_a_killed_relay_too(federation):
    folder = federation.folder
    for client in sites.IDS:
        federation.join(client)
    server = federation.serve(sites.federated(METHOD, ROUNDS, **engine(deadline=120)))

    federation.wait(lambda: federation.rounds() == 1)
    (folder / "1" / "hold").touch()
    federation.wait((folder / "1" / "held").exists)
    kill(superlinks(federation))  # in a round
    (folder / "1" / "hold").unlink()
    federation.wait(lambda: federation.log("serve").count("connected to Flower again") == 1)

    federation.wait(lambda: federation.rounds() == 2)
    kill(superlinks(federation))  # about the end of a round
    federation.wait(lambda: federation.log("serve").count("connected to Flower again") == 2)
    (folder / "2" / "hold").touch()
    kill(relays(federation))
    (folder / "2" / "hold").unlink()
    federation.finish(server)
    undisturbed(federation)
    assert not superlinks(federation)


def test_an_operators_superlink_may_be_away_behind_the_gate(federation, tmp_path):
    folder, outside = federation.folder, f"127.0.0.1:{free_port()}"
    tied = federation.tied(sites.IDS)
    keys, home = folder / "keys", folder / "operator"
    home.mkdir()
    security = Security(
        ca=keys / "ca.crt", certificate=keys / "server.crt", key=keys / "server.key", node_keys=True
    )

    def superlink():
        return start_superlink(federation.address, security, home, folder / "superlink.db")

    first = superlink()
    federation.processes.append(first)
    for client in sites.IDS:
        done = federation.flwr(
            federation.address, keys, "supernode", "register", str(keys / "clients" / f"{client}.pub")
        )
        assert done.returncode == 0, done.stdout + done.stderr
    words = ["-m", "potluck", "gate", "--listen", outside, "--superlink", federation.address]
    words += ["--ca", str(keys / "ca.crt"), "--certificate", str(keys / "server.crt")]
    gate = federation.start("gate", *words, "--key", str(keys / "server.key"))
    federation.wait(lambda: is_open(outside), 30)
    for client in sites.IDS:
        federation.join(client, *tied[client], server=outside)
    server = federation.serve(sites.federated(METHOD, ROUNDS, **engine(deadline=120)))

    federation.wait(lambda: federation.rounds() == 1)
    (folder / "0" / "hold").touch()
    federation.wait((folder / "0" / "held").exists)
    kill(superlinks(federation))
    first.popen.wait()
    (folder / "0" / "hold").unlink()
    time.sleep(20)  # as a supervisor would take its time
    federation.processes.append(superlink())
    federation.wait(lambda: "connected to Flower again" in federation.log("serve"))

    federation.wait(lambda: federation.rounds() == 2)
    kill(found(f"potluck gate --listen {outside}", "-e"))
    gate.popen.wait()
    time.sleep(5)
    federation.start("gate", *words, "--key", str(keys / "server.key"))
    federation.finish(server)
    undisturbed(federation)
    assert "is away" in federation.log("gate")
    assert "answers again" in federation.log("gate")


def test_a_server_killed_with_all_that_it_started_leaves_nothing_in_the_way(federation):
    tied = federation.tied(sites.IDS)
    for client in sites.IDS:
        federation.join(client, *tied[client])
    server = federation.serve(sites.federated(METHOD, ROUNDS, **engine(deadline=120)))
    federation.wait(lambda: federation.rounds() == 1)
    os.kill(command(server), signal.SIGKILL)
    server.popen.wait()
    federation.wait(lambda: not is_open(federation.address), 30)
    federation.finish(federation.serve(sites.federated(METHOD, ROUNDS, **engine(deadline=120))))
    undisturbed(federation)


def test_the_relay_ends_with_a_killed_server(federation):
    for client in sites.IDS:
        federation.join(client)
    server = federation.serve(sites.federated(METHOD, ROUNDS, **engine()))
    federation.wait(lambda: federation.rounds() == 1)
    assert relays(federation)
    os.kill(command(server), signal.SIGKILL)
    federation.wait(lambda: not relays(federation), 60)
