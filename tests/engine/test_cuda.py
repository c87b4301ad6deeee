"""The GPU engine against the reference engine. Skipped where there is no GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contract_cases import contract_case
from potluck import from_arrays
from potluck.core.client import Client
from potluck.core.dataset import Dataset
from potluck.core.message import Content, Message
from potluck.core.method import _registry, client_step
from potluck.core.rng import Rng
from potluck.core.task import Batch
from potluck.data import ClientSplit, Split
from potluck.engine.protocol import Answer, Examination, Outcome, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.builder import ClientBuilder
from potluck.federation.federation import Federation
from potluck.methods import Local
from potluck.methods.registry import method_names
from potluck.runs.api import run
from potluck.testing.bench import Bench
from potluck.testing.contract import CHECKS, Check, a_captured_step_is_right, only_training_rows_matter
from potluck.training.fit import fit

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CNNS = ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"]
FEDMRL = {"name": "fedmrl", "small": "cnn5", "d1": 100}
FEDIN = {"name": "fedin", "noise": 0.8}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedmrl": {"small": "cnn5", "d1": 100},
    "fedin": {"noise": 0.8},
    "fedkd": {"compress": None},  # the ranks of a message are waited for
    "fedgen": {"steps": 5},
    "fedl2g": {"warm_up": 1},
    "fedtgp": {"server_epochs": 2},
    "fedhenn": {"samples": 32},
    "cofed": {"margin": 0.0},
    "feddf": {"steps": 5},
    "fedmuscle": {"peers": 2, "batch": 16, "bundle": 2},
    "gramian": {"peers": 2, "batch": 16},
    "pairwise": {"peers": 2, "batch": 16},
    "fccl": {"pretrain_epochs": 2, "public_lr": 0.005},
    "fed-et": {"steps": 5},
    "rhfl": {"pretrain_epochs": 2, "exchange": "batch", "batch": 32},
}
WIDTHS = ("cnn1", {"name": "cnn1", "scale": 0.5})
DEPTHS = ({"name": "resnet10", "width": 8}, {"name": "resnet14", "width": 8})
MODELS: dict[str, Any] = {  # where CNNs of several forms will not do
    **{method: list(WIDTHS) for method in ("heterofl", "fedrolex", "fjord")},
    **{method: list(DEPTHS) for method in ("inco", "inclusivefl")},
    "scalefl": {"name": "scalefl", "depth": 10, "width": 8},
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.use_deterministic_algorithms(False)


def federation(sizes: Sequence[int], side: int = 32, channels: int = 3) -> tuple[Dataset, Split]:
    draw = Rng(0, ("cuda",)).numpy()
    total = sum(sizes) + 20 * len(sizes)
    y = draw.integers(0, 10, total)
    x = draw.normal(size=(total, channels, side, side)).astype(np.float32) + y[:, None, None, None] / 5
    clients, start = [], 0
    for number, size in enumerate(sizes):
        rows = np.arange(start, start + size + 20)
        clients.append(ClientSplit(str(number), rows[:size], np.arange(0), rows[size:]))
        start += size + 20
    return from_arrays(x.astype(np.float32), y, classes=10), Split.of(clients)


def federate(
    sizes: Sequence[int],
    method: Any,
    models: Any,
    side: int = 32,
    precision: str = "float32",
    **training: Any,
) -> Federation:
    data, split = federation(sizes, side)
    settings = {"batch_size": 16, "optimizer": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}} | training
    return Experiment.make(
        data=data,
        partition=split,
        models=models,
        method=method,
        public={"data": data, "samples": 64},  # for methods that use some
        training=settings,
        engine={"device": "cuda", "precision": precision},
    ).build()


def engine(clients: ClientBuilder, **options: Any) -> Any:
    from potluck.engine.cuda.engine import CudaEngine

    return CudaEngine(clients, **options)


def one_by_one(federation: Federation) -> Any:
    """The same engine, made to finish one client before the next begins."""
    from potluck.engine.cuda.engine import CudaEngine

    class Waiting(CudaEngine):
        def run(self, requests: Sequence[Request]) -> list[Outcome]:
            outcomes = []
            for request in requests:
                outcomes += super().run([request])
                torch.cuda.synchronize()
            return outcomes

    return Waiting(federation.clients)


def play(federation: Federation, engine: Any, rounds: int = 2) -> Rounds:
    played = Rounds(federation, engine)
    for number in range(1, rounds + 1):
        cohort = played.play(number, federation.population.ids)
        assert not cohort.failures
    torch.cuda.synchronize()
    return played


def states(played: Rounds) -> dict[str, Tensor]:
    found = {f"server:{name}": value for name, value in played.server.snapshot().items()}
    for client in played.federation.population.ids:
        base = played.engine.store.peek(client).base  # type: ignore[attr-defined]
        found |= {f"{client}:{name}": value for name, value in base.items()}
    return found


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    gaps = [(a[name].double() - b[name].double()).norm() / (a[name].double().norm() + 1e-9) for name in a]
    return float(torch.stack(gaps).max())


def test_32_clients_at_once_are_the_same_32_one_by_one() -> None:
    sizes = [64 + 8 * (number % 4) for number in range(32)]
    made = [federate(sizes, FEDMRL, CNNS) for _ in range(2)]
    together, alone = play(made[0], engine(made[0].clients)), play(made[1], one_by_one(made[1]))
    assert worst(states(alone), states(together)) < 1e-6


@pytest.mark.parametrize(
    "method",
    [FEDMRL, FEDIN, *({"name": one} for one in ("scaffold", "fedproto", "fedprox", "fedre", "fedgh"))],
)
def test_graphs_agree_with_the_reference_engine(method: Any) -> None:
    sizes = [80, 64, 50, 33, 17, 1]
    made = [federate(sizes, method, CNNS) for _ in range(2)]
    serial, graphs = play(made[0], SerialEngine(made[0].clients)), play(made[1], engine(made[1].clients))
    assert worst(states(serial), states(graphs)) < 1e-3


@pytest.mark.parametrize(
    "optimizer", [{"name": "adam", "lr": 1e-3}, {"name": "adamw", "lr": 1e-3}, {"lr": 0.05}]
)
def test_every_optimiser_starts_fresh_in_every_round(optimizer: Any) -> None:
    made = [federate([64, 64], {"name": "local"}, ["resnet10"], optimizer=optimizer) for _ in range(2)]
    serial, graphs = (
        play(made[0], SerialEngine(made[0].clients), 3),
        play(made[1], engine(made[1].clients), 3),
    )
    assert worst(states(serial), states(graphs)) < 2e-2  # batch norm in a deep net amplifies the last bits


def test_one_epoch_gives_the_same_losses() -> None:
    made = [federate([160] * 8, FEDMRL, CNNS) for _ in range(2)]
    losses = []
    for one, kind in zip(made, (SerialEngine, engine), strict=True):
        played = Rounds(one, kind(one.clients))
        seen: dict[str, Tensor] = {}
        original = played.engine.run

        def listen(requests: Any, original: Any = original, seen: Any = seen) -> Any:
            outcomes = original(requests)
            seen |= {
                outcome.client: sum(outcome.report.losses.values())
                for outcome in outcomes
                if isinstance(outcome, Answer)
            }
            return outcomes

        played.engine.run = listen  # type: ignore[method-assign]
        played.play(1, one.population.ids)
        losses.append(torch.stack([seen[client] for client in one.population.ids]))
    assert ((losses[0] - losses[1]).abs() / losses[0].abs()).max() < 1e-4


def test_evaluation_is_that_of_the_reference_engine() -> None:
    made = [federate([64, 40, 30], FEDMRL, CNNS) for _ in range(2)]
    found = []
    for one, kind in zip(made, (SerialEngine, engine), strict=True):
        played = play(one, kind(one.clients))
        for _ in range(3):  # eagerly, captured, replayed
            examinations = [
                Examination(
                    client,
                    Message(one.method.downlink(played.server, client)),
                    played.stamp(client, 2, 1),
                    one.method.modes,
                )
                for client in one.population.ids
            ]
            outcomes = played.engine.examine(examinations)
        sums = [outcome.report.metrics for outcome in outcomes if isinstance(outcome, Answer)]
        found.append(
            {f"{number}:{name}": value for number, each in enumerate(sums) for name, value in each.items()}
        )
    assert worst(found[0], found[1]) < 1e-3


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x))
        return scores


def test_dropout_is_drawn_anew_and_can_be_repeated() -> None:
    made = [federate([64] * 6, {"name": "local"}, [WithDropout], side=8) for _ in range(2)]
    first, second = (play(one, engine(one.clients), 3) for one in made)
    assert worst(states(first), states(second)) == 0
    base = [first.engine.store.peek(client).base for client in ("0", "1")]  # type: ignore[attr-defined]
    name = next(name for name in base[0] if name.endswith("head.weight"))
    assert not torch.equal(base[0][name], base[1][name])


def test_augmentation_inside_a_graph(tmp_path: Path) -> None:
    def logs(name: str) -> bytes:
        ended = run(
            data={"name": "digits", "augment": ["flip", {"crop": 1}]},
            partition={"kind": "iid", "clients": 4},
            models=["conv-small", "conv-large"],
            method="local",
            training={"rounds": 3, "batch_size": 16},
            engine={"device": "cuda"},
            out=tmp_path / name,
        )
        return (ended.folder / "metrics.jsonl").read_bytes()

    assert logs("a") == logs("b")


class ReadsBack(Local):
    name = ""

    @client_step
    def train(self, client: Client) -> Content | None:
        fit(client, self.loss)
        return None

    def loss(self, client: Client, batch: Batch) -> Tensor:
        value = super().loss(client, batch)
        return value * 2 if value.item() > 1e9 else value


def test_what_cannot_be_captured_runs_eagerly_with_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(ReadsBack, "name", "reads-back")
    monkeypatch.setitem(_registry, "reads-back", ReadsBack)
    made = federate([64, 64], {"name": "reads-back"}, ["cnn5"])
    reference = federate([64, 64], {"name": "local"}, ["cnn5"])
    played = play(made, engine(made.clients, notice=notices.append))
    assert len(notices) == 1
    assert "cannot be captured" in notices[0]
    assert worst(states(play(reference, SerialEngine(reference.clients))), states(played)) < 1e-3


class FailsOnce(Local):
    """Its second capture fails half-way, after dropout has drawn numbers in it."""

    name = ""
    captures: ClassVar[list[Any]] = []

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """With dropout on the images."""
        x = torch.nn.functional.dropout(batch.x, 0.5)
        value = client.task.loss(client["model"](x), batch.y, batch.weight)
        if torch.cuda.is_current_stream_capturing() and self.captures:
            self.captures.pop(0)(value)
        return value


def _raise(error: Exception) -> Callable[[Tensor], None]:
    def fail(value: Tensor) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "notice"),
    [
        (Tensor.item, "cannot be captured"),
        (_raise(ConfigError("not now")), "cannot be captured and runs eagerly: not now"),
        (_raise(torch.OutOfMemoryError("CUDA out of memory")), "GPU memory ran out"),
    ],
)
def test_a_failed_capture_leaves_no_trace(
    fail: Callable[[Tensor], Any], notice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailsOnce, "name", "fails-once")
    monkeypatch.setitem(_registry, "fails-once", FailsOnce)
    notices: list[str] = []
    made = [federate([64, 64, 64], {"name": "fails-once"}, ["cnn5"]) for _ in range(2)]
    expected = states(play(made[0], engine(made[0].clients), rounds=3))
    monkeypatch.setattr(FailsOnce, "captures", [lambda value: None, fail])
    assert (
        worst(expected, states(play(made[1], engine(made[1].clients, notice=notices.append), rounds=3)))
        < 1e-3
    )
    assert len(notices) == 1
    assert notice in notices[0]


def test_a_graph_that_finds_no_memory_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [federate([64, 64, 64], {"name": "local"}, ["cnn5"]) for _ in range(2)]
    expected = states(play(made[0], engine(made[0].clients)))
    end, ended, notices = torch.cuda.CUDAGraph.capture_end, [], []

    def fail_once(graph: torch.cuda.CUDAGraph) -> None:
        end(graph)
        ended.append(graph)
        if len(ended) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fail_once)
    assert worst(expected, states(play(made[1], engine(made[1].clients, notice=notices.append)))) < 1e-3
    assert "GPU memory ran out" in notices[0]
    ended.clear()
    gc.collect()
    torch.cuda.empty_cache()  # refuses where a pool was given back twice


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_other_precisions_train(precision: str) -> None:
    made = federate([64, 48], {"name": "fedavg"}, ["resnet10"], precision=precision)
    played = play(made, engine(made.clients))
    assert all(bool(value.isfinite().all()) for value in states(played).values())


def test_fewer_slots_than_clients() -> None:
    sizes = [40] * 10
    made = [federate(sizes, FEDMRL, CNNS) for _ in range(2)]
    many, few = (
        play(made[0], engine(made[0].clients)),
        play(made[1], engine(made[1].clients, slots=5, streams=2)),
    )
    assert worst(states(many), states(few)) < 1e-6


@pytest.mark.parametrize("method", method_names())
@pytest.mark.parametrize(
    "check",
    # One is about captured steps on any device, the other changes the data under a serial engine.
    [check for check in CHECKS if check not in (a_captured_step_is_right, only_training_rows_matter)],
    ids=lambda check: check.__name__,
)
def test_the_contract_holds_on_the_gpu(method: str, check: Check) -> None:
    options, models = contract_case(method)
    check(Bench(options, models, make_engine=engine, engine={"device": "cuda"}))


@pytest.mark.parametrize("method", method_names())
def test_nobody_waits_for_the_device_in_a_client_step(method: str) -> None:
    place = federate([64] * 8, {"name": method} | OPTIONS.get(method, {}), MODELS.get(method, CNNS))
    notices: list[str] = []
    played = play(place, engine(place.clients, notice=notices.append), rounds=3)
    assert not notices  # every step was captured
    inner = played.engine.run

    def without_waiting(requests: Sequence[Request]) -> list[Outcome]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    played.engine.run = without_waiting  # type: ignore[method-assign]
    assert not played.play(4, place.population.ids).failures


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedtgp", "server_epochs": 20},
        {"name": "feddf", "steps": 20},
        {"name": "fedgen", "steps": 20},
        {"name": "fedallrep"},
    ],
    ids=lambda method: method["name"],
)
def test_the_server_trains_from_graphs_as_it_does_step_by_step(method: Any) -> None:
    made = [federate([64] * 6, method, CNNS) for _ in range(2)]
    eager, captured = (engine(one.clients, notice=pytest.fail) for one in made)
    eager.at_server = lambda server: contextlib.nullcontext()
    found = [states(play(one, each, 3)) for one, each in zip(made, (eager, captured), strict=True)]
    assert worst(*found) < 1e-3
    assert captured._server.graphs


def test_a_short_last_batch_is_captured_too() -> None:
    place = federate([50] * 4, {"name": "local"}, ["cnn5"])
    busy = engine(place.clients)
    play(place, busy, rounds=1)
    for slot in busy.slots.of_kind(place.clients.kind("0")):
        (workspace,) = slot.client.workspaces.values()
        assert sorted(slot.runner.steps[workspace].by_sizes) == [(2,), (16,)]


def test_when_memory_runs_out_the_round_is_repeated_with_fewer_slots() -> None:
    place = federate([48] * 6, FEDMRL, CNNS[:2])
    expected = states(play(place, engine(place.clients)))
    told: list[str] = []
    short = engine(place.clients, notice=told.append)
    inner, calls = short.runner.serve, []

    def serve(request: Request, *places: Any) -> Any:
        calls.append(request.client)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(request, *places)

    short.runner.serve = serve
    assert worst(expected, states(play(place, short))) < 1e-5
    assert told == ["GPU memory ran out with 4 clients in flight; going on with 2 at once"]
    assert short.slots.limit == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_more_kinds_of_clients_than_slots(slots: int) -> None:
    place = federate([48] * 6, FEDMRL, CNNS)
    expected = states(play(place, engine(place.clients)))
    few = engine(place.clients, slots=slots)
    assert worst(expected, states(play(place, few))) < 1e-5
    assert len(few.slots.all()) == slots


def test_a_run_leaves_no_memory_behind(tmp_path: Path) -> None:
    """All but a few of the allocator's smallest pieces (2 MiB): where they lie differs from run to run."""

    def held_after(name: str) -> int:
        run(
            data="digits",
            partition={"kind": "iid", "clients": 6},
            models=["conv-small", "conv-large"],
            method={"name": "fedmrl", "small": "conv-small", "d1": 8},
            training={"rounds": 2, "batch_size": 16},
            engine={"device": "cuda"},
            out=tmp_path / name,
        )
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = held_after("a")
    torch.cuda.reset_peak_memory_stats()
    after = [held_after(name) for name in "bcdef"]
    taken = torch.cuda.max_memory_reserved() - before
    assert max(after) - before < taken / 10, (before, after, taken)
