"""A federation under supervision on which a schedule of kills is played.

It is set up as docs/deploy.md says: TLS, node keys, a SuperLink with a database, the gate before it, a contract
written by `join --check --write` at every site. What ends is started again with the same command, as by systemd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import links
import sites
from federations import Federation, below, command
from schedule import AT_A_SITE

from potluck.deploy.flower.connections import Security, free_port, is_open
from potluck.deploy.flower.processes import start_superlink
from potluck.deploy.resident import load_agreement
from potluck.deploy.site import Site
from potluck.errors import RunError
from potluck.files import read_json, write_checked

STOPPED = 60.0  # seconds that a stopped process stands still
RESTART = 2.0  # seconds after which a supervisor starts again what has ended
LONG = 900.0  # seconds that an event may take to be made good


class Service:
    """A process that is started again whenever it ends, until it has ended well or is closed."""

    def __init__(self, name, start, tell):
        self.name, self.start, self.tell = name, start, tell
        self.starts, self.done = 0, threading.Event()
        self.process = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self):
        while not self._closed.is_set():
            try:
                self.process = self.start()
            except RunError as error:
                self.tell(f"  {self.name} does not start: {error}")
                self._closed.wait(RESTART)
                continue
            self.starts += 1
            while self.process.alive and not self._closed.wait(0.2):
                pass
            if self.process.alive:
                return
            code = self.process.popen.returncode
            if code == 0 and self.name == "server":
                self.done.set()
                return
            self.tell(f"  {self.name} has ended with {code}; started again in {RESTART:g} s")
            self.process.end()
            self._closed.wait(RESTART)

    def close(self):
        self._closed.set()
        self._thread.join(150)
        if self.process is not None:
            self.process.end()


class Supervised(Federation):
    """A federation as the guide sets it up, whose services are started again when they end."""

    def __init__(self, folder, experiment, words=()):
        super().__init__(folder)
        self.outside, self.experiment = f"127.0.0.1:{free_port()}", experiment
        self.words = words  # of serve
        self.services, self.stopped = {}, []
        self.late = 0  # events that came after the end of their round
        self.began = time.monotonic()

    # --- setting up ---

    def prepare(self):
        """Keys, contracts, a SuperLink that knows the keys, and the gate."""
        self.tied(sites.IDS)
        self.keys, home = self.folder / "keys", self.folder / "operator"
        home.mkdir()
        security = Security(
            ca=self.keys / "ca.crt",
            certificate=self.keys / "server.crt",
            key=self.keys / "server.key",
            node_keys=True,
        )
        self.file = sites.write_experiment(self.folder / "three.yaml", self.experiment)
        self._agree()
        database = self.folder / "superlink.db"
        self.keep("superlink", lambda: start_superlink(self.address, security, home, database))
        self.wait(lambda: is_open(self.address), 60)
        for client in sites.IDS:
            key = self.keys / "clients" / f"{client}.pub"
            done = self.flwr(self.address, self.keys, "supernode", "register", str(key))
            assert done.returncode == 0, done.stdout + done.stderr
        told = ["-m", "potluck", "gate", "--listen", self.outside, "--superlink", self.address]
        told += ["--ca", str(self.keys / "ca.crt"), "--certificate", str(self.keys / "server.crt")]
        self.keep("gate", lambda: self.start("gate", *told, "--key", str(self.keys / "server.key")))

    def _site(self, client):
        file = sites.write_site(self.folder / client, client)
        return [
            "-m", "potluck", "join", "--client", client, "--model", f"{file}:build", "--data", f"{file}:load"
        ]  # fmt: skip

    def _agree(self):
        """Let every site write the contract that it proposes by default."""
        asked = {}
        for client in sites.IDS:
            told = [*self._site(client), "--check", str(self.file), "--write"]
            contract = str(self.folder / client / "contract.json")
            asked[client] = subprocess.Popen(
                [sys.executable, *told, contract], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        for client, process in asked.items():
            said, _ = process.communicate(timeout=200)
            assert process.returncode == 0, f"{client}: {said}"

    def join_one(self, client):
        """A site under supervision."""
        place = self.folder / client
        told = [*self._site(client), "--server", self.outside, "--accept", str(place / "contract.json")]
        told += ["--home", str(place / "home"), "--ca", str(self.keys / "ca.crt")]
        told += ["--node-key", str(self.keys / "clients" / client)]
        self.keep(f"join-{client}", lambda: self.start(f"join-{client}", *told))

    def serve_all(self):
        """The server under supervision."""
        told = ["-m", "potluck", "serve", str(self.file), "--address", self.address, "--out", str(self.run)]
        words = ["--node-keys", *self.safe, *self.words]
        self.keep("server", lambda: self.start("serve", *told, *words))

    def keep(self, name, start):
        self.services[name] = Service(name, start, self.tell)

    # --- events ---

    def tell(self, sentence):
        """Add a line to the schedule's log; POTLUCK_SCHEDULE_LOG names a second copy."""
        line = f"{time.strftime('%H:%M:%S')} {time.monotonic() - self.began:6.0f} s {sentence}\n"
        for place in (self.folder / "schedule.txt", os.environ.get("POTLUCK_SCHEDULE_LOG")):
            if place:
                with Path(place).open("a") as file:
                    file.write(line)

    @property
    def finished(self):
        return "server" in self.services and self.services["server"].done.is_set()

    def play(self, event):
        """Wait for the moment of an event, let it happen, and wait until the round is on record."""
        trap = self.arrive(event)
        before = time.monotonic()
        late = self.finished or self.rounds() >= event.round
        self.late += late
        self.tell(str(event) + (" (too late: its round has ended already)" if late else ""))
        self.strike(event.first)
        if event.second is not None:
            time.sleep(event.gap)
            self.strike(event.second)
        self._stand_still(event)
        time.sleep(event.release)
        trap.unlink(missing_ok=True)
        self.wait(lambda: self.finished or self.rounds() >= event.round, LONG)
        self.tell(f"  round {self.rounds()} is on record {time.monotonic() - before:.0f} s later")

    def _stand_still(self, event):
        """While a process stands still no further round begins, as the next event would come too late."""
        hold = self.folder / event.held / "hold"
        if event.first.stop:
            hold.touch()
        for timer in self.stopped:
            timer.join()
        if event.first.stop:
            hold.unlink()

    def arrive(self, event):
        """Wait for the phase of an event; the file that holds a client in it."""
        place = self.folder / event.held
        trap = place / ("hold-evaluation" if event.phase == "evaluation" else "hold")
        self.wait(lambda: self.finished or self.rounds() >= event.round - 1, LONG)
        if event.phase in ("training", "evaluation"):
            (place / "held").unlink(missing_ok=True)
            trap.touch()
            self.wait(lambda: (place / "held").exists() or self.rounds() >= event.round, LONG)
        elif event.phase == "joining":
            self.wait(lambda: "waiting at" in self.logged("serve"), 120)
        return trap

    def logged(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def pids(self, blow):
        """The processes that a blow is for."""
        service = self.services[f"join-{blow.client}" if blow.client else blow.target]
        if service.process is None or not service.process.alive:
            return []
        with contextlib.suppress(StopIteration):
            if blow.target in ("supernode", "worker"):
                word = AT_A_SITE[blow.target]
                inside = below(service.process.popen.pid)
                return [pid for pid, args in inside if word in args and "guard.py" not in args]
            return [command(service.process)]
        return []

    def strike(self, blow):
        """Send the signal; where the process is just being started again, as soon as it is there."""
        if self.finished:
            self.tell("  the run has finished already")
            return
        struck = []
        self.wait(lambda: struck.extend(self.pids(blow)) or bool(struck) or self.finished, 120)
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if blow.stop else signal.SIGKILL)
        if blow.stop:
            self.stopped.append(threading.Timer(STOPPED, self._go_on, [struck]))
            self.stopped[-1].start()

    def _go_on(self, pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # --- the end ---

    def end(self):
        """Wait for the end of the run and say what was repeated on the way."""
        self.wait(lambda: self.finished, LONG)
        said = self.logged("serve")
        starts = {name: service.starts for name, service in self.services.items()}
        again = {
            "rounds and evaluations tried again": said.count("trying again in"),
            "connections to Flower sought again": said.count("connected to Flower again"),
            "processes of sites started again": sum(
                self.logged(f"join-{client}").count("is started again") for client in sites.IDS
            ),
        }
        self.tell(
            f"  finished after round {self.rounds()}; starts {starts}; {again}; {self.late} events came late"
        )

    def close(self):
        for timer in self.stopped:
            timer.cancel()
            self._go_on(timer.args[0])
        for name in ("server", *(f"join-{client}" for client in sites.IDS), "gate", "superlink"):
            if name in self.services:
                self.services[name].close()
        super().close()

    def reference(self):
        """The folder of an undisturbed run in this process: same secrets, same run, same contracts."""
        place = self.folder / "undisturbed"
        (place / "run").mkdir(parents=True)
        write_checked(place / "run" / "federation.json", {"run": self.name_of_run(), "starts": 0})
        link = links.Link(place)
        for number, client in enumerate(sites.IDS):
            (place / client).mkdir()
            shutil.copy(self.folder / client / "home" / "secret", place / client / "secret")
            agreed = load_agreement(self.folder / client / "contract.json")
            link.sites[number] = Site(
                client, sites.builder(client), sites.loader(client), place / client, agreement=agreed
            )
        links.serve(link, place / "run", self.experiment)
        return place

    def name_of_run(self):
        return read_json(self.run / "federation.json")["run"]


def newest_state(home: Path, run: str) -> str:
    """The checksum of the newest state that a site has kept."""
    (folder,) = [path for path in home.rglob("*") if path.is_dir() and path.name == run]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    return files[-1].partition("-")[2]


def server_state(run: Path) -> bytes:
    """The server's state in the newest checkpoint."""
    manifest = read_json(run / "checkpoints" / "checkpoint.json")
    return (run / "checkpoints" / manifest["server"]).read_bytes()
