"""Seconds per round of whole `potluck.run` calls: logs, checkpoints, evaluation and report included.

    python benchmarks/run.py                              every case, in tf32 on a GPU
    python benchmarks/run.py --cases fedmrl,host          the cases whose names hold one of these words
    python benchmarks/run.py --tiny                       every path on a CPU in a minute; the figures mean nothing
    python benchmarks/run.py --compile on                 with compiled models
    python benchmarks/run.py --out before.json            keep the figures …
    python benchmarks/run.py --against before.json        … and show what became of them

500 training and 100 test samples a client (made-up 32×32×3 images), plain SGD, one epoch. The cases named `host`
have networks and data so small that little but Python is measured.

Seconds are the median over rounds after a warm-up, from the moment an observer hears of a round to the moment it
hears of the next. `start` is from the call to the first round, `first` the first round. Memory is the most that
torch reserved, on a CPU the most that the process had. Busy is the share of two further rounds, under the profiler,
in which the device did something. `host` is the processor time of the main thread for each exchange of a client
that trains and each client that is evaluated; a thread that waits for a GPU counts as busy. Each case has a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import potluck
from potluck import Observer
from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import ClientSplit, Split
from potluck.files import write_whole
from potluck.models.registry import POOLS
from potluck.runs.observers import RoundEnd

NEVER = 10**6  # rounds between two evaluations
PROFILED = 2  # rounds
FEDMRL = {"name": "fedmrl", "small": "fedavg-cnn", "d1": 128}
EIGHT = {"pool": list(POOLS["htm10"][:8]), "rep_dim": 512, "adapter": "pool"}


@dataclass(frozen=True)
class Case:
    """One line of the table, with the seconds per round we aim at on one H200 in tf32."""

    name: str
    method: Mapping[str, Any]
    models: Any
    clients: int = 100
    share: float = 1.0  # of the clients, in a round
    batch: int = 50
    evaluate: bool = False  # all clients, in every round
    train: int = 500
    test: int = 100
    side: int = 32
    public: int = 0
    exchanges: int = 1  # of a client in a round
    aim: float | None = None
    stretch: float | None = None

    def tiny(self) -> Case:
        """A case of the same kind that a CPU plays in seconds."""
        deep = isinstance(self.models, Mapping)
        models = {**self.models, "pool": self.models["pool"][:2]} if deep else self.models
        small = replace(self, name=f"{self.name} (tiny)", models=models, aim=None, stretch=None)
        return replace(small, clients=4, share=max(self.share, 0.5), batch=8, train=16, test=8)


_TEN = Case("FedMRL, fedavg-cnn, N=100, 10 %", FEDMRL, ["fedavg-cnn"], share=0.1, aim=0.02, stretch=0.012)
_DEEP = Case("", {}, EIGHT, clients=20, batch=10, evaluate=True, aim=0.9, stretch=0.6)
_HOST = Case("", {}, ["mlp-small"], side=8, train=10, test=5, batch=10, evaluate=True)
CASES = (
    _TEN,
    replace(_TEN, name=f"{_TEN.name}, evaluation of all", evaluate=True, aim=0.05, stretch=0.03),
    replace(_TEN, name="FedMRL, fedavg-cnn, N=100, all", share=1.0, aim=0.2, stretch=0.12),
    Case("Local, fedavg-cnn, N=100, all", {"name": "local"}, ["fedavg-cnn"], aim=0.1, stretch=0.05),
    replace(_DEEP, name="FedProto, eight architectures, N=20, all", method={"name": "fedproto"}),
    replace(_DEEP, name="FedGH, eight architectures, N=20, all", method={"name": "fedgh"}),
    replace(
        _HOST,
        name="host: FedMRL, mlp-small, N=100, all",
        method={"name": "fedmrl", "small": "mlp-small", "d1": 8},
    ),
    replace(
        _HOST,
        name="host: FedMuscle, mlp-small, N=20, 31 exchanges",
        method={"name": "fedmuscle"},
        clients=20,
        public=960,
        exchanges=31,
    ),
)


def images(rows: int, side: int) -> Dataset:
    draw = Rng(0).child("run", rows).numpy()
    x = draw.integers(0, 256, (rows, 3, side, side), dtype="uint8")
    return potluck.from_arrays(x, draw.integers(0, 10, rows), classes=10, mean=(0.5,) * 3, std=(0.25,) * 3)


def even_split(case: Case) -> Split:
    each, nothing = case.train + case.test, np.arange(0)
    rows = [np.arange(client * each, (client + 1) * each) for client in range(case.clients)]
    return Split.of(
        ClientSplit(str(client), own[: case.train], nothing, own[case.train :])
        for client, own in enumerate(rows)
    )


class Clock(Observer):
    """Notes when each round ended, by the wall and by the processor time of this thread; profiles the last ones."""

    def __init__(self, timed: int, profiles: bool) -> None:
        self.timed, self.profiles = timed, profiles
        self.began = time.perf_counter()
        self.start = 0.0
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.evaluated = 0  # clients in a round
        self.busy: float | None = None
        self.memory: float | None = None

    def begin(self, name: str, method: str, rounds: int, done: int) -> None:
        self.start = time.perf_counter() - self.began
        self._note()

    def round(self, end: RoundEnd) -> None:
        self._note()
        if end.round == self.timed:
            self.evaluated = sum(len(found.lines) for found in end.examined)
            self.memory = _peak()
            if self.profiles:
                torch.cuda.synchronize()
                self._profiler = profile(activities=[ProfilerActivity.CUDA])
                self._profiler.__enter__()  # type: ignore[no-untyped-call]
                self._since = time.perf_counter()
        elif end.round == self.timed + PROFILED and self.profiles:
            torch.cuda.synchronize()
            wall = time.perf_counter() - self._since
            self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.busy = _busy(self._profiler) / wall

    def _note(self) -> None:
        self.wall.append(time.perf_counter())
        self.processor.append(time.thread_time())


def _peak() -> float:
    """GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _busy(profiler: Any) -> float:
    """The seconds in which at least one kernel or copy ran."""
    events = sorted(
        (event.start_ns(), event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    )
    union, reached = 0, 0
    for start, duration in events:
        union += max(0, start + duration - max(start, reached))
        reached = max(reached, start + duration)
    return union / 1e9


@dataclass(frozen=True)
class Row:
    """What was measured of one case; seconds, GiB, and microseconds for `host`."""

    case: str
    seconds: float
    start: float
    first: float
    memory: float | None
    busy: float | None
    host: float
    aim: float | None
    stretch: float | None


def measure(case: Case, options: argparse.Namespace) -> Row:
    """Play a case as a user would."""
    timed, on_gpu = options.warm_up + options.rounds, torch.cuda.is_available()
    settings: dict[str, Any] = {
        "data": images(case.clients * (case.train + case.test), case.side),
        "partition": even_split(case),
        "models": case.models,
        "method": dict(case.method),
        "training": {
            "rounds": timed + PROFILED + 1,  # the last one is always evaluated
            "batch_size": case.batch,
            "participation": case.share,
            "optimizer": {"lr": 0.01},
        },
        "evaluate": {"every": 1 if case.evaluate else NEVER},
        "engine": {"precision": options.precision, "compile": options.compile}
        if on_gpu
        else {"device": "cpu"},
    }
    if case.public:
        settings["public"] = {"data": images(case.public, case.side)}
    clock = Clock(timed, on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        potluck.run(name="run", out=Path(folder) / "run", observers=[clock], progress=False, **settings)
    return row_of(case, clock, slice(options.warm_up, timed))


def row_of(case: Case, clock: Clock, timed: slice) -> Row:
    rounds, processor = np.diff(clock.wall), np.diff(clock.processor)
    trained = max(1, round(case.share * case.clients)) * case.exchanges
    return Row(
        case.name,
        statistics.median(rounds[timed].tolist()),
        clock.start,
        float(rounds[0]),
        clock.memory,
        clock.busy,
        statistics.median(processor[timed].tolist()) / (trained + clock.evaluated) * 1e6,
        case.aim,
        case.stretch,
    )


COLUMNS = (
    "case",
    "seconds per round",
    "start, s",
    "first round, s",
    "memory, GiB",
    "busy",
    "host, µs",
    "aim / stretch, s",
)


def cells(row: Row, before: Row | None) -> list[str]:
    aim = "–"
    if row.aim is not None and row.stretch is not None:
        held = "stretch" if row.seconds <= row.stretch else "holds" if row.seconds <= row.aim else "missed"
        aim = f"{row.aim:g} / {row.stretch:g}: {held}"
    forms = {"seconds": ".4f", "start": ".1f", "first": ".1f", "memory": ".2f", "busy": ".0%", "host": ".0f"}
    return [row.case, *(_changed(form, name, row, before) for name, form in forms.items()), aim]


def _changed(form: str, name: str, row: Row, before: Row | None) -> str:
    values = [getattr(one, name) for one in (before, row) if one is not None]
    return " → ".join("–" if value is None else format(value, form) for value in values)


def line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def chosen(options: argparse.Namespace) -> list[Case]:
    words = [word.strip().lower() for word in options.cases.split(",")]
    found = [case for case in CASES if any(word in case.name.lower() for word in words)]
    if not found:
        raise SystemExit(f"run.py: no case has any of {', '.join(words)} in its name")
    return [case.tiny() for case in found] if options.tiny else found


def apart(case: Case, options: argparse.Namespace) -> Row:
    """In a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case, options).result()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="", help="words in the names of the cases, with commas")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are timed")
    parser.add_argument("--warm-up", type=int, default=10, help="rounds before them")
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--compile", default="off", choices=["on", "off"], help="engine.compile")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--against", type=Path, help="such a file, of before")
    parser.add_argument("--tiny", action="store_true", help="few rounds of few small clients")
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.warm_up = 3, 1
    return options


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return f"{device}, torch {torch.__version__}, potluck {potluck.__version__}"


def main() -> None:
    options = arguments()
    rows: list[Row] = []
    before: dict[str, Row] = {}
    if options.against is not None:
        kept = json.loads(options.against.read_bytes())
        before = {one["case"]: Row(**one) for one in kept["rows"]}
        print(f"before: {kept['machine']}")
    how = f"{options.precision}, compile {options.compile}" if torch.cuda.is_available() else "float32"
    print(f"{machine()}, {how}\n")
    print(line(COLUMNS), line(["---", *["---:"] * (len(COLUMNS) - 1)]), sep="\n", flush=True)
    for case in chosen(options):
        rows.append(apart(case, options))
        print(line(cells(rows[-1], before.get(rows[-1].case))), flush=True)
        if options.out is not None:
            kept = {"machine": machine(), "rows": [asdict(row) for row in rows]}
            write_whole(options.out, json.dumps(kept, indent=1).encode())


if __name__ == "__main__":
    main()
