"""A million clients against a hundred: start-up, a round and memory of whole calls of `potluck.run`.

    python benchmarks/many_clients.py                        100 and 1,000,000 clients of ten 8×8 samples
    python benchmarks/many_clients.py --clients 100 20000    other numbers; the first is compared with

Each number of clients has a process of its own. A round is the median over those after the first two, with
evaluation of its cohort of 100 (`evaluate: {who: sampled}`) and a checkpoint. Start-up is what comes before the
first round: the data set, the split, the files of a new run, advice. Memory is the most that was resident, the
samples included. Beside seconds stand seconds of CPU time, which other work on the machine changes less, and the
bytes that a round adds to the logs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import potluck
from potluck.core.rng import Rng

SAMPLES = 10  # a client has
WARM_UP = 2  # rounds that are not counted
LOGS = ("metrics.jsonl", "ledger.jsonl", "timing.jsonl")


@dataclass
class Measured:
    """What one run took."""

    clients: int
    start: float = 0.0  # seconds before the first round
    start_cpu: float = 0.0
    rounds: list[float] = field(default_factory=list)  # seconds of each round, files included
    rounds_cpu: list[float] = field(default_factory=list)
    memory: float = 0.0  # GiB
    log: float = 0.0  # bytes that a round adds to the logs

    @property
    def round(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.rounds[WARM_UP:])

    @property
    def round_cpu(self) -> float:
        """Seconds of CPU time of a round."""
        return statistics.median(self.rounds_cpu[WARM_UP:])


class Clock(potluck.Observer):
    """Notes the time after every round."""

    def __init__(self, found: Measured, folder: Path) -> None:
        self.found, self.folder = found, folder
        self.at, self.cpu = time.perf_counter(), time.process_time()
        self.last = 0

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        """The data set, the split and the files of a new run are there; advice follows."""
        self.found.start, self.found.start_cpu = self._lap()

    def _lap(self) -> tuple[float, float]:
        at, cpu = time.perf_counter(), time.process_time()
        lap = at - self.at, cpu - self.cpu
        self.at, self.cpu = at, cpu
        return lap

    def advise(self, sentence: str) -> None:
        """Say nothing."""

    def round(self, end: potluck.RoundEnd) -> None:
        """Note a round; what came before the first, advice too, is start-up."""
        seconds, cpu = self._lap()
        if end.round == 1:
            self.found.start += seconds - end.seconds
        self.found.rounds.append(seconds)
        self.found.rounds_cpu.append(cpu)
        size = sum((self.folder / name).stat().st_size for name in LOGS)
        self.found.log, self.last = size - self.last, size


def measure(clients: int, rounds: int, method: str, cohort: int, device: str) -> Measured:
    """Play a run and say what it took."""
    torch.set_num_threads(1)
    draws, found = Rng(0).child("many").numpy(), Measured(clients)
    x = draws.integers(0, 256, (SAMPLES * clients, 1, 8, 8), dtype=np.uint8)
    y = draws.integers(0, 10, SAMPLES * clients)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        clock = Clock(found, folder)
        potluck.run(
            data=potluck.from_arrays(x, y),
            partition={"kind": "iid", "clients": clients, "test": 0.2},
            models=["mlp-small"],
            method=method,
            training={"rounds": rounds, "participation": min(1.0, cohort / clients), "batch_size": SAMPLES},
            evaluate={"who": "sampled"},
            engine={"device": device},
            checkpoint={"every": 0},
            out=folder,
            observers=[clock],
            progress=False,
        )
    found.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return found


def measure_apart(clients: int, rounds: int, method: str, cohort: int, device: str) -> Measured:
    """The same in a process of its own, so that memory is that of this run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, clients, rounds, method, cohort, device).result()


def line(found: Measured, least: Measured) -> str:
    """A run beside the one with the fewest clients."""
    return (
        f"N = {found.clients:>9,}: start-up {found.start:6.1f} s ({found.start_cpu:5.1f} s of CPU before advice), "
        f"a round {found.round:.3f} s ({found.round_cpu:.3f} s of CPU), {found.round / least.round:.2f} × "
        f"({found.round_cpu / least.round_cpu:.2f} ×) that of N = {least.clients:,}, "
        f"{found.log:,.0f} bytes of logs a round, {found.memory:.2f} GiB resident at most"
    )


def lines(
    clients: Sequence[int], rounds: int = 12, method: str = "fedavg", cohort: int = 100, device: str = "cpu"
) -> Iterator[str]:
    """A line for each number of clients, compared with the first."""
    least: Measured | None = None
    for number in clients:
        found = measure_apart(number, rounds, method, cohort, device)
        least = least or found
        yield line(found, least)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000_000], help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each run (12)")
    parser.add_argument("--cohort", type=int, default=100, help="clients of a round (100)")
    parser.add_argument("--method", default="fedavg", help="the method (fedavg)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.rounds <= WARM_UP:
        sys.exit(f"many_clients.py: --rounds is {options.rounds}, expected more than {WARM_UP}")
    for sentence in lines(options.clients, options.rounds, options.method, options.cohort, options.device):
        print(sentence, flush=True)


if __name__ == "__main__":
    main()
