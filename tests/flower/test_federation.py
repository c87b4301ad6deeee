"""A federation of real processes on Flower: SuperLink, SuperNodes, workers; the numbers are the simulation's."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import sites

from potluck.engine.flower.processes import Process, free_port
from potluck.runs import run

flwr = pytest.importorskip("flwr")


class Federation:
    """Sites that take part, and a server that can be started, killed and started again."""

    def __init__(self, folder):
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self.run = folder / "run"
        self.processes = []

    def start(self, name, *words):
        process = Process([sys.executable, "-m", "potluck", *words], self.folder / f"{name}.log", os.environ)
        self.processes.append(process)
        return process

    def join(self, client):
        file = sites.write_site(self.folder / client, client)
        words = ["join", "--server", self.address, "--client", client, "--simulated"]
        words += ["--model", f"{file}:build", "--data", f"{file}:load", "--home", str(file.parent / "home")]
        return self.start(f"join-{client}", *words)

    def serve(self, experiment):
        file = sites.write_experiment(self.folder / "three.yaml", experiment)
        return self.start("serve", "serve", str(file), "--address", self.address, "--out", str(self.run))

    def finish(self, process, seconds=400):
        assert process.popen.wait(seconds) == 0, process.log.read_text()

    def wait(self, happened, seconds=200):
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)

    def logs(self):
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def rounds(self):
        """How many rounds are on record."""
        log = self.run / "timing.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def children(self, client, name):
        """The processes of a client's join whose command line holds a word."""
        join = next(one for one in self.processes if one.log.name == f"join-{client}.log")
        return found(name, "--ppid", str(join.popen.pid))

    def close(self):
        for process in reversed(self.processes):
            process.end()
        port = self.address.partition(":")[2]
        for superlink in found(f"flower-superlink --host 127.0.0.1 --port {port}", "-e"):
            os.killpg(superlink, signal.SIGKILL)  # one that outlived a killed server


def found(words, *which):
    """The processes among some whose command line holds these words."""
    listed = subprocess.run(
        ["ps", "-ww", *which, "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if words in line]


@pytest.fixture
def federation(tmp_path):
    with contextlib.closing(Federation(tmp_path)) as found:
        yield found


def engine(**changes):
    return {"engine": {"device": "cpu", "workers": 1, "deadline": 120, "patience": 200} | changes}


def compare(federation, method, **others):
    for client in sites.IDS:
        federation.join(client)
    federation.finish(federation.serve(sites.federated(method, **engine(), **others)))
    run(sites.simulated(method, **others), out=federation.folder / "serial")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert sites.log(federation.run, name) == sites.log(federation.folder / "serial", name)


@pytest.mark.slow
def test_fedmrl_on_three_nodes_gives_the_numbers_of_the_simulation(federation):
    compare(federation, {"name": "fedmrl", "d1": 8}, evaluate={"when": ["after_aggregation"], "every": 2})


@pytest.mark.faults
@pytest.mark.parametrize("method", ["fedproto", {"name": "fedin", "project": "fixed"}, "fedre"])
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
    for process in federation.children("2", "flower-supernode"):
        os.kill(process, signal.SIGKILL)
    (folder / "2" / "hold").unlink()

    federation.wait(lambda: federation.rounds() == 3)
    (folder / "0" / "hold").touch()
    federation.wait((folder / "0" / "held").exists)
    os.kill(server.popen.pid, signal.SIGKILL)
    server.popen.wait()
    (folder / "0" / "hold").unlink()
    federation.finish(federation.serve(sites.federated(method, rounds, **engine(deadline=60))))

    told = (folder / "serve.log").read_text()
    assert "round 2 goes on without client 1: client 1: " in told
    assert "round 3 goes on without client 2: client 2: " in told
    assert "round 4 goes on without" not in told
    expected = sites.serial(method, folder / "serial", away={("1", 2), ("2", 3)}, rounds=rounds)
    assert sites.log(federation.run) == expected
