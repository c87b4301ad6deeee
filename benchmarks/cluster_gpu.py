"""Homes of a Ray cluster that share one GPU, against the CUDA engine alone.

    python benchmarks/cluster_gpu.py                 both cases, two homes: some 100 seconds on one H200
    python benchmarks/cluster_gpu.py --cases fedmrl  the cases whose names hold one of these words
    python benchmarks/cluster_gpu.py --tiny          every path on a CPU; the figures mean nothing

The cases are those of `benchmarks/run.py`. A local Ray is started; the homes share the GPU in equal parts, so this
measures what a cluster costs, not what it gains. Seconds per round are the median after a warm-up; `mean` is over
the same rounds, with those in which states come back. `back` is what the homes send, with all states that come back
at the end, divided by the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import potluck
from run import CASES, NEVER, Case, Clock, even_split, images, machine

CHOSEN = (CASES[0], CASES[4])  # FedMRL with small CNNs, and eight deep architectures


@dataclass(frozen=True)
class Figures:
    """What was measured of one case on one engine; seconds, and megabytes in a round."""

    seconds: float
    mean: float
    start: float
    first: float
    back: float
    busy: tuple[float, ...]  # the share of the time that each home was at work


def measure(case: Case, engine: Mapping[str, Any], options: argparse.Namespace) -> Figures:
    """Play a case as a user would."""
    rounds = options.warm_up + options.rounds
    clock = Clock(rounds, profiles=False)
    settings: dict[str, Any] = {
        "data": images(case.clients * (case.train + case.test), case.side),
        "partition": even_split(case),
        "models": case.models,
        "method": dict(case.method),
        "training": {
            "rounds": rounds + 1,  # the last one is always evaluated
            "batch_size": case.batch,
            "participation": case.share,
            "optimizer": {"lr": 0.01},
        },
        "evaluate": {"every": 1 if case.evaluate else NEVER},
        "engine": dict(engine),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        potluck.run(name="run", out=out, observers=[clock], progress=False, **settings)
        homes = json.loads((out / "summary.json").read_bytes()).get("homes", [])
    taken = np.diff(clock.wall)
    return Figures(
        statistics.median(taken[options.warm_up : rounds].tolist()),
        statistics.mean(taken[options.warm_up : rounds].tolist()),
        clock.start,
        float(taken[0]),
        sum(home["bytes_received"] for home in homes) / (rounds + 1) / 1e6,
        tuple(home["busy"] for home in homes),
    )


def apart(case: Case, engine: Mapping[str, Any], options: argparse.Namespace) -> Figures:
    """In a process of its own, which gives the GPU back."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case, engine, options).result()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="", help="words in the names of the cases, with commas")
    parser.add_argument("--homes", default="2", help="how many homes share the GPU; several with commas")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are timed")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them")
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--tiny", action="store_true", help="few small clients on a CPU")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = {"device": "cpu"} if options.tiny else {"device": "cuda", "precision": options.precision}
    words = [word.strip().lower() for word in options.cases.split(",")]
    print(f"{machine()}, {'CPU' if options.tiny else options.precision}")
    print(
        "case                                            engine    s per round       ×    mean       ×  start, s"
        "  first, s  back, MB  busy"
    )
    for case in [one for one in CHOSEN if any(word in one.name.lower() for word in words)]:
        case = case.tiny() if options.tiny else case
        alone = apart(case, device | ({"workers": 1} if options.tiny else {}), options)
        show(case, "alone", alone, alone)
        for homes in map(int, options.homes.split(",")):
            on_ray = device | {"name": "ray", "workers": homes}
            show(case, f"{homes} homes", apart(case, on_ray, options), alone)
    if torch.cuda.is_available():
        print(f"memory of the GPU that is free now: {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB")


def show(case: Case, engine: str, found: Figures, alone: Figures) -> None:
    times = f"{found.seconds:11.4f}{found.seconds / alone.seconds:8.2f}"
    times += f"{found.mean:8.4f}{found.mean / alone.mean:8.2f}{found.start:10.1f}{found.first:10.1f}"
    busy = ", ".join(f"{one:.0%}" for one in found.busy)
    print(f"{case.name:48}{engine:10}{times}{found.back:10.1f}  {busy}", flush=True)


if __name__ == "__main__":
    main()
