"""What a federation on Flower costs beside the serial engine: time, bytes and memory, with real processes.

    python benchmarks/flower.py [--rounds 5] [--parameters 9000 250000 9000000] [--out figures.json]

A server, a SuperLink and three sites on this machine, in plain text over loopback. Between the SuperNodes and the
SuperLink stands a TCP relay that counts every byte. FedAvg sends a model of the given size down and up in each
round. Prints Markdown tables; figures depend on the machine, no test reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from potluck.deploy.flower.connections import Security, free_port
from potluck.deploy.flower.processes import Process
from potluck.deploy.flower.relay import relaying
from potluck.experiment.schema import Experiment
from potluck.runs.api import run

SITES = ("north", "east", "west")
SITE = """
from sklearn.datasets import load_digits
from torch import nn

def build(input, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, classes))

def load():
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) / 16).astype("float32")
    return {{"train": (x[{place}:600:3], y[{place}:600:3]), "test": (x[600 + {place}::30], y[600 + {place}::30])}}
"""
TRAINING = {"epochs": 1, "batch_size": 50, "optimizer": {"lr": 0.05}}
KINDS = {  # how a process is called, by what its command line holds
    "flower-superlink": "SuperLink",
    "flower-superexec": "SuperExec",
    "flwr-serverapp": "ServerApp (relay)",
    "flwr-clientapp": "ClientApp (shim)",
    "flower-supernode": "SuperNode",
    "potluck.deploy.flower.worker": "worker",
    "potluck serve": "potluck serve",
    "potluck join": "potluck join",
}


# --- the instruments ------------------------------------------------------------------------------------


class Counter:
    """A TCP relay before an address that counts what passes: up is from the sites to the server."""

    def __init__(self, to: str) -> None:
        self.up = self.down = 0
        host, _, port = to.rpartition(":")
        self.to = host, int(port)
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.door.accept()
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self.to) as far:
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (far if ready is near else near).sendall(data)
                    if ready is near:
                        self.up += len(data)
                    else:
                        self.down += len(data)


class Memory:
    """The largest proportional set size of each kind of process below this one, looked at all the time."""

    def __init__(self) -> None:
        self.most: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError, StopIteration):
                    kind, size = kind_of(pid), pss(pid)
                    self.most[kind] = max(size, self.most.get(kind, 0.0))


def descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found, rest = [], [root]
    while rest:
        children = parents.get(rest.pop(), [])
        found += children
        rest += children
    return found


def kind_of(pid: int) -> str:
    line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    line = line.replace("-m potluck ", "potluck ")
    return next(name for words, name in KINDS.items() if words in line)


def pss(pid: int) -> float:
    """MiB, memory that is shared counted by its share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


# --- a federation ---------------------------------------------------------------------------------------


def settings(rounds: int) -> dict[str, Any]:
    """Rounds of one exchange each: only the last is evaluated."""
    evaluate = {"when": ["after_aggregation"], "every": rounds}
    engine = {"device": "cpu", "workers": 1, "deadline": 300, "patience": 300}
    return {
        "method": "fedavg",
        "training": TRAINING | {"rounds": rounds},
        "evaluate": evaluate,
        "engine": engine,
    }


@contextlib.contextmanager
def joined(folder: Path, width: int, server: str) -> Iterator[None]:
    """Three sites that take part."""
    with contextlib.ExitStack() as stack:
        for place, site in enumerate(SITES):
            (folder / site).mkdir()
            file = folder / site / "site.py"
            file.write_text(SITE.format(width=width, place=place))
            words = [sys.executable, "-m", "potluck", "join", "--server", server, "--client", site]
            words += [
                "--model",
                f"{file}:build",
                "--data",
                f"{file}:load",
                "--home",
                str(folder / site / "home"),
            ]
            stack.callback(Process(words, folder / f"{site}.log", os.environ).end)
        yield


def marks(log: Path, counter: Counter, process: Process) -> Iterator[tuple[int, int]]:
    """What has passed at the end of each round."""
    seen = 0
    while process.alive:
        lines = log.read_text().count("\n") if log.exists() else 0
        for _ in range(lines - seen):
            yield counter.up, counter.down
        seen = max(lines, seen)
        time.sleep(0.02)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def federation(folder: Path, width: int, rounds: int) -> dict[str, Any]:
    """Seconds of a round, bytes against the ledger, memory."""
    address = f"127.0.0.1:{free_port()}"
    counter, out = Counter(address), folder / "run"
    partition = {"sites": SITES, "classes": 10}
    experiment = Experiment.make(
        name="flower", partition=partition, models={"pool": "mlp-small"}, **settings(rounds)
    )
    (folder / "flower.yaml").write_text(experiment.to_yaml())
    words = ["serve", str(folder / "flower.yaml"), "--address", address, "--out", str(out)]
    with Memory() as memory:
        server = Process([sys.executable, "-m", "potluck", *words], folder / "serve.log", os.environ)
        try:
            while socket.socket().connect_ex(counter.to):
                time.sleep(0.2)
            with joined(folder, width, counter.address):
                passed = list(marks(out / "timing.jsonl", counter, server))
        finally:
            server.end()
    if server.popen.returncode:
        raise SystemExit(f"the server did not end well: {server.tail()} (see {folder})")
    return measured(out, passed, rounds) | {"memory": dict(sorted(memory.most.items()))}


def measured(out: Path, passed: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """The rounds from the second on that are not evaluated: one exchange of every client each."""
    seconds = [line["seconds"] for line in lines_of(out / "timing.jsonl")]
    ledger = [line for line in lines_of(out / "ledger.jsonl") if 2 <= line["round"] < rounds]
    counted = sum(line["bytes"] for line in ledger)
    wire = sum(passed[rounds - 2]) - sum(passed[0])
    return {
        "message": max(line["bytes"] for line in ledger),
        "seconds": median(seconds[1:-1]),
        "evaluated": seconds[-1],
        "ledger": counted / (rounds - 2),
        "wire": wire / (rounds - 2),
        "over": wire / counted - 1,
    }


def serial(folder: Path, width: int, rounds: int) -> float:
    """Seconds of a round of the serial engine with as many samples and the same model."""

    def build(input: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))

    partition = {"kind": "iid", "clients": 3, "test": 2 / 3}
    experiment = Experiment.make(data="digits", partition=partition, models=build, **settings(rounds))
    result = run(experiment, out=folder / "serial")
    return median(line["seconds"] for line in lines_of(result.folder / "timing.jsonl")[1:-1])


def floor(folder: Path, times: int) -> dict[str, float]:
    """Seconds of an exchange that carries nothing, and what passes in a second without any."""
    address = f"127.0.0.1:{free_port()}"
    counter = Counter(address)
    with (
        relaying(address, Security(), folder / "flower", lambda sentence: None) as courier,
        joined(folder, 16, counter.address),
    ):
        while len(courier.nodes()) < len(SITES):
            time.sleep(0.5)
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            answers = courier.exchange([(node, b"") for node in courier.nodes()], 120, [1 << 20] * len(SITES))
            assert all(isinstance(answer, bytes) for answer in answers), answers
            seconds.append(time.perf_counter() - started)
        before, started = counter.up + counter.down, time.perf_counter()
        time.sleep(20)
        idle = (counter.up + counter.down - before) / (time.perf_counter() - started)
    return {"exchange": median(seconds[1:]), "least": min(seconds), "most": max(seconds), "idle": idle}


# --- what is shown --------------------------------------------------------------------------------------


def amount(size: float) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def table(figures: dict[str, Any]) -> str:
    empty, rows = figures["floor"], figures["cases"]
    lines = [
        f"{figures['machine']}, {time.strftime('%Y-%m-%d')}. Load average at the end: {os.getloadavg()[1]:.1f}.",
        "",
        f"An exchange that carries nothing: {empty['exchange']:.1f} s ({empty['least']:.1f} to "
        f"{empty['most']:.1f}). Without any, {amount(empty['idle'])} a second pass between nodes and SuperLink.",
        "",
        "| message | seconds a round | serial engine | beyond serial and an empty exchange | evaluated round "
        "| ledger, a round | on the wire | more |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in rows:
        added = case["seconds"] - case["serial"] - empty["exchange"]
        lines.append(
            f"| {amount(case['message'])} | {case['seconds']:.1f} | {case['serial']:.3f} | {added:+.1f} "
            f"| {case['evaluated']:.1f} | {amount(case['ledger'])} | {amount(case['wire'])} | {case['over']:.2%} |"
        )
    kinds = list(dict.fromkeys(kind for case in rows for kind in case["memory"]))
    lines += ["", "| MiB at most, each | " + " | ".join(amount(case["message"]) for case in rows) + " |"]
    lines += ["| :--- |" + " ---: |" * len(rows)]
    for kind in kinds:
        sizes = (f"{case['memory'].get(kind, 0):.0f}" for case in rows)
        lines.append(f"| {kind} | " + " | ".join(sizes) + " |")
    return "\n".join(lines)


def machine() -> str:
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{next(names, platform.machine())}, {os.cpu_count()} cores, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which the first and the last do not count")
    parser.add_argument("--parameters", type=int, nargs="+", default=[9_000, 250_000, 9_000_000])
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")
    given = parser.parse_args()
    if given.rounds < 3:
        parser.error("--rounds: three at least")
    with tempfile.TemporaryDirectory(prefix="flower-") as place:
        (Path(place) / "floor").mkdir()
        figures: dict[str, Any] = {"machine": machine(), "floor": floor(Path(place) / "floor", given.rounds)}
        figures["cases"] = []
        for parameters in given.parameters:
            folder, width = Path(place) / str(parameters), max(1, (parameters - 10) // 75)
            folder.mkdir()
            case = {"serial": serial(folder, width, given.rounds)} | federation(folder, width, given.rounds)
            figures["cases"].append(case)
            print(json.dumps({"parameters": parameters, **case}), file=sys.stderr, flush=True)
    print(table(figures))
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
