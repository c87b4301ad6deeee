"""Worker processes: the same bits with any number of them, and no trace of one that dies."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import potluck.engine.workers
import potluck.testing
from contract_cases import contract_case
from helpers import StopAfter
from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.packed import Packed, State
from potluck.core.state import Report
from potluck.engine.cohort import Cohort
from potluck.engine.numerics import threads
from potluck.engine.protocol import Answer, Engine, Examination, Failure, Request, Stamp
from potluck.engine.rounds import Rounds
from potluck.engine.runner import StoringEngine
from potluck.engine.serial import SerialEngine
from potluck.engine.store.client_store import ClientStore
from potluck.engine.transactions import Done, Errand
from potluck.engine.wire import TensorFrame, done_frame, errand_frame, read_done, read_errand
from potluck.engine.workers import WorkerFault, WorkersEngine, worker_count
from potluck.errors import ConfigError, RunError, StepFailed
from potluck.experiment.schema import Experiment
from potluck.federation.builder import ClientBuilder
from potluck.methods.fedmrl import FedMRL
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted
from potluck.testing.bench import Bench

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 5, "validation": 0.1},
    "models": ["mlp-small", "conv-large"],
    "training": {
        "rounds": 3,
        "participation": 0.6,
        "batch_size": 64,
        "optimizer": {"lr": 0.05, "momentum": 0.9},
    },
    "checkpoint": {"every": 0},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedmrl": {"name": "fedmrl", "d1": 16},
    "scaffold": {"name": "scaffold"},
    "fedproto": {"name": "fedproto"},
    "fedin": {
        "name": "fedin",
        "noise": 0.8,
        "project": "averaged",
        "project_in": [16, 4, 4],
        "project_out": 64,
    },
    "fedre": {"name": "fedre", "fixed": True, "noise": 0.1},
}
EVERYONE = ("0", "1", "2", "3")


def experiment(method: str = "fedmrl", workers: int = 2) -> Experiment:
    engine = {"device": "cpu", "workers": workers}
    return Experiment.make(**SETTINGS, method=METHODS[method], engine=engine)


def logs(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")]


def children(parent: int) -> set[int]:
    """The living processes a process has started."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(above) == parent and state != "Z":
            found.add(int(entry.parent.name))
    return found


def alive(process: int) -> bool:
    """Whether a process has not ended, be it that nobody has asked for its end yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come; a test that waits for ever would hide what is wrong."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """Every test ends with as many processes as it began with, and ends at all."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError("a worker hangs")

    before = children(os.getpid())
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    assert children(os.getpid()) <= before


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[bytes]]:
    """The logs of a run without worker processes."""

    @functools.lru_cache
    def played(method: str = "fedmrl") -> list[bytes]:
        out = tmp_path_factory.mktemp(method) / "run"
        return logs(run(experiment(method, 1), out=out).folder)

    return played


# --- the same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, alone: Callable[..., list[bytes]], method: str, workers: int
) -> None:
    assert logs(run(experiment(method, workers), out=tmp_path / "run").folder) == alone(method)


def test_a_server_that_sums_over_kernels_gets_the_same_bits(two_workers: type[WorkersEngine]) -> None:
    """What a convolution's weights look like in memory depends on the client, not on whether they travelled."""
    case = contract_case("inco")
    alone = Bench(*case).play([EVERYONE, EVERYONE]).states()
    spread = Bench(*case, make_engine=two_workers).play([EVERYONE, EVERYONE]).states()
    assert all(
        torch.equal(value, (spread[holder] or {})[name])
        for holder, state in alone.items()
        for name, value in (state or {}).items()
    )


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_workers(
    tmp_path: Path, alone: Callable[..., list[bytes]], before: int, after: int
) -> None:
    with pytest.raises(Interrupted):
        run(experiment(workers=before), out=tmp_path / "run", watcher=StopAfter(2))
    resume(tmp_path / "run", experiment=experiment(workers=after))
    assert logs(tmp_path / "run") == alone()


class TwoWorkers(WorkersEngine):
    """Two workers, closed when the test is over."""

    opened: list[WorkersEngine] = []

    def __init__(self, clients: ClientBuilder, store: ClientStore | None = None) -> None:
        super().__init__(clients, store, workers=2)
        self.opened.append(self)


@pytest.fixture
def two_workers() -> Iterator[type[WorkersEngine]]:
    yield TwoWorkers
    assert any(engine.workers for engine in TwoWorkers.opened)
    while TwoWorkers.opened:
        TwoWorkers.opened.pop().close()


@pytest.mark.parametrize(
    "check",
    [
        potluck.testing.contract.clients_of_every_kind_work,
        potluck.testing.contract.state_survives,
        potluck.testing.contract.only_declared_crosses,
        potluck.testing.contract.no_global_randomness,
        potluck.testing.contract.order_does_not_matter,
        potluck.testing.contract.faults_leave_no_trace,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("method", ["fedmrl", "scaffold"])
def test_the_contract_holds(
    two_workers: type[WorkersEngine], method: str, check: Callable[[potluck.testing.bench.Bench], None]
) -> None:
    check(potluck.testing.bench.Bench(METHODS[method], make_engine=two_workers))


# --- workers that fail ----------------------------------------------------------------------------------


class FourClients:
    """Four clients, two workers, and something that happens when client 1 trains in round 2."""

    def __init__(self, event: Callable[[], None] = lambda: None, workers: int = 2, in_each: int = 1) -> None:
        self.federation = potluck.testing.bench.Bench("local").build()
        self._plan(event)
        self.engine: StoringEngine = SerialEngine(self.federation.clients)
        if workers:
            self.engine = WorkersEngine(self.federation.clients, workers=workers, threads=in_each)
        self.rounds = Rounds(self.federation, self.engine)

    def _plan(self, event: Callable[[], None]) -> None:
        train = self.federation.method.train  # type: ignore[attr-defined]

        @functools.wraps(train)
        def eventful(client: Client) -> Any:
            if (client.id, client.round) == ("1", 2):
                event()
            return train(client)

        self.federation.method.train = eventful  # type: ignore[attr-defined]

    def play(self, *cohorts: Sequence[str]) -> Cohort:
        for number, cohort in enumerate(cohorts, 1):
            with threads(1):
                played = self.rounds.play(number, tuple(cohort))
        return played

    def states(self) -> dict[str, State | None]:
        records = {client: self.engine.store.peek(client) for client in self.federation.population.ids}
        return {client: record.base if record else None for client, record in records.items()}

    def __enter__(self) -> FourClients:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()


def same(a: dict[str, State | None], b: dict[str, State | None]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(value, (b[client] or {})[name])
        for client, state in a.items()
        for name, value in (state or {}).items()
    )


def expected(*cohorts: Sequence[str]) -> dict[str, State | None]:
    """What the serial engine makes of these rounds."""
    alone = FourClients(workers=0)
    alone.play(*cohorts)
    return alone.states()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_replaced_and_leaves_no_trace() -> None:
    with FourClients(die) as federation:
        federation.play(EVERYONE)
        before = {worker.process for worker in federation.engine.workers}  # type: ignore[attr-defined]
        cohort = federation.rounds.play(2, EVERYONE)
        assert cohort.failures == {
            "1": "client 1: its worker process was killed by signal 9; if memory ran out, lower engine.workers"
        }
        assert federation.rounds.accepted == {"0": 2, "1": 1, "2": 2, "3": 2}
        assert same(federation.states(), expected(EVERYONE, ("0", "2", "3")))
        assert not federation.rounds.play(3, EVERYONE).failures
        after = {worker.process for worker in federation.engine.workers}  # type: ignore[attr-defined]
        assert len(before - after) == len(after - before) == 1


def test_a_worker_that_dies_at_rest_is_replaced_unnoticed() -> None:
    with FourClients() as federation:
        federation.play(EVERYONE)
        workers = federation.engine.workers  # type: ignore[attr-defined]
        for worker in workers:
            os.kill(worker.process, signal.SIGKILL)
            os.waitid(os.P_PID, worker.process, os.WEXITED | os.WNOWAIT)
        assert not federation.rounds.play(2, EVERYONE).failures
        assert same(federation.states(), expected(EVERYONE, EVERYONE))


def test_workers_that_cannot_live_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.engine.workers, "_serve", lambda *_: os._exit(3))
    with FourClients() as federation:
        request = Request("0", ("train",), Message(), federation.rounds.stamp("0", 1, 1, 1))
        (outcome,) = federation.engine.run([request])
    assert isinstance(outcome, Failure)
    assert outcome.reason.startswith("client 0: its worker process")


def test_no_room_for_a_process_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with FourClients() as federation, pytest.raises(RunError, match=r"unavailable\); lower engine.workers"):
        federation.play(EVERYONE)


def fault() -> None:
    raise ValueError("this model has a hole")


def test_a_fault_reaches_the_parent_with_its_traceback() -> None:
    with FourClients(fault) as federation:
        federation.play(EVERYONE)
        with pytest.raises(WorkerFault, match="ValueError: this model has a hole") as caught:
            federation.rounds.play(2, EVERYONE)
        traceback, who = caught.value.__notes__
        assert "in fault" in traceback
        assert "while client 1 (conv-large) was at work" in who
        assert not children(os.getpid())
        federation.engine.settle(2, EVERYONE, ())
        assert same(federation.states(), expected(EVERYONE))
        federation.rounds.play(3, EVERYONE)


def refuse() -> None:
    raise StepFailed("the sensor is off")


def test_a_sentence_about_a_client_is_its_failure() -> None:
    with FourClients(refuse) as federation:
        assert federation.play(EVERYONE, EVERYONE).failures == {"1": "client 1: the sensor is off"}


def test_ctrl_c_in_the_middle_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with FourClients() as federation:
        federation.play(EVERYONE)

        def press(channels: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(potluck.engine.workers, "wait", press)
            with pytest.raises(KeyboardInterrupt):
                federation.rounds.play(2, EVERYONE)
        assert not children(os.getpid())
        federation.engine.settle(2, EVERYONE, ())
        federation.rounds.play(2, EVERYONE, attempt=2)
        assert same(federation.states(), expected(EVERYONE, EVERYONE))


def test_workers_leave_signals_to_the_parent() -> None:
    with FourClients() as federation:
        federation.play(EVERYONE)
        before = [worker.process for worker in federation.engine.workers]  # type: ignore[attr-defined]
        for process in before:
            os.kill(process, signal.SIGINT)
            os.kill(process, signal.SIGTERM)
        assert not federation.rounds.play(2, EVERYONE).failures
        assert before == [worker.process for worker in federation.engine.workers]  # type: ignore[attr-defined]


def test_a_repeated_exchange_is_answered_without_a_worker() -> None:
    with FourClients() as federation:
        request = Request("0", ("train",), Message(), federation.rounds.stamp("0", 1, 1, 1))
        (first,) = federation.engine.run([request])
        assert isinstance(first, Answer)
        for worker in federation.engine.workers:  # type: ignore[attr-defined]
            os.kill(worker.process, signal.SIGSTOP)
        assert federation.engine.run([request])[0] is first


def test_a_second_exchange_goes_on_from_the_first() -> None:
    def trained_twice(federation: FourClients) -> dict[str, State | None]:
        with threads(1):
            for exchange in (1, 2):
                stamp = federation.rounds.stamp("0", 1, 1, exchange)
                federation.engine.run([Request("0", ("train",), Message(), stamp)])
        record = federation.engine.store.record("0")
        assert record.work is not None
        return {"0": record.work.state, "counters": dict.fromkeys(record.work.counters, torch.ones(1))}

    with FourClients() as federation, FourClients(workers=0) as other:
        assert same(trained_twice(federation), trained_twice(other))


def test_an_examination_measures_the_same_and_changes_nothing() -> None:
    def measured(federation: FourClients) -> tuple[Any, dict[str, State | None]]:
        federation.play(EVERYONE)
        engine: Engine = federation.engine
        stamps = {client: federation.rounds.stamp(client, 1, 1) for client in EVERYONE}
        asked = [Examination(client, None, stamps[client], ("model",)) for client in EVERYONE]
        answers = [one for one in engine.examine(asked) if isinstance(one, Answer)]
        return [{key: value.item() for key, value in one.report.metrics.items()} for one in answers], (
            federation.states()
        )

    with FourClients() as federation, FourClients(workers=0) as other:
        (metrics, states), (wanted, alike) = measured(federation), measured(other)
    assert metrics == wanted
    assert len(metrics) == len(EVERYONE)
    assert same(states, alike)


# --- processes ------------------------------------------------------------------------------------------


def multiply() -> None:
    torch.ones(700, 700) @ torch.ones(700, 700)


def test_several_threads_in_a_worker() -> None:
    with threads(2):
        multiply()  # this thread has a team of OpenMP now, and its forks wait for a team they do not have
    with FourClients(multiply, workers=1, in_each=2) as federation:
        assert not federation.play(EVERYONE, EVERYONE).failures


def aside(work: Callable[[], None]) -> int:
    """Do something in a process of its own, with a process group of its own; it ends with 0 if all went well."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_ctrl_c_at_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Callable[..., list[bytes]]
) -> None:
    train = FedMRL.train

    @functools.wraps(train)
    def pressed(self: FedMRL, client: Client) -> Any:
        if client.round == 2:
            os.killpg(0, signal.SIGINT)  # it goes to every process of the terminal
        return train(self, client)

    def play() -> None:
        monkeypatch.setattr(FedMRL, "train", pressed)
        with pytest.raises(Interrupted):
            run(experiment(), out=tmp_path / "run")
        assert not children(os.getpid())

    assert os.waitpid(aside(play), 0)[1] == 0
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == alone()[0].partition(b'{"round": 2')[0]
    resume(tmp_path / "run")
    assert logs(tmp_path / "run") == alone()


def test_workers_end_when_their_parent_is_killed() -> None:
    read, write = os.pipe()

    def work_for_ever() -> None:
        os.write(write, b"at work\n")
        time.sleep(1000)

    def play() -> None:
        federation = FourClients(work_for_ever)
        federation.play(EVERYONE)
        processes = [worker.process for worker in federation.engine.workers]  # type: ignore[attr-defined]
        os.write(write, json.dumps(processes).encode() + b"\n")
        federation.rounds.play(2, EVERYONE)

    parent = aside(play)
    with os.fdopen(read, "rb") as told:  # line by line: what was written twice may arrive at once
        processes = json.loads(told.readline())
        assert len(processes) == 2
        assert told.readline() == b"at work\n"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: not any(map(alive, processes)))
    os.close(write)


# --- frames ---------------------------------------------------------------------------------------------

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(draw(st.sampled_from(KINDS)))
    return value.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else value


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.text(max_size=5).filter(bool), tensors(), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    st.booleans(),
)
def test_frames_arrive_as_they_were(
    group: dict[str, torch.Tensor], counters: dict[str, int], packed: bool
) -> None:
    flat = torch.arange(256.0)
    layout = (("model/w", 0, (8, 8), (8, 1)), ("model/b", 64, (3,), (1,)))
    state: State = Packed(flat, layout, group) if packed else group
    here, there = socket.socketpair()
    with here, there:
        TensorFrame({"counters": counters}, {"state": state, "empty": {}}).send(here)
        frame = TensorFrame.receive(there)
    got = frame.groups["state"]
    assert frame.note == {"counters": counters}
    assert frame.groups["empty"] == {}
    assert isinstance(got, Packed) == packed
    if isinstance(got, Packed):
        assert got.layout == layout
        assert torch.equal(got.flat, flat)
        got = got.loose
    assert list(got) == list(group)
    assert all(got[key].dtype == value.dtype and torch.equal(got[key], value) for key, value in group.items())


@pytest.mark.parametrize("first", [True, False])
def test_an_errand_arrives_as_it_was(first: bool) -> None:
    stamp, down = Stamp("tiny", 3, 2, 4, 1), Message({"small": {"w": torch.ones(2)}})
    here, there = socket.socketpair()
    with here, there:
        for request in (
            Request("a", ("one", "two"), down, stamp, "setup"),
            Examination("a", down, stamp, ("x", "y"), "global"),
            Examination("a", None, stamp, ("x",)),
        ):
            for state in (None, {"model/w": torch.zeros(3)}):
                errand_frame(Errand(request, state, {"batches:train": 2}, first)).send(here)
                got = read_errand(TensorFrame.receive(there))
                assert replace(got.request, down=None) == replace(request, down=None)  # type: ignore[arg-type]
                assert (got.request.down is None) == (request.down is None)
                assert {**(got.request.down or {})}.keys() == {**(request.down or {})}.keys()
                assert (got.counters, got.first) == ({"batches:train": 2}, first)
                assert (got.state is None) == (state is None)


@pytest.mark.parametrize("state", [None, {"model/w": torch.ones(3)}])
def test_finished_work_arrives_as_it_was(state: State | None) -> None:
    numbers = {"loss": torch.tensor(0.1), "nan": torch.tensor(torch.nan), "sum": torch.tensor(1 / 3).double()}
    done = Done(
        Answer("a", Message({"w": torch.ones(2)}), Report(7, numbers, {})), state, {"batches:train": 2}
    )
    here, there = socket.socketpair()
    with here, there:
        done_frame(done).send(here)
        got = read_done(TensorFrame.receive(there))
    assert (got.answer.client, got.answer.report.steps, got.counters) == ("a", 7, {"batches:train": 2})
    assert torch.equal(got.answer.up["w"], torch.ones(2))
    assert (got.state is None) == (state is None)
    back = got.answer.report.losses
    assert [value.dtype for value in back.values()] == [value.dtype for value in numbers.values()]
    assert all(torch.equal(back[name].nan_to_num(9), numbers[name].nan_to_num(9)) for name in numbers)


@pytest.mark.parametrize("cut", [4, 20, 90])
def test_half_a_frame_is_the_end(cut: int) -> None:
    sent, taken = socket.socketpair()
    with sent, taken:
        TensorFrame({"a": 1}, {"state": {"w": torch.ones(5)}}).send(sent)
        whole = taken.recv(1000)
    assert len(whole) > 90
    here, there = socket.socketpair()
    with there:
        here.sendall(whole[:cut])
        here.close()
        with pytest.raises(EOFError):
            TensorFrame.receive(there)


# --- how many -------------------------------------------------------------------------------------------


def federate(**changes: Any) -> ClientBuilder:
    return (
        Experiment.make(
            **{**SETTINGS, "method": "local", "engine": {"device": "cpu"}, **changes},
        )
        .build()
        .clients
    )


def test_auto_is_a_worker_per_core_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert worker_count(federate(), 100, 1) == 1
    heavy = federate(training={"epochs": 1000})
    for cohort, per_client, wanted in [(100, 1, 8), (3, 1, 3), (100, 4, 2), (100, 16, 1)]:
        assert worker_count(heavy, cohort, per_client) == wanted
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert worker_count(heavy, 100, 1) == 1


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "two"])
def test_a_wrong_number_of_workers_is_named(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.workers: give a number of processes, 1 or more, or auto"
    ):
        Experiment.make(**SETTINGS, method="local", engine={"workers": value})
