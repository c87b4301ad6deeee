"""The kernels of one training step of the GPU engine, beside those of a bare graph of the same step.

    python benchmarks/kernels.py                      ResNet-18 with its 7×7 stem, batch 16, tf32
    python benchmarks/kernels.py --model resnet50     another model that Potluck has by name
    python benchmarks/kernels.py --names              every kernel by its name
    python benchmarks/kernels.py --model fedavg-cnn --stem "" --batch 50 --method fedmrl

The bare graph is what PyTorch's documentation shows: model, cross entropy and fused SGD in one captured step,
channels-last, nothing of Potluck around it but the network itself. The engine plays one client, of Local unless
another method is named. Both are profiled over the same number of replays; microseconds are those of kernels one
after the other. Layout is a copy from one memory format to the other. A GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import potluck
from potluck import Observer
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.engine.numerics import precision
from potluck.models import build
from potluck.runs.observers import RoundEnd
from run import FEDMRL, NEVER, Case, even_split, images, machine

STEPS, SIDE, CLASSES = 30, 32, 10
WARM_UP = 4  # rounds, or replays of the bare graph, before the profiler looks
KINDS = {  # the first pattern that is in a kernel's name says what it does
    "layout": r"nchwtonhwc|nhwctonchw|nchw.*nhwc|nhwc.*nchw|transpose",
    "convolution and matrix product": r"conv|wgrad|dgrad|fprop|cudnn.*(gemm|kernel)|gemm|cutlass|xmma|gemv|splitk",
    "batch norm": r"batch_norm|bn_fw|bn_bw|batchnorm",
    "pooling": r"pool",
    "optimiser": r"multi_tensor|fused_?sgd|foreach",
    "clearing": r"memset|fillfunctor|fill_",
    "rows, sums and copies": r"index|gather|reduce|memcpy|copy|cat",
    "loss": r"softmax|nll",
    "element by element": r"elementwise|vectorized|unrolled",
}


@dataclass
class Kernels:
    """Kernels of some steps by name: how many, and their nanoseconds in sum."""

    count: Counter[str] = field(default_factory=Counter)
    time: Counter[str] = field(default_factory=Counter)

    def add(self, watched: Any) -> None:
        """Take what a profiler has seen of the device."""
        for event in watched.profiler.kineto_results.events():
            if event.device_type().name == "CUDA" and not event.is_user_annotation():
                self.count[event.name()] += 1
                self.time[event.name()] += event.duration_ns()

    def by(self, kind: Callable[[str], str]) -> dict[str, tuple[float, float]]:
        """Kernels and microseconds of a step."""
        kinds = sorted({kind(name) for name in self.count})
        return {
            one: (
                sum(count for name, count in self.count.items() if kind(name) == one) / STEPS,
                sum(time for name, time in self.time.items() if kind(name) == one) / STEPS / 1e3,
            )
            for one in kinds
        }


def kind_of(name: str) -> str:
    return next(
        (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "others"
    )


def profiled(work: Callable[[], object]) -> Kernels:
    found = Kernels()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        work()
        torch.cuda.synchronize()
    found.add(watched)
    return found


class OneRound(Observer):
    """Profiles the round after the warm-up."""

    def __init__(self) -> None:
        self.found = Kernels()

    def round(self, end: RoundEnd) -> None:
        torch.cuda.synchronize()
        if end.round == WARM_UP:
            self._watched = profile(activities=[ProfilerActivity.CUDA])
            self._watched.__enter__()  # type: ignore[no-untyped-call]
        elif end.round == WARM_UP + 1:
            self._watched.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.found.add(self._watched)


def of_the_engine(model: Mapping[str, Any], batch: int, mode: str, method: Any = "local") -> Kernels:
    """A round of one client that trains for `STEPS` steps; what it does beside them is divided among them."""
    case = Case("", {}, [dict(model)], clients=1, train=STEPS * batch, test=batch)
    observer = OneRound()
    with tempfile.TemporaryDirectory() as folder:
        potluck.run(
            name="kernels",
            out=Path(folder) / "run",
            data=images(case.train + case.test, SIDE),
            partition=even_split(case),
            models=case.models,
            method=method,
            training={"rounds": WARM_UP + 2, "batch_size": batch, "optimizer": {"lr": 0.01}},
            evaluate={"every": NEVER},
            engine={"precision": mode},
            observers=[observer],
            progress=False,
        )
    return observer.found


def of_a_bare_graph(model: Mapping[str, Any], batch: int, mode: str) -> Kernels:
    """Replays of one captured step."""
    rng = Rng(0)
    with rng.as_default(), precision(mode):
        net = build(dict(model), Task("classification", classes=CLASSES, input=(3, SIDE, SIDE))).cuda()
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(batch, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(CLASSES, (batch,), device="cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        return profiled(lambda: [graph.replay() for _ in range(STEPS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a model by name")
    parser.add_argument("--stem", default="imagenet", help="of a ResNet; empty for other models")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--method", default="local", choices=["local", "fedmrl"])
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--names", action="store_true", help="every kernel by its name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels.py: there is no GPU here")
    model = {"name": options.model} | ({"stem": options.stem} if options.stem else {})
    kind: Callable[[str], str] = (lambda name: name[:110]) if options.names else kind_of
    print(
        f"{machine()}, {options.model}, batch {options.batch}, {options.precision}; kernels and µs of a step\n"
    )
    method = FEDMRL if options.method == "fedmrl" else options.method
    ours = of_the_engine(model, options.batch, options.precision, method).by(kind)
    bare = of_a_bare_graph(model, options.batch, options.precision).by(kind)
    print("| | engine | µs | bare graph | µs |\n| :--- | ---: | ---: | ---: | ---: |")
    for one in sorted(ours | bare, key=lambda one: -max(ours.get(one, (0, 0))[1], bare.get(one, (0, 0))[1])):
        print(row(one, ours.get(one, (0.0, 0.0)), bare.get(one, (0.0, 0.0))))
    print(row("all", *(tuple(map(sum, zip(*found.values(), strict=True))) for found in (ours, bare))))


def row(name: str, ours: tuple[float, ...], bare: tuple[float, ...]) -> str:
    return f"| {name} | {ours[0]:.1f} | {ours[1]:.0f} | {bare[0]:.1f} | {bare[1]:.0f} |"


if __name__ == "__main__":
    main()
