"""A federation of real processes for tests: sites, a server, a SuperLink; all ended by their process ids."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import sites

from potluck.deploy.flower.connections import Security, free_port
from potluck.deploy.flower.processes import Process, environment, program, start_superlink

pytest.importorskip("cryptography")  # comes with Flower
from potluck.deploy.trial_keys import make_keys


class Federation:
    """Sites that take part, and a server that can be started, killed and started again."""

    def __init__(self, folder):
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self.run = folder / "run"
        self.processes = []
        self.safe = ()  # what `serve` is told of certificates

    def start(self, name, *words):
        process = Process([sys.executable, *words], self.folder / f"{name}.log", os.environ)
        self.processes.append(process)
        return process

    def join(self, client, *words, name=None, server=None, tampered=""):
        """A site; `name` tells those apart that say they are the same client, `tampered` is code of its own."""
        file = sites.write_site(self.folder / (name or client), client, tampered)
        told = [
            "-m",
            "potluck",
            "join",
            "--server",
            server or self.address,
            "--client",
            client,
            "--simulated",
        ]
        told += ["--model", f"{file}:build", "--data", f"{file}:load", "--home", str(file.parent / "home")]
        return self.start(f"join-{name or client}", *told, *words)

    def serve(self, experiment, *words, program=("-m", "potluck")):
        file = sites.write_experiment(self.folder / "three.yaml", experiment)
        told = ["serve", str(file), "--address", self.address, "--out", str(self.run)]
        return self.start("serve", *program, *told, *self.safe, *words)

    def secure(self, clients, servers=("127.0.0.1",)):
        """A SuperLink with TLS and node keys, where the keys of some clients are registered."""
        make_keys(self.folder / "keys", servers, clients)
        keys, home = self.folder / "keys", self.folder / "operator"
        security = Security(
            ca=keys / "ca.crt", certificate=keys / "server.crt", key=keys / "server.key", node_keys=True
        )
        home.mkdir()
        self.processes.append(start_superlink(self.address, security, home))
        for client in clients:
            key = keys / "clients" / f"{client}.pub"
            done = self.flwr(self.address, keys, "supernode", "register", str(key))
            assert done.returncode == 0, done.stdout + done.stderr
        self.safe = ("--ca", str(keys / "ca.crt"), "--certificate", str(keys / "server.crt"))
        self.safe += ("--key", str(keys / "server.key"), "--node-keys")
        return keys

    def tied(self, clients):
        """Have `serve` start a SuperLink with TLS that knows the clients' keys; what each of them joins with."""
        keys = self.folder / "keys"
        make_keys(keys, ["127.0.0.1"], clients)
        self.safe = ("--ca", str(keys / "ca.crt"), "--certificate", str(keys / "server.crt"))
        self.safe += ("--key", str(keys / "server.key"), "--client-keys", str(keys / "clients"))
        known = {client: str(keys / "clients" / client) for client in clients}
        return {client: ("--ca", str(keys / "ca.crt"), "--node-key", key) for client, key in known.items()}

    def flwr(self, address, keys, *words):
        """One of Flower's commands to the SuperLink at an address."""
        home, trust = self.folder / "operator", f'root-certificates = "{keys / "ca.crt"}"'
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\n{trust}\n')
        told = [program("flwr"), *words, "here"]
        return subprocess.run(told, env=environment(home), capture_output=True, text=True, check=False)

    def finish(self, process, seconds=400):
        assert process.popen.wait(seconds) == 0, self.logs()

    def wait(self, happened, seconds=200):
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)

    def log(self, name):
        """What a process has said."""
        return (self.folder / f"{name}.log").read_text()

    def logs(self):
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def rounds(self):
        """How many rounds are on record."""
        log = self.run / "timing.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def children(self, client, name):
        """The processes of a client's join whose command line holds a word, without their guards."""
        join = next(one for one in reversed(self.processes) if one.log.name == f"join-{client}.log")
        return [pid for pid, args in below(join.popen.pid) if name in args and "guard.py" not in args]

    def close(self):
        for process in reversed(self.processes):
            process.end()
        port = self.address.partition(":")[2]
        for superlink in found(f"flower-superlink --host 127.0.0.1 --port {port}", "-e"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(superlink, signal.SIGKILL)  # one that outlived a killed server


def below(pid):
    """The processes that a process has started, and these in turn, with their command lines."""
    listed = subprocess.run(
        ["ps", "-ww", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child, ppid, *args in lines:
            if int(ppid) == parent:
                waiting.append(int(child))
                yield int(child), " ".join(args)


def command(process):
    """The number of the process that a guard has started."""
    return next(pid for pid, _ in below(process.popen.pid))


def found(words, *which):
    """The processes among some whose command line holds these words."""
    listed = subprocess.run(
        ["ps", "-ww", *which, "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if words in line]


def engine(**changes):
    return {"engine": {"device": "cpu", "workers": 1, "deadline": 120, "patience": 200} | changes}
