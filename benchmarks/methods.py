"""Seconds per round of every method on the concurrent engine, against Local with the same optimiser.

    python benchmarks/methods.py                       the methods of examples/results/all_methods.yaml
    python benchmarks/methods.py --only fedtgp,fedkd   some of them
    python benchmarks/methods.py --tiny                every path on a CPU in a minute; the figures mean nothing

20 clients of 500 made-up 32×32×3 images, CNN-1 … CNN-5, batches of 32, one epoch, 1,000 public samples.
Optimiser and options are those of the file. Seconds are the median over rounds after a warm-up, from a device
that has finished to one that has finished, without evaluation and files. `first` is the first round, with the
capture of graphs. `requests` is how many steps clients are asked for in a round: each costs the host about a
millisecond. What could not be captured is named below the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from potluck import from_arrays
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import ClientSplit, Split
from potluck.engine.cuda.engine import CudaEngine
from potluck.engine.numerics import precision
from potluck.engine.protocol import Engine, Outcome, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.errors import PotluckError
from potluck.experiment.overrides import read_yaml
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.testing.faulty_engines import Wrapped

FILE = Path(__file__).parent.parent / "examples" / "results" / "all_methods.yaml"
WARM_UP, TIMED = 4, 7
OPTIONS = {"fedl2g": {"warm_up": 1}}  # else no model is trained in the rounds that are timed
SHORT = {
    "fedgen": {"steps": 4},
    "feddf": {"steps": 2, "every": 1, "patience": 2},
    "fedtgp": {"server_epochs": 1},
}


@dataclass
class Row:
    """What was measured of one variant."""

    label: str
    seconds: float
    first: float
    requests: int
    local: str
    notices: list[str] = field(default_factory=list)


class Counting(Wrapped):
    """Counts the requests that pass."""

    requests = 0

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Count and pass on."""
        self.requests += len(requests)
        return super().run(requests)


def data(clients: int, samples: int) -> tuple[Dataset, Split]:
    """Made-up images of ten classes, the same number of each client, a fifth of them for tests."""
    draw, each = Rng(0, ("methods",)).numpy(), samples + samples // 5
    y = draw.integers(0, 10, clients * each)
    x = draw.normal(size=(len(y), 3, 32, 32)).astype(np.float32) + y[:, None, None, None] / 5
    rows = [np.arange(number * each, (number + 1) * each) for number in range(clients)]
    split = [
        ClientSplit(str(number), own[:samples], np.arange(0), own[samples:])
        for number, own in enumerate(rows)
    ]
    return from_arrays(x.astype(np.float32), y, classes=10), Split.of(split)


def federation(method: Any, optimizer: Any, tiny: bool, device: str) -> Federation:
    """The federation of one variant."""
    images, split = data(4, 24) if tiny else data(20, 500)
    return Experiment.make(
        data=images,
        partition=split,
        models=["cnn5"] if tiny else ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"],
        method=method,
        public={"data": images, "samples": 32 if tiny else 1000},
        training={"batch_size": 8 if tiny else 32, "optimizer": optimizer},
        engine={"device": device, "precision": "tf32" if device == "cuda" else "float32"},
    ).build()


def measure(label: str, local: str, made: Federation, rounds: tuple[int, int]) -> Row:
    """Play the rounds of one variant."""
    row, cuda = Row(label, 0.0, 0.0, 0, local), made.device.type == "cuda"
    inner: Engine = (
        CudaEngine(made.clients, notice=row.notices.append) if cuda else SerialEngine(made.clients)
    )
    engine = Counting(inner)
    played, seconds = Rounds(made, engine), list[float]()
    for number in range(1, sum(rounds) + 1):
        engine.requests, begin = 0, time.perf_counter()
        played.play(number, made.population.ids)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    row.first, row.seconds = seconds[0], statistics.median(seconds[rounds[0] :])
    row.requests = engine.requests
    inner.close()
    gc.collect()
    return row


def variants(only: Sequence[str], tiny: bool) -> list[tuple[str, Any, Any]]:
    """Label, method and optimiser of each variant, and Local under each of the optimisers first."""
    file = read_yaml(FILE)
    usual = file["training"]["optimizer"]
    found = []
    for label, changes in file["variants"].items():
        method = changes["method"]
        name = method if isinstance(method, str) else method["name"]
        options = {} if isinstance(method, str) else dict(method)
        options |= {"name": name} | OPTIONS.get(name, {}) | (SHORT.get(name, {}) if tiny else {})
        if not only or label in only:
            found.append((label, options, changes.get("training.optimizer", usual)))
    locals_ = {local_label(optimizer): optimizer for _, _, optimizer in found}
    return [*((label, {"name": "local"}, optimizer) for label, optimizer in locals_.items()), *found]


def local_label(optimizer: Any) -> str:
    """Local under an optimiser."""
    return "local " + json.dumps(optimizer).replace('"', "")


def main() -> None:
    """Measure, and print the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="labels, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="a CPU, four clients, one round")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    print(f"{where}, torch {torch.__version__}\n")
    print(
        "| | s a round | × Local | first round | requests |\n| :--- | ---: | ---: | ---: | ---: |", flush=True
    )
    seconds: dict[str, float] = {}
    notices: dict[str, list[str]] = {}
    for label, method, optimizer in variants([*filter(None, options.only.split(","))], options.tiny):
        local = local_label(optimizer)
        made = federation(method, optimizer, options.tiny, device)
        try:
            with precision("tf32" if device == "cuda" else "float32"):
                row = measure(label, local, made, (0, 1) if options.tiny else (WARM_UP, TIMED))
        except PotluckError as error:
            notices[label] = [str(error)]
            continue
        seconds[label], notices[label] = row.seconds, row.notices
        ratio = row.seconds / seconds[local]
        print(f"| {label} | {row.seconds:.4f} | {ratio:.2f} | {row.first:.2f} | {row.requests} |", flush=True)
    for label, sentences in notices.items():
        for sentence in sentences:
            print(f"\n{label}: {sentence}")


if __name__ == "__main__":
    main()
