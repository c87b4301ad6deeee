"""The Muscle loss against a plain loop over tuples: value, speed and memory, one table.

    python benchmarks/muscle.py                          B=32, d=256, M=1 to 5: the CPU, and a GPU if there is one
    python benchmarks/muscle.py --peers 3 --memory 64    M=3 alone, pieces of 64 MiB
    python benchmarks/muscle.py --devices cuda           the GPU alone

- `forward and backward`: seconds for the loss and its gradient, the median of `--repeats` after one more.
- `memory`: what it takes beyond its inputs at the highest point. On a GPU what torch has allocated; on a CPU what
  the process has grown by, one that gives freed memory back at once (glibc otherwise keeps blocks under 32 MiB, and
  a process may grow to twice as much); there speed and memory are measured in a process of their own each.
- `plain loop`: the loss of `--anchors` anchors by the formula, one tuple at a time, with inner products of width d
  in every exponent, scaled up to B anchors; up to M=3. `difference` is that of those anchors' losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from potluck.core.rng import Rng
from potluck.kit.contrastive import TAU, TAU_PREV, muscle

SLOWEST_LOOP = 3  # peers
MIB = 2**20


def matrices(batch: int, width: int, peers: int, device: str) -> tuple[Tensor, list[Tensor]]:
    """Peers that see much the same as the anchor, as after some training."""
    generator = Rng(0).generator()
    common = torch.randn(batch, width, generator=generator)
    noisy = [common + 0.7 * torch.randn(batch, width, generator=generator) for _ in range(peers + 1)]
    unit = [torch.nn.functional.normalize(matrix, dim=1).to(device) for matrix in noisy]
    return unit[0], unit[1:]


def plain(anchor: Tensor, peers: list[Tensor], i: int) -> float:
    """One anchor's loss, one tuple at a time, on the CPU."""
    z, rows = anchor[i].double().cpu(), [peer.double().cpu() for peer in peers]
    gamma = 1 / TAU_PREV - 1 / TAU

    def exponent(j: tuple[int, ...]) -> float:
        vectors = [matrix[row] for matrix, row in zip(rows, j, strict=True)]
        agreement = sum(float(a @ b) for a, b in itertools.combinations(vectors, 2))
        return sum(float(z @ vector) for vector in vectors) / TAU - gamma * agreement

    tuples = itertools.product(range(len(anchor)), repeat=len(peers))
    total = math.fsum(math.exp(exponent(j)) for j in tuples)
    return math.log(total) - exponent((i,) * len(peers))


def highest(device: str) -> int:
    """Bytes at the highest point so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def step(anchor: Tensor, peers: list[Tensor], memory: int) -> float:
    """One loss and its gradient, in seconds."""
    anchor.grad = None
    started = time.perf_counter()
    muscle(anchor, peers, memory=memory).backward()
    if anchor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def weigh(options: argparse.Namespace, peers: int, device: str) -> dict[str, Any]:
    """Bytes at the highest point of one loss and its gradient."""
    anchor, others = matrices(options.batch, options.width, peers, device)
    anchor.requires_grad_()
    step(anchor, others[:1], 1)  # in pieces too: libraries take memory of their own at the first call
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = highest(device)
    step(anchor, others, options.memory * MIB)
    return {"memory": highest(device) - before}


def compare(options: argparse.Namespace, peers: int, device: str) -> dict[str, Any]:
    """Seconds, and the value beside that of the plain loop."""
    anchor, others = matrices(options.batch, options.width, peers, device)
    anchor.requires_grad_()
    step(anchor, others, options.memory * MIB)
    found = {"seconds": median(step(anchor, others, options.memory * MIB) for _ in range(options.repeats))}
    if peers <= SLOWEST_LOOP:
        few = min(options.anchors, options.batch)
        with torch.no_grad():
            losses = muscle(anchor, others, memory=options.memory * MIB, reduction="none")[:few].tolist()
        started = time.perf_counter()
        wanted = [plain(anchor.detach(), others, i) for i in range(few)]
        found["loop"] = (time.perf_counter() - started) * options.batch / few
        found["difference"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return found


def row(options: argparse.Namespace, peers: int, device: str) -> dict[str, Any]:
    """What is measured of one loss on one device."""
    if device == "cuda":
        return compare(options, peers, device) | weigh(options, peers, device)
    found = in_a_process_of_its_own("speed", peers, device)
    return found | in_a_process_of_its_own("memory", peers, device)


def in_a_process_of_its_own(what: str, peers: int, device: str) -> dict[str, Any]:
    """This one stays small: a process starts with the highest point of the one that made it."""
    arguments = [sys.executable, __file__, *sys.argv[1:], "--row", f"{what},{peers},{device}"]
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if what == "memory" else {})
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def line(options: argparse.Namespace, peers: int, device: str, found: dict[str, Any]) -> str:
    cells = [device, str(peers), f"{options.batch ** (peers + 1):,}", f"{found['seconds'] * 1e3:,.2f} ms"]
    cells += [f"{found['memory'] / MIB:,.1f} MiB"]
    cells += [f"{found['loop']:,.1f} s", f"{found['difference']:.0e}"] if "loop" in found else ["–", "–"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cpu,cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--devices", default=found, help=f"where to measure ({found})")
    parser.add_argument("--peers", default="1,2,3,4,5")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--memory", type=int, default=256, help="MiB for a piece")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--anchors", type=int, default=1, help="of the plain loop")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.row:
        what, peers, device = options.row.split(",")
        measure = weigh if what == "memory" else compare
        print(json.dumps(measure(options, int(peers), device)))
        return
    print(
        f"B={options.batch}, d={options.width}, pieces of {options.memory} MiB, {options.threads} CPU threads"
    )
    print("| device | M | exponents | forward and backward | memory | plain loop | difference |")
    print("|:---|---:|---:|---:|---:|---:|---:|")
    for device in options.devices.split(","):
        for peers in map(int, options.peers.split(",")):
            print(line(options, peers, device, row(options, peers, device)), flush=True)


if __name__ == "__main__":
    main()
