"""What the library itself costs: overhead of a round, splitting, memory over rounds, many clients.

    python benchmarks/spine.py overhead --data DIR     CIFAR-10, 20 clients, FedMRL, 10 rounds
    python benchmarks/spine.py split                   60,000 samples among 1,000 clients
    python benchmarks/spine.py memory                  resident memory at round 200 against round 20
    python benchmarks/spine.py scale                   10,000 clients against 100, the same cohort

Each prints one line of JSON. Figures depend on the machine; no test reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from potluck import from_arrays
from potluck.core.rng import Rng
from potluck.data import PartitionConfig, make_split
from potluck.experiment.schema import Experiment
from potluck.runs.api import run
from potluck.runs.observers import Observer, RoundEnd
from potluck.training.fit import Workspace


def resident() -> float:
    """MiB of memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Clock(Observer):
    """Seconds and memory after every round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.memory: list[float] = []

    def round(self, end: RoundEnd) -> None:
        self.seconds.append(end.seconds)
        self.memory.append(resident())


class Inside:
    """Seconds spent in forward, backward and optimiser: the work any training loop must do."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Any) -> Any:
        def timed(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed

    def install(self) -> None:
        from potluck.methods import FedMRL

        FedMRL.loss = self.wrap("forward", FedMRL.loss)  # type: ignore[method-assign]
        torch.autograd.grad = self.wrap("backward", torch.autograd.grad)
        Workspace.apply = self.wrap("optimiser", Workspace.apply)  # type: ignore[method-assign]


def overhead(data: str) -> dict[str, Any]:
    experiment = Experiment.make(
        name="overhead",
        data={"name": "cifar10", "dir": data},
        partition={"kind": "dirichlet", "alpha": 0.1, "clients": 20},
        models=["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"],
        method={"name": "fedmrl", "small": "cnn5", "d1": 100},
        training={"rounds": 10, "batch_size": 50, "optimizer": {"lr": 0.01, "momentum": 0.9}},
        evaluate={"when": []},
        engine={"workers": 1},  # the clocks below run in this process
    )
    inside, clock = Inside(), Clock()
    inside.install()
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, out=Path(folder) / "run", watcher=clock)
    total, work = sum(clock.seconds), sum(inside.seconds.values())
    return {
        "seconds_per_round": round(total / len(clock.seconds), 3),
        "share_outside": round(1 - work / total, 4),
        **{name: round(value / total, 4) for name, value in inside.seconds.items()},
    }


def split() -> dict[str, Any]:
    labels = Rng(0).numpy().integers(0, 10, 60_000)
    dataset = from_arrays(np.zeros((60_000, 1, 8, 8), np.uint8), labels, classes=10)
    config = PartitionConfig(kind="dirichlet", alpha=0.5, clients=1000, min_size=1)
    start = time.perf_counter()
    made = make_split(dataset, config, Rng(0))
    return {"seconds": round(time.perf_counter() - start, 3), "clients": len(made)}


def synthetic(clients: int, rounds: int, cohort: int, samples: int) -> Clock:
    draw = Rng(0).numpy()
    x = draw.normal(size=(clients * samples, 1, 8, 8)).astype(np.float32)
    y = draw.integers(0, 10, clients * samples)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run(
            name="synthetic",
            data=from_arrays(x, y, classes=10),
            partition={"kind": "iid", "clients": clients},
            models=["mlp-small", "conv-small"],
            method={"name": "fedmrl", "d1": 32},
            training={"rounds": rounds, "participation": cohort / clients, "batch_size": 8},
            evaluate={"who": "sampled"},
            out=Path(folder) / "run",
            watcher=clock,
        )
    return clock


def memory() -> dict[str, Any]:
    clock = synthetic(clients=20, rounds=200, cohort=20, samples=40)
    at_20, at_200 = clock.memory[19], clock.memory[199]
    return {"MiB_at_20": round(at_20), "MiB_at_200": round(at_200), "ratio": round(at_200 / at_20, 4)}


def many(clients: int) -> dict[str, Any]:
    clock = synthetic(clients=clients, rounds=30, cohort=20, samples=10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"ms_per_round": round(1000 * float(np.median(clock.seconds[3:])), 1), "peak_MiB": round(peak)}


def scale() -> dict[str, Any]:
    """Each size in a process of its own, so that peaks do not mix."""
    found = {}
    for clients in (100, 10_000):
        command = [sys.executable, os.fspath(Path(__file__)), "many", "--clients", str(clients)]
        found[str(clients)] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    ratio = found["10000"]["ms_per_round"] / found["100"]["ms_per_round"]
    return found | {"ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["overhead", "split", "memory", "scale", "many"])
    parser.add_argument("--data", default=os.environ.get("POTLUCK_DATA", "data"))
    parser.add_argument("--clients", type=int, default=100)
    options = parser.parse_args()
    results = {
        "overhead": lambda: overhead(options.data),
        "split": split,
        "memory": memory,
        "scale": scale,
        "many": lambda: many(options.clients),
    }[options.what]()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
