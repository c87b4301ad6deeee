"""Do many clients at once learn what they learn one after the other?

    python benchmarks/agreement.py              twenty rounds of FedMRL, about a minute on one H200
    python benchmarks/agreement.py --tiny       the same in small, the figures mean nothing

On a GPU sums are taken in another order when clients run side by side, and rounding grows with every round. So the
engines are compared by what counts: the mean accuracy over clients after the last round, on made-up images whose
class can be learnt but not perfectly. Each engine plays the same experiment from two seeds. What the engines may
differ by is judged by what the seeds make them differ by: within twice the spread of the two serial runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from potluck import from_arrays
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import ClientSplit, Split
from potluck.engine.numerics import precision
from potluck.engine.serial import SerialEngine
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from speed import CNNS, FEDMRL, MOMENTUM, WEIGHT_DECAY, EngineRunner, serial_engine

CLIENTS, TRAIN, TEST, ROUNDS = 25, 100, 100, 20


def learnable(clients: int, each: int) -> tuple[Dataset, Split]:
    """Ten faint patterns under noise; every client has samples of all of them."""
    draw = Rng(0).child("agreement").numpy()
    patterns = draw.normal(size=(10, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3) * 14
    y = draw.integers(0, 10, clients * each)
    x = np.clip(patterns[y] + draw.normal(128, 60, (len(y), 3, 32, 32)), 0, 255).astype("uint8")
    split = Split.of(
        ClientSplit(
            str(client),
            np.arange(client * each, client * each + each * TRAIN // (TRAIN + TEST)),
            np.arange(0),
            np.arange(client * each + each * TRAIN // (TRAIN + TEST), (client + 1) * each),
        )
        for client in range(clients)
    )
    return from_arrays(x, y, classes=10, mean=(0.5,) * 3, std=(0.25,) * 3), split


def make_federation(seed: int, clients: int, each: int, device: str) -> Federation:
    data, split = learnable(clients, each)
    optimizer = {"lr": 0.03, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    return Experiment.make(
        data=data,
        partition=split,
        models=list(CNNS),
        method=dict(FEDMRL),
        seed=seed,
        training={"batch_size": 20, "optimizer": optimizer},
        engine={"device": device},
    ).build()


def accuracy(federation: Federation, engine: SerialEngine, rounds: int) -> float:
    runner = EngineRunner(federation, engine)
    with precision("float32"):
        for number in range(1, rounds + 1):
            runner.play(number, federation.population.ids)
        reached = runner.evaluate(rounds, federation.population.ids)
    runner.close()
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    tiny = parser.parse_args().tiny
    clients, each, rounds = (3, 20, 2) if tiny else (CLIENTS, TRAIN + TEST, ROUNDS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    makers = {"one after the other": serial_engine}
    if device == "cuda":
        from potluck.engine.cuda.engine import CudaEngine

        makers["all at once"] = CudaEngine
    print(
        f"{clients} clients, {clients * each * TEST // (TRAIN + TEST)} test samples, {rounds} rounds, {device}"
    )
    found: dict[str, list[float]] = {}
    for name, make in makers.items():
        started = time.perf_counter()
        federations = [make_federation(seed, clients, each, device) for seed in (0, 1)]
        found[name] = [accuracy(federation, make(federation.clients), rounds) for federation in federations]
        shown = ", ".join(f"{value:.2%}" for value in found[name])
        print(f"{name}: {shown} (two seeds, {time.perf_counter() - started:.0f} s)", flush=True)
    if len(found) == 2:
        serial, concurrent = found.values()
        gap = abs(statistics.fmean(serial) - statistics.fmean(concurrent))
        spread = abs(serial[0] - serial[1])
        print(f"means differ by {gap:.2%}; the two serial runs by {spread:.2%}; same seeds by ", end="")
        print(", ".join(f"{abs(one - other):.2%}" for one, other in zip(serial, concurrent, strict=True)))


if __name__ == "__main__":
    main()
