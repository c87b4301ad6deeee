"""Seconds per round on the device that is found: a plain loop, our serial engine, our concurrent engine.

    python benchmarks/speed.py                             every case; about six minutes on one H200
    python benchmarks/speed.py --cases fedmrl --profile    some cases, with the kernels that take longest
    python benchmarks/speed.py --scale                     10,000 and a million clients against 100, the same cohort
    python benchmarks/speed.py --cpu                       FedMRL on the cores of this machine
    python benchmarks/speed.py --tiny                      every path in a minute, the figures mean nothing

Three runners play the same rounds of the same clients, on made-up 32×32×3 images: `reference`, a plain PyTorch
loop written below, one client after the other; `serial`, `SerialEngine`; `concurrent`, `CudaEngine` on a GPU and
worker processes on a CPU. SGD with momentum 0.9 and weight decay 1e-3, one epoch, one precision for all three.

Seconds: median over rounds after a warm-up, from a device that has finished to one that has finished. The ratio to
the reference is that of the medians. `first` is the concurrent engine's first round, with the building of clients
and the capture of graphs. Memory is the most that torch reserved. Busy is the share of the wall time of one more
round, under the profiler, in which the device did something; the sequential runners are profiled over one client of
each architecture, and their kernels scaled to the cohort. Each case has a process of its own, and the profiler
comes after all its timings: it stays with a process, and graphs of short kernels are slower from then on.

The floor is what no version can beat by much, whichever is larger of
    arithmetic  = Σ over clients of 3 · 2 · (multiply-adds of one sample's forward pass) · samples / matrix rate
    memory      = Σ over clients of 7 · 4 bytes · parameters · steps / copy rate
(7: weights read forward and backward, gradient written and read, momentum read and written, weights written), plus
2 · multiply-adds · samples and 4 bytes · parameters for every pass without training. Both rates are measured first:
a large matrix product in the case's precision, and a large copy, counting bytes read and bytes written. Activations
are not counted, nor that the first layer needs no gradient of its input.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import many_clients
from potluck import from_arrays
from potluck.core.card import ClientId
from potluck.core.dataset import Dataset
from potluck.core.message import Message
from potluck.core.rng import Rng
from potluck.core.state import Precision
from potluck.data import ClientSplit, PartitionConfig, Split
from potluck.engine.cuda.engine import CudaEngine
from potluck.engine.numerics import precision, threads
from potluck.engine.protocol import Answer, Engine, Examination
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.engine.store.client_store import Budget, ClientStore
from potluck.engine.store.transfers import size
from potluck.engine.transactions import Record
from potluck.engine.workers import WorkersEngine
from potluck.errors import ConfigError, PotluckError, RoundFailed
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.files import write_whole
from potluck.version import __version__

R = TypeVar("R")
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-3
CNNS = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
RESNETS = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
FEDMRL = {"name": "fedmrl", "small": "cnn5", "d1": 100}
LOCAL = {"name": "local"}
FEDPROTO = {"name": "fedproto"}
PATIENCE = 10.0  # seconds after which a sequential runner begins no further round


@dataclass(frozen=True)
class Case:
    """One line of the table: who trains what, and the seconds per round we aim at on one H200."""

    name: str
    method: Mapping[str, Any]
    models: tuple[Any, ...]
    clients: int = 100
    cohort: int = 100
    batch: int = 50
    precision: Precision = "float32"
    evaluate: bool = False  # all clients, after every round
    alpha: float | None = None  # of the Dirichlet distribution over clients; None: all clients alike
    train: int = 500
    test: int = 100
    aim: float | None = None
    stretch: float | None = None
    aim_ratio: float | None = None  # how many times faster than the reference

    def tiny(self) -> Case:
        """A case of the same kind that a CPU plays in a second."""
        models = tuple(dict(entry) for entry in dict.fromkeys(map(_shallow, self.models[:2])))
        clients, cohort = (4, 4) if self.cohort == self.clients else (6, 3)
        case = replace(self, name=f"{self.name} (tiny)", models=models, aim=None, stretch=None)
        return replace(case, clients=clients, cohort=cohort, batch=min(self.batch, 8), train=20, test=8)


def _shallow(entry: Any) -> tuple[tuple[str, Any], ...]:
    """A model's name and options, with the least deep of its family."""
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    deep = options["name"].startswith("resnet")
    return tuple((options | {"name": "resnet10"} if deep else options).items())


def resnet18(stem: str) -> dict[str, str]:
    return {"name": "resnet18", "stem": stem}


_TEN = Case("FedMRL, CNN-1…5, N=100, 10 %", FEDMRL, CNNS, cohort=10, aim=0.02, stretch=0.012)
_LARGE = Case("", LOCAL, (), clients=20, cohort=20, batch=16, precision="bfloat16")
CASES = (
    _TEN,
    replace(_TEN, name=f"{_TEN.name}, evaluation of all", evaluate=True, aim=0.05, stretch=0.03),
    replace(_TEN, name="FedMRL, CNN-1…5, N=100, all", cohort=100, aim=0.20, stretch=0.12),
    Case("Local, CNN-1, N=100, all", LOCAL, ("cnn1",), aim=0.10, stretch=0.05),
    replace(
        _LARGE,
        name="Local, ResNet-18 imagenet stem, N=20, all",
        models=(resnet18("imagenet"),),
        aim=0.20,
        stretch=0.10,
    ),
    replace(
        _LARGE,
        name="FedMRL, ResNet-18 imagenet stem + CNN-5, N=20, all",
        method=FEDMRL,
        models=(resnet18("imagenet"),),
        aim=0.30,
        stretch=0.20,
    ),
    replace(
        _LARGE,
        name="Local, ResNet-18 cifar stem, N=20, all",
        models=(resnet18("cifar"),),
        aim=0.36,
        stretch=0.20,
    ),
    replace(_TEN, name="FedMRL, CNN-1…5, N=100, 10 %, Dirichlet 0.1", alpha=0.1, aim=None, stretch=None),
    Case("FedProto, ResNet-10…26, N=100, 10 %", FEDPROTO, RESNETS, cohort=10, batch=16),
)
ON_CORES = Case("FedMRL, CNN-1…5, N=20, all", FEDMRL, CNNS, 20, 20, aim_ratio=1.3)
CHECK = replace(_TEN, name="check", clients=32, cohort=32)
MANY = Case("many clients", LOCAL, ("cnn5",))
POOL = 120_000  # different samples; clients beyond what they suffice for hold the same ones again


# What the runners play: data, split and models of a case.


@functools.lru_cache(maxsize=2)
def synthetic(rows: int) -> Dataset:
    draw = Rng(0).child("speed", rows).numpy()
    x = draw.integers(0, 256, (rows, 3, 32, 32), dtype="uint8")
    return from_arrays(x, draw.integers(0, 10, rows), classes=10, mean=(0.5,) * 3, std=(0.25,) * 3)


def even_split(case: Case) -> Split:
    each, nothing = case.train + case.test, np.arange(0)
    rows = [np.arange(client * each, (client + 1) * each) % POOL for client in range(case.clients)]
    return Split.of(
        ClientSplit(str(client), own[: case.train], nothing, own[case.train :])
        for client, own in enumerate(rows)
    )


def make_federation(case: Case, device: torch.device) -> Federation:
    """The case on a device, from the same seeds for every runner."""
    data = synthetic(min(case.clients * (case.train + case.test), POOL))
    share = case.test / (case.train + case.test)
    ragged = (
        PartitionConfig(
            kind="dirichlet", alpha=case.alpha, clients=case.clients, source="merged", test=share, min_size=4
        )
        if case.alpha is not None
        else None
    )
    return Experiment.make(
        name="speed",
        data=data,
        partition=ragged or even_split(case),
        models=list(case.models),
        method=dict(case.method),
        training={
            "batch_size": case.batch,
            "optimizer": {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY},
        },
        engine={"device": str(device), "precision": case.precision},
    ).build()


def one_of_each(federation: Federation) -> tuple[ClientId, ...]:
    """The first client of every architecture."""
    first = {
        federation.population.architecture(client): client for client in reversed(federation.population.ids)
    }
    return tuple(client for client in federation.population.ids if client in set(first.values()))


# The reference: what most code does, one client after the other.


def _plain(module: nn.Module) -> nn.Module:
    """In the layout a module has unless somebody asks for another."""
    return module.to(memory_format=torch.contiguous_format)


@dataclass
class Participant:
    """A client of the reference loop: live modules on the device, samples on the host."""

    modules: dict[str, nn.Module]
    train: DataLoader[Any]
    test: DataLoader[Any]
    samples: int

    def parameters(self) -> list[nn.Parameter]:
        return [value for module in self.modules.values() for value in module.parameters()]


class Reference:
    """Local training as a plain loop; the methods below add what is theirs."""

    def __init__(self, federation: Federation, case: Case, device: torch.device) -> None:
        self.federation, self.case, self.device = federation, case, device
        self.shuffle = Rng(0).child("reference").generator()
        built = {
            federation.population.architecture(each): federation.clients.build_client(each).modules()
            for each in one_of_each(federation)
        }
        self.clients = {
            client: self._participant(client, built[federation.population.architecture(client)])
            for client in federation.population.ids
        }

    def _participant(self, client: ClientId, modules: Mapping[str, nn.Module]) -> Participant:
        split = self.federation.split[client]
        own = {name: _plain(copy.deepcopy(module)).to(self.device) for name, module in modules.items()}
        train, test = self._loader(split.train, True), self._loader(split.test, False)
        return Participant(own, train, test, len(split.train))

    def _loader(self, rows: Any, shuffle: bool) -> DataLoader[Any]:
        batch = self.federation.clients.sources[0].take(torch.from_numpy(rows))
        samples = TensorDataset(batch.x.contiguous(), batch.y)
        shuffle = shuffle and len(samples) > 0
        return DataLoader(samples, self.case.batch, shuffle=shuffle, generator=self.shuffle)

    def play(self, round_: int, ids: Sequence[ClientId]) -> None:
        for client in ids:
            self.receive(self.clients[client])
            self.fit(self.clients[client])
        self.combine([self.clients[client] for client in ids])

    def fit(self, client: Participant) -> None:
        optimizer = torch.optim.SGD(client.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        for module in client.modules.values():
            module.train()
        for x, y in self._batches(client.train):
            with self.autocast():
                loss = self.loss(client, x, y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.clip(client)
            optimizer.step()

    def _batches(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in loader:
            yield x.to(self.device), y.to(self.device)

    def autocast(self) -> torch.autocast:
        enabled = self.case.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    @torch.no_grad()
    def evaluate(self, round_: int, ids: Sequence[ClientId]) -> float:
        """The mean accuracy of clients on their own test samples."""
        found = []
        for client in (self.clients[each] for each in ids):
            self.receive(client)
            for module in client.modules.values():
                module.eval()
            correct = 0
            for x, y in self._batches(client.test):
                with self.autocast():
                    correct += int((self.predict(client, x).argmax(1) == y).sum().item())
            found.append(correct / max(len(client.test.dataset), 1))  # type: ignore[arg-type]
        return statistics.fmean(found)

    def close(self) -> None:
        self.clients.clear()

    def receive(self, client: Participant) -> None:
        """Take over what the server sends: nothing."""

    def loss(self, client: Participant, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(client.modules["model"](x), y)

    def clip(self, client: Participant) -> None:
        """Shorten gradients: not here."""

    def combine(self, clients: Sequence[Participant]) -> None:
        """What the server does after training: nothing."""

    def predict(self, client: Participant, x: Tensor) -> Tensor:
        scores: Tensor = client.modules["model"](x)
        return scores


class FedMRLReference(Reference):
    """Two extractors, a projector, two losses, clipping per part, the mean of the small models."""

    def __init__(self, federation: Federation, case: Case, device: torch.device) -> None:
        super().__init__(federation, case, device)
        small = next(iter(self.clients.values())).modules["small"]
        self.small = {name: value.detach().clone() for name, value in small.state_dict().items()}
        self.d1, self.limit = int(case.method["d1"]), float(federation.method.config.clip)

    def receive(self, client: Participant) -> None:
        client.modules["small"].load_state_dict(self.small)

    def fuse(self, client: Participant, x: Tensor) -> Tensor:
        small, model, projector = (client.modules[name] for name in ("small", "model", "projector"))
        fused: Tensor = projector(torch.cat([small.features(x), model.features(x)], dim=1))  # type: ignore[operator]
        return fused

    def loss(self, client: Participant, x: Tensor, y: Tensor) -> Tensor:
        fused = self.fuse(client, x)
        small: Tensor = client.modules["small"].head(fused[:, : self.d1])  # type: ignore[operator]
        large: Tensor = client.modules["model"].head(fused)  # type: ignore[operator]
        return F.cross_entropy(small, y) + F.cross_entropy(large, y)

    def clip(self, client: Participant) -> None:
        for module in client.modules.values():
            clip_grad_norm_(module.parameters(), self.limit)

    @torch.no_grad()
    def combine(self, clients: Sequence[Participant]) -> None:
        total = sum(client.samples for client in clients)
        mean = {name: torch.zeros_like(value) for name, value in self.small.items()}
        for client in clients:
            for name, value in client.modules["small"].state_dict().items():
                mean[name] += value * (client.samples / total)
        self.small = mean

    def predict(self, client: Participant, x: Tensor) -> Tensor:
        scores: Tensor = client.modules["model"].head(self.fuse(client, x))  # type: ignore[operator]
        return scores


class FedProtoReference(Reference):
    """Cross-entropy and the distance to the class's prototype; class means after training, then their mean."""

    def __init__(self, federation: Federation, case: Case, device: torch.device) -> None:
        super().__init__(federation, case, device)
        width = federation.population.width(federation.population.ids[0])
        self.prototypes = torch.zeros(federation.population.task.classes, width, device=device)
        self.known = torch.zeros(federation.population.task.classes, device=device)
        self.sent: list[tuple[Tensor, Tensor]] = []

    def fit(self, client: Participant) -> None:
        super().fit(client)
        self.sent.append(self._means(client))

    @torch.no_grad()
    def _means(self, client: Participant) -> tuple[Tensor, Tensor]:
        client.modules["model"].eval()
        sums, counts = torch.zeros_like(self.prototypes), torch.zeros_like(self.known)
        for x, y in self._batches(client.train):
            with self.autocast():
                z: Tensor = client.modules["model"].features(x)  # type: ignore[operator]
            sums.index_add_(0, y, z.float())
            counts += torch.bincount(y, minlength=len(counts))
        return sums / counts.clamp_min(1).unsqueeze(1), (counts > 0).float()

    def loss(self, client: Participant, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = client.modules["model"].features(x)  # type: ignore[operator]
        scores: Tensor = client.modules["model"].head(z)  # type: ignore[operator]
        distance = (z - self.prototypes[y]).square().mean(1) * self.known[y]
        return F.cross_entropy(scores, y) + distance.sum() / self.known[y].sum().clamp_min(1)

    def combine(self, clients: Sequence[Participant]) -> None:
        holders = torch.stack([held for _, held in self.sent]).sum(0)
        sums = torch.stack([means for means, _ in self.sent]).sum(0)
        new = (holders > 0).unsqueeze(1)
        self.prototypes = torch.where(new, sums / holders.clamp_min(1).unsqueeze(1), self.prototypes)
        self.known = torch.maximum(self.known, (holders > 0).float())
        self.sent.clear()


REFERENCES = {"local": Reference, "fedmrl": FedMRLReference, "fedproto": FedProtoReference}


# Our engines, behind the same three verbs.


class Runner(Protocol):
    """Somebody who plays rounds."""

    def play(self, round_: int, ids: Sequence[ClientId]) -> None: ...

    def evaluate(self, round_: int, ids: Sequence[ClientId]) -> float: ...

    def close(self) -> None: ...


class EngineRunner:
    """An engine of ours, as a run uses it, without the files."""

    def __init__(self, federation: Federation, engine: Engine) -> None:
        self.federation, self.rounds = federation, Rounds(federation, engine)
        self.modes = federation.method.modes[:1]

    def play(self, round_: int, ids: Sequence[ClientId]) -> None:
        cohort = self.rounds.play(round_, ids)
        if cohort.failures:
            raise RoundFailed(f"the figures would be wrong: {next(iter(cohort.failures.values()))}")

    def evaluate(self, round_: int, ids: Sequence[ClientId]) -> float:
        """The mean accuracy of clients on top of the newest downlink; values are read back once."""
        method, server = self.federation.method, self.rounds.server
        outcomes = self.rounds.engine.examine(
            [
                Examination(
                    client,
                    Message(method.downlink(server, client)),
                    self.rounds.stamp(client, round_, 1),
                    self.modes,
                )
                for client in ids
            ]
        )
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        if len(answers) < len(outcomes):
            raise RoundFailed("the figures would be wrong: a client could not be evaluated")
        return self._accuracy(answers)

    def _accuracy(self, answers: Sequence[Answer]) -> float:
        names = [(answer.client, name) for answer in answers for name in answer.report.metrics]
        sums = [value for answer in answers for value in answer.report.metrics.values()]
        values = torch.stack(sums).tolist() if sums else []
        right = {
            client: value
            for (client, name), value in zip(names, values, strict=True)
            if name == f"{self.modes[0]}/test/correct"
        }
        shares = [
            count / self.federation.population.samples(client)["test"] for client, count in right.items()
        ]
        return statistics.fmean(shares) if shares else 0.0

    def close(self) -> None:
        self.rounds.engine.close()


def run_store(federation: Federation) -> ClientStore:
    """The store a run has, without its folder."""
    return ClientStore(Budget.of(None, federation.device), device=federation.device)


def serial_engine(federation: Federation) -> SerialEngine:
    return SerialEngine(federation.clients, run_store(federation))


def concurrent_engine(
    federation: Federation, options: argparse.Namespace, store: ClientStore | None = None
) -> Engine:
    """The engine that has many clients at work at once: all on a GPU, one per core on a CPU."""
    store = store or run_store(federation)
    if federation.device.type == "cuda":
        return CudaEngine(
            federation.clients, store, slots=options.slots, notice=lambda sentence: say(f"notice: {sentence}")
        )
    return WorkersEngine(federation.clients, store, workers=os.cpu_count() or 1)


# Two ceilings, measured, and what a case must at least compute and move.


@dataclass
class Ceilings:
    """The rates of the device: bytes per second of a copy, operations per second of a matrix product."""

    device: torch.device
    tiny: bool = False
    rates: dict[str, float] = field(default_factory=dict)

    def copy_rate(self) -> float:
        if "copy" not in self.rates:
            cells = 2**22 if self.tiny else 2**28 if self.device.type == "cuda" else 2**25
            source = torch.rand(cells, device=self.device)
            target = torch.empty_like(source)
            seconds = self._median(lambda: target.copy_(source))
            self.rates["copy"] = 2 * source.nbytes / seconds
        return self.rates["copy"]

    def matrix_rate(self, name: str) -> float:
        if name not in self.rates:
            side = 256 if self.tiny else 8192 if self.device.type == "cuda" else 1024
            kind = torch.bfloat16 if name == "bfloat16" else torch.float32
            left, right = (torch.rand(side, side, device=self.device).to(kind) for _ in range(2))
            with precision(name):
                seconds = self._median(lambda: left @ right)
            self.rates[name] = 2 * side**3 / seconds
        return self.rates[name]

    def _median(self, work: Callable[[], object], times: int = 9) -> float:
        for _ in range(3):
            work()
        return statistics.median(self._once(work) for _ in range(times))

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Floor:
    """Seconds a round takes at least, by each of the two ceilings."""

    arithmetic: float
    memory: float


class Counting:
    """Counts the operations and bytes of a case's rounds; the formula stands at the top."""

    def __init__(self, federation: Federation, case: Case) -> None:
        self.federation, self.case = federation, case
        self._known: dict[str, tuple[float, int]] = {}

    def _model(self, client: ClientId) -> tuple[float, int]:
        """Operations of one sample's forward pass through the method's loss; parameters."""
        key = self.federation.population.architecture(client)
        if key not in self._known:
            live = self.federation.clients.build_client(client)
            batch = self.federation.clients.sources[0].take(torch.arange(2))  # batch norm needs two samples
            method: Any = self.federation.method
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                method.loss(live, batch)
            parameters = sum(
                value.numel() for part in live.parts.values() for value in part.trainable().values()
            )
            self._known[key] = counter.get_total_flops() / 2, parameters
        return self._known[key]

    def work(self, ids: Sequence[ClientId]) -> tuple[float, float]:
        """Operations and bytes of a round of these clients."""
        operations = moved = 0.0
        for client in ids:
            forward, parameters = self._model(client)
            samples = self.federation.population.samples(client)["train"]
            again = self.case.method["name"] == "fedproto"  # the pass that gathers class means
            operations += forward * samples * (3 + again)
            moved += 4 * parameters * (7 * math.ceil(samples / self.case.batch) + again)
        for client in self.federation.population.ids if self.case.evaluate else ():
            forward, parameters = self._model(client)
            operations += forward * self.federation.population.samples(client)["test"]
            moved += 4 * parameters
        return operations, moved

    def floor(self, cohorts: Sequence[Sequence[ClientId]], ceilings: Ceilings) -> Floor:
        works = [self.work(ids) for ids in cohorts]
        operations, moved = (statistics.median(values) for values in zip(*works, strict=True))
        return Floor(operations / ceilings.matrix_rate(self.case.precision), moved / ceilings.copy_rate())


# Timing and profiling.


@dataclass(frozen=True)
class Profile:
    """One round under the profiler: the share of the wall time in which the device did something."""

    wall: float
    busy: float
    kernels: int
    overlap: float  # kernel time over busy time: how many kernels are at work when any is
    top: list[tuple[str, float, int]]  # name, seconds, count


def profiled(work: Callable[[], object], device: torch.device) -> Profile:
    """A profile of some work on a GPU. Copies count as busy, not as kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        wall = timed(work, device)
    events = [
        (event.start_ns(), event.duration_ns(), event.name())
        for event in watched.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    ]
    return summarised(sorted(events), wall)


def summarised(events: Sequence[tuple[int, int, str]], wall: float) -> Profile:
    """Events in the order of their starts, in nanoseconds: the union of their intervals, and the longest."""
    union, reached = 0, 0
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for start, duration, name in events:
        union += max(0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
        seconds[name] += duration
        counts[name] += 1
    copies = sum(count for name, count in counts.items() if name.startswith(("Memcpy", "Memset")))
    top = [(name, total / 1e9, counts[name]) for name, total in seconds.most_common(15)]
    overlap = sum(seconds.values()) / union if union else 0.0
    return Profile(wall, union / 1e9 / wall, sum(counts.values()) - copies, overlap, top)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds from a device that has finished to a device that has finished."""
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clean_memory(device: torch.device) -> None:
    """Begin with nothing left over, so that peaks can be compared."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float | None:
    """GiB torch has reserved at most; what graphs keep for themselves counts, unlike in what is allocated."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


@dataclass
class Row:
    """What was measured of one runner in one case."""

    case: str
    runner: str
    precision: str
    seconds: dict[int, float]  # by round
    first: float | None = None
    memory: float | None = None
    profile: Profile | None = None
    floor: Floor | None = None
    aim: float | None = None
    stretch: float | None = None
    aim_ratio: float | None = None
    ratio: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    def against(self, other: Row) -> float:
        """How many times faster than another runner."""
        return other.median / self.median


class Bench:
    """One case: the rounds to play, and the runners that play them."""

    def __init__(self, case: Case, device: torch.device, options: argparse.Namespace) -> None:
        self.case, self.device, self.options = case, device, options
        self.host = make_federation(case, torch.device("cpu"))
        whole = case.cohort >= case.clients
        self.warm_up = options.warm_up if whole else 3 * options.warm_up  # each cohort may need new slots
        self.numbers = range(self.warm_up + 1, self.warm_up + options.rounds + 1)
        self.sequential = min(options.rounds, options.reference_rounds * (1 if whole else 3))

    def cohort(self, round_: int) -> tuple[ClientId, ...]:
        return self.host.population.cohort(round_, self.case.cohort)

    def floor(self, ceilings: Ceilings) -> Floor:
        counting = Counting(self.host, self.case)
        return counting.floor([self.cohort(number) for number in self.numbers], ceilings)

    def one_round(self, runner: Runner, round_: int, ids: Sequence[ClientId]) -> float:
        def work() -> None:
            runner.play(round_, ids)
            if self.case.evaluate:
                runner.evaluate(round_, self.host.population.ids)

        return timed(work, self.device)

    def measure(self, name: str, make: Callable[[], Runner]) -> tuple[Row, Runner]:
        """Make a runner, let it warm up, and time its rounds."""
        clean_memory(self.device)
        before = peak(self.device)
        runner = make()
        row = Row(self.case.name, name, self.case.precision, {})
        if name == "concurrent":
            self._time_concurrent(runner, row)
        else:
            self._time_sequential(runner, row)
        most = peak(self.device)
        row.memory = most - before if most is not None and before is not None else None
        return row, runner

    def _time_concurrent(self, runner: Runner, row: Row) -> None:
        row.first = self.one_round(runner, 1, self.cohort(1))
        for number in range(2, self.warm_up + 1):
            self.one_round(runner, number, self.cohort(number))
        for number in self.numbers:
            row.seconds[number] = self.one_round(runner, number, self.cohort(number))

    def _time_sequential(self, runner: Runner, row: Row) -> None:
        few = one_of_each(self.host)
        runner.play(1, few)
        if self.case.evaluate:
            runner.evaluate(1, few)
        for number in self.numbers[: self.sequential]:
            row.seconds[number] = self.one_round(runner, number, self.cohort(number))
            if sum(row.seconds.values()) > self.options.patience:
                break

    def _profile(self, runner: Runner, name: str) -> Profile:
        last = self.numbers[-1]
        ids = self.cohort(last) if name == "concurrent" else one_of_each(self.host)
        scale = len(self.cohort(last)) / len(ids)
        everyone = self.host.population.ids[: round(len(self.host.population.ids) / scale)]

        def work() -> None:
            runner.play(last + 1, ids)
            if self.case.evaluate:
                runner.evaluate(last + 1, everyone)

        found = profiled(work, self.device)
        return replace(found, kernels=round(found.kernels * scale))

    def rows(self, ceilings: Ceilings) -> list[Row]:
        """Every runner of the case; the profiler, which stays once it has run, comes after all timings."""
        case, device = self.case, self.device
        makers: dict[str, Callable[[], Runner]] = {
            "reference": lambda: REFERENCES[case.method["name"]](self.host, case, device),
            "serial": lambda: serial_runner(make_federation(case, device)),
            "concurrent": lambda: concurrent_runner(make_federation(case, device), self.options),
        }
        with precision(case.precision), threads(self.options.threads):
            measured = {name: self.measure(name, make) for name, make in makers.items()}
            for name, (row, runner) in measured.items():
                if device.type == "cuda" and not self.options.no_busy:
                    row.profile = self._profile(runner, name)
                runner.close()
        rows = [row for row, _ in measured.values()]
        for row in rows:
            row.ratio = row.against(rows[0])
        rows[-1].floor = self.floor(ceilings)
        rows[-1].aim, rows[-1].stretch, rows[-1].aim_ratio = case.aim, case.stretch, case.aim_ratio
        return rows


def serial_runner(federation: Federation) -> Runner:
    return EngineRunner(federation, serial_engine(federation))


def concurrent_runner(federation: Federation, options: argparse.Namespace) -> Runner:
    return EngineRunner(federation, concurrent_engine(federation, options))


# Are the numbers the same, and what do many clients cost?


def check(case: Case, device: torch.device, options: argparse.Namespace) -> float:
    """The worst relative difference of a tensor after two rounds, concurrent against serial."""
    with precision(case.precision), threads(options.threads):
        federation = make_federation(case, device)
        engines = (serial_engine(federation), concurrent_engine(federation, options))
        states = [_states_after_two(federation, engine) for engine in engines]
    return max(
        _difference(one[name], other[name]) for one, other in zip(*states, strict=True) for name in one
    )


def _states_after_two(federation: Federation, engine: Engine) -> list[dict[str, Tensor]]:
    runner = EngineRunner(federation, engine)
    for number in (1, 2):
        runner.play(number, federation.population.ids)
    finish(federation.device)
    states = [dict(_stored(engine, client)) for client in federation.population.ids]
    runner.close()
    return states


def _stored(engine: Any, client: ClientId) -> Mapping[str, Tensor]:
    record: Record | None = engine.store.peek(client)
    if record is None or record.base is None:
        raise RoundFailed(f"client {client} has no state after two rounds")
    return record.base


def _difference(one: Tensor, other: Tensor) -> float:
    one, other = one.double().cpu(), other.double().cpu()
    found = float((one - other).norm() / one.norm().clamp_min(1e-12))
    return found if math.isfinite(found) else math.inf  # NaN would be lost in a maximum


@dataclass(frozen=True)
class Place:
    """Where stored states may lie, in cohorts that find room there; None: as many as there are."""

    name: str
    device: int | None = None
    host: int | None = None

    def store(self, federation: Federation, cohort: int, folder: Path) -> ClientStore:
        """A store with that much room; it has a folder if the host's memory is bounded."""
        each = cohort * size(federation.clients.build_client(federation.population.ids[0]).snapshot())
        device, host = (sys.maxsize if room is None else room * each for room in (self.device, self.host))
        return ClientStore(Budget(device, host), folder if self.host is not None else None, federation.device)


EVERYWHERE = Place("states on the device")
HOST = Place("states in host memory", device=3)
DISK = Place("states on disk", device=2, host=2)


def measure_scale(
    case: Case, device: torch.device, options: argparse.Namespace, factor: int
) -> Iterator[Row]:
    """A cohort of the same size out of few and out of many clients, all of whom have a stored state."""
    small: Row | None = None
    for clients, place in ((1, EVERYWHERE), (factor, HOST), (max(6, factor // 10), DISK)):
        many = replace(case, clients=case.clients * clients)
        name = f"Local, CNN-5, N={many.clients:,}, cohort {case.cohort}, {case.train} samples, {place.name}"
        row = _scaled(replace(many, name=name), place, device, options)
        small = small or row
        row.note = f"{row.median / small.median:.2f} × the time of N={case.clients}"
        yield row


def _scaled(case: Case, place: Place, device: torch.device, options: argparse.Namespace) -> Row:
    clean_memory(device)
    row = Row(case.name, "concurrent", case.precision, {})
    with (
        precision(case.precision),
        threads(options.threads),
        tempfile.TemporaryDirectory() as folder,
    ):
        federation = make_federation(case, device)
        store = place.store(federation, case.cohort, Path(folder))
        runner = EngineRunner(federation, concurrent_engine(federation, options, store))
        _time_scaled(runner, store, row, options, case.cohort)
        row.memory = peak(device)
        runner.close()
        store.close()
    return row


def _time_scaled(
    runner: EngineRunner, store: ClientStore, row: Row, options: argparse.Namespace, size: int
) -> None:
    """Everyone trains once, so that everyone has a state; then cohorts at random, as a run plays them."""
    federation = runner.federation
    blocks = [
        federation.population.ids[start : start + size]
        for start in range(0, len(federation.population.ids), size)
    ]
    row.first = timed(lambda: runner.play(1, blocks[0]), federation.device)
    for block in blocks[1:]:
        runner.play(1, block)

    def work(number: int) -> None:
        ids, following = (federation.population.cohort(each, size) for each in (number, number + 1))
        store.mark(ids)
        store.prefetch(following)
        runner.play(number, ids)

    for number in range(2, options.warm_up + options.rounds + 2):
        seconds = timed(functools.partial(work, number), federation.device)
        if number > options.warm_up + 1:
            row.seconds[number] = seconds


# The table.


COLUMNS = (
    "case",
    "runner",
    "seconds per round",
    "× reference",
    "rounds per minute",
    "first round, s",
    "memory, GiB",
    "GPU busy",
    "kernels",
    "floor: arithmetic / memory, ms",
    "aim / stretch, s",
)


def cells(row: Row) -> list[str]:
    """A row as the table shows it."""
    floor, found = row.floor, row.profile
    return [
        row.case if row.precision == "float32" else f"{row.case}, {row.precision}",
        row.runner,
        f"{row.median:.4f}",
        _shown(row.ratio, "{:.3g}"),
        f"{60 / row.median:,.0f}",
        _shown(row.first, "{:.2f}"),
        _shown(row.memory, "{:.2f}"),
        _shown(100 * found.busy if found else None, "{:.0f} %"),
        _shown(found.kernels if found else None, "{:,}"),
        f"{floor.arithmetic * 1e3:.2f} / {floor.memory * 1e3:.2f}" if floor else "–",
        _aims(row),
    ]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _aims(row: Row) -> str:
    if row.note:
        return row.note
    if row.aim_ratio is not None:
        held = row.ratio is not None and row.ratio >= row.aim_ratio
        return f"{row.aim_ratio} × the reference: {'holds' if held else 'missed'}"
    if row.aim is None or row.stretch is None:
        return "–"
    verdict = "stretch holds" if row.median <= row.stretch else "holds" if row.median <= row.aim else "missed"
    return f"{row.aim:g} / {row.stretch:g}: {verdict}"


def say(sentence: str) -> None:
    print(sentence, flush=True)


WIDTHS = (62, 10, 17, 11, 17, 14, 11, 8, 9, 30, 26)


def line(values: Sequence[str]) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, WIDTHS, strict=True)).rstrip()


def show_kernels(row: Row) -> None:
    """The kernels that take longest."""
    if row.profile is None:
        return
    total = row.profile
    say(f"    profiled round {total.wall * 1e3:.1f} ms, {total.overlap:.1f} kernels at once while busy")
    for name, seconds, count in total.top:
        say(f"    {seconds * 1e3:9.2f} ms {count:7,d} × {name[:130]}")


@dataclass
class Results:
    """What was measured so far; written whole after every row, so that nothing is lost."""

    environment: dict[str, Any]
    ceilings: Ceilings
    difference: float | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row, options: argparse.Namespace) -> None:
        self.rows.append(row)
        say(line(cells(row)))
        if options.profile and row.runner == "concurrent":
            show_kernels(row)
        self.write(options)

    def write(self, options: argparse.Namespace) -> None:
        if options.out is not None:
            write_whole(options.out, json.dumps(self.to_json(), indent=1).encode())
        if options.markdown is not None:
            write_whole(options.markdown, self.to_markdown().encode())

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"median": row.median} for row in self.rows]
        return {
            "environment": self.environment,
            "ceilings": self.ceilings.rates,
            "worst_relative_difference": self.difference,
            "rows": rows,
        }

    def to_markdown(self) -> str:
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * 2}{'---:|' * (len(COLUMNS) - 2)}"]
        shown = ""
        for row in self.rows:
            first, *others = cells(row)
            lines.append(f"| {' | '.join([first if first != shown else '', *others])} |")
            shown = first
        return "\n".join([*self.about(), "", *lines, ""])

    def about(self) -> list[str]:
        """Hardware, versions, date, ceilings and the check, a line each."""
        about = self.environment
        rates = [
            f"copy {rate / 1e12:.2f} TB/s" if name == "copy" else f"{name} products {rate / 1e12:.1f} TFLOP/s"
            for name, rate in self.ceilings.rates.items()
        ]
        lines = [f"{about['device']}, torch {about['torch']}, potluck {about['potluck']}, {about['date']}."]
        lines += [f"Measured ceilings: {', '.join(rates)}."] if rates else []
        if self.difference is not None:
            lines.append(
                f"Worst relative difference of a tensor, concurrent against serial: {self.difference:.1e}."
            )
        return lines


def environment(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": f"One {torch.cuda.get_device_name(device)}" if on_gpu else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "potluck": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


# The command.


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, help="rounds timed of the concurrent engine (10)")
    parser.add_argument("--warm-up", type=int, help="rounds before, thrice as many for a cohort of some (4)")
    parser.add_argument("--reference-rounds", type=int, help="rounds of the sequential runners (2)")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="… but none is begun after seconds")
    parser.add_argument("--precision", choices=("float32", "tf32", "bfloat16"), help="for every case")
    parser.add_argument("--slots", type=int, default=128, help="clients in flight at most")
    parser.add_argument("--threads", type=int, help="per process: 1 on a GPU, else one per core")
    parser.add_argument("--out", type=Path, metavar="FILE", help="all figures as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table as Markdown")
    parser.add_argument("--profile", action="store_true", help="the 15 longest kernels of each case")
    parser.add_argument("--no-busy", action="store_true", help="without the profiler")
    parser.add_argument("--no-check", action="store_true", help="without the comparison of the numbers")
    parser.add_argument(
        "--scale", action="store_true", help="10,000 and a million clients against 100 instead"
    )
    parser.add_argument("--cpu", action="store_true", help="the case for a CPU instead")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    return parser.parse_args()


def settle(options: argparse.Namespace, device: torch.device) -> None:
    """Fill in what was not given."""
    for name, usual, tiny in (("rounds", 10, 2), ("warm_up", 4, 1), ("reference_rounds", 2, 1)):
        if getattr(options, name) is None:
            setattr(options, name, tiny if options.tiny else usual)
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected 1 or more")
    for path in (options.out, options.markdown):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if options.threads is None:
        options.threads = 1 if device.type == "cuda" else os.cpu_count() or 1


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases to play."""
    cases = [ON_CORES] if options.cpu else [*CASES]
    found = [case for case in cases if options.cases.lower() in case.name.lower()]
    if not found:
        names = "; ".join(case.name for case in cases)
        raise ConfigError(f"--cases: no case is called {options.cases!r}; there are {names}")
    return [fitted(case, options) for case in found]


def fitted(case: Case, options: argparse.Namespace) -> Case:
    case = case.tiny() if options.tiny else case
    return replace(case, precision=options.precision) if options.precision else case


def main() -> None:
    try:
        play(arguments())
    except PotluckError as error:
        raise SystemExit(f"speed.py: {error}") from error


def play(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    settle(options, device)
    cases = chosen(options)
    precisions = [] if options.scale else [case.precision for case in cases]
    results = Results(*apart(surroundings, device, precisions, options))
    if not options.no_check:
        results.difference = apart(check, fitted(CHECK, options), device, options)
    for sentence in results.about():
        say(sentence)
    say(line(COLUMNS))
    if options.scale:
        for row in measure_scale(fitted(MANY, options), device, options, 6 if options.tiny else 100):
            results.add(row, options)
        for sentence in many_clients.lines([100, 2000 if options.tiny else 1_000_000], device=device.type):
            say(sentence)
        return
    for case in cases:
        for row in apart(rows_of, case, device, options, results.ceilings):
            results.add(row, options)


def apart(work: Callable[..., R], *arguments: Any) -> R:
    """Done in a process of its own, which begins with everything imported and nothing chosen."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__"])
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(work, *arguments).result()


def surroundings(
    device: torch.device, precisions: Sequence[str], options: argparse.Namespace
) -> tuple[dict[str, Any], Ceilings]:
    """What is measured on, and its ceilings."""
    ceilings = Ceilings(device, options.tiny)
    with threads(options.threads):
        ceilings.copy_rate()
        for name in dict.fromkeys(precisions):
            ceilings.matrix_rate(name)
    return environment(device), ceilings


def rows_of(case: Case, device: torch.device, options: argparse.Namespace, ceilings: Ceilings) -> list[Row]:
    """The lines of one case."""
    return Bench(case, device, options).rows(ceilings)


if __name__ == "__main__":
    main()
