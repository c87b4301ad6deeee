"""The client store: one budget over memory and disk, whose size changes nothing but the time."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from potluck.core.message import Message
from potluck.core.packed import Packed, State
from potluck.core.state import Report
from potluck.engine.evaluation.examiner import Examiner
from potluck.engine.protocol import Answer
from potluck.engine.settings import EngineSettings
from potluck.engine.store.budget import Budget
from potluck.engine.store.checkpoints import Checkpoints
from potluck.engine.store.client_store import ClientStore
from potluck.engine.store.state_files import StateFiles
from potluck.engine.store.transfers import Copy, Transfers, moved, size
from potluck.engine.transactions import Work
from potluck.errors import ConfigError, RunError
from potluck.experiment.schema import Experiment
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted
from potluck.runs.observers import Observer, RoundEnd

LENGTH = 96  # numbers in a state
BYTES = 4 * LENGTH + 8
LAYOUT = (("model/a", 0, (4, 8), (8, 1)), ("model/b", 64, (32,), (1,)))


def packed(value: float, device: str = "cpu") -> Packed:
    flat = torch.full((LENGTH,), float(value), device=device)
    return Packed(flat, LAYOUT, {"model/count": torch.tensor(int(value), device=device)})


def value_of(state: State | None) -> float | None:
    """The one number a test state is made of, after a look at all of it."""
    if state is None:
        return None
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "model/a": (4, 8),
        "model/b": (32,),
        "model/count": (),
    }
    numbers = {number for tensor in state.values() for number in tensor.flatten().tolist()}
    assert len(numbers) == 1
    return numbers.pop()


def train(store: ClientStore, client: str, state: State, round_: int = 1) -> None:
    store.record(client).work = Work(round_, 1, 1, state, Answer(client, Message(), Report()))


def states_in_memory(store: ClientStore) -> set[str]:
    return {client for client, kept in store._kept.items() if kept.host is not None}


def client_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("clients-*")}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were written."""
    paths: list[Path] = []
    write = StateFiles.write

    def noted(self: StateFiles, state: State) -> Path:
        paths.append(write(self, state))
        return paths[-1]

    monkeypatch.setattr(StateFiles, "write", noted)
    return paths


def test_the_least_recently_used_leaves_first(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=3 * BYTES), tmp_path)
    for client in "abc":
        store.put(client, packed(ord(client)))
    assert states_in_memory(store) == {"a", "b", "c"}
    assert value_of(store.fetch("a")) == ord("a")
    store.put("d", packed(ord("d")))
    assert states_in_memory(store) == {"a", "c", "d"}
    assert value_of(store.fetch("b")) == ord("b")
    assert states_in_memory(store) == {"a", "b", "d"}
    assert store.host.used + store.leaving.used == 3 * BYTES
    store.close()


def test_a_state_that_comes_back_is_packed_as_it_was(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=BYTES), tmp_path)
    first = packed(1)
    store.put("a", first)
    store.put("b", packed(2))
    again = store.fetch("a")
    assert isinstance(again, Packed)
    assert again is not first
    assert again.layout == first.layout
    assert again.flat.shape == first.flat.shape
    assert all(torch.equal(again[name], first[name]) for name in first)
    store.close()


def test_plain_and_transposed_states_survive_the_disk(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=1), tmp_path)
    image = torch.arange(48.0).view(2, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    state = {"model/w": image, "mask": torch.tensor([True, False]), "none": torch.zeros(0)}
    store.put("a", state)
    flat = torch.arange(48.0)
    layout = (("w", 0, (2, 3, 4, 2), image.stride()),)
    store.put("b", Packed(flat, layout, {}))
    store.put("c", {})
    plain, other = store.fetch("a"), store.fetch("b")
    assert plain is not None
    assert all(torch.equal(plain[name], state[name]) for name in state)
    assert isinstance(other, Packed)
    assert torch.equal(other.flat, flat)
    assert store.fetch("c") == {}
    store.close()


def test_stores_that_share_a_folder_never_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, look = StateFiles(tmp_path), Path.glob

    def slowly(self: Path, pattern: str) -> list[Path]:
        time.sleep(0.2)  # all threads are here before the first has its number
        return [*look(self, pattern)]

    monkeypatch.setattr(Path, "glob", slowly)
    with ThreadPoolExecutor(8) as pool:
        states = [{"x": torch.full((3,), float(number))} for number in range(8)]
        paths = [*pool.map(files.write, states)]
    assert len(set(paths)) == 8
    for path, state in zip(paths, states, strict=True):
        torch.testing.assert_close(safetensors.torch.load_file(path), state, rtol=0, atol=0)


def test_a_state_is_written_once(tmp_path: Path, written: list[Path]) -> None:
    store, checkpoints = ClientStore(Budget(host=BYTES), tmp_path), Checkpoints(tmp_path)
    for client in "abc":
        store.put(client, packed(ord(client)))
    for _ in range(3):
        for client in "abc":
            assert value_of(store.fetch(client)) == ord(client)
        checkpoints.save(1, {}, store.save(), {})
    checkpoints.wait()
    assert len(written) == 3
    store.put("b", packed(7))
    checkpoints.save(2, {}, store.save(), {})
    checkpoints.wait()
    assert len(written) == 4
    assert client_files(tmp_path) == {
        path.name for path in written
    }  # an earlier checkpoint names the old one
    checkpoints.close()
    store.close()


def test_states_at_rest_make_room_for_work(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=3 * BYTES), tmp_path)
    for client in "abc":
        store.put(client, packed(ord(client)))
    train(store, "a", packed(11))
    train(store, "b", packed(12))
    assert states_in_memory(store) == {"c"}
    record = store.peek("a")
    assert record is not None
    assert value_of(record.worked()) == 11
    assert value_of(record.base) == ord("a")
    store.settle("a", 1)
    store.settle("b", -1)
    assert value_of(store.fetch("a")) == 11
    assert value_of(store.fetch("b")) == ord("b")
    store.close()


def test_the_work_of_a_large_round_leaves_memory_too(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=2 * BYTES), tmp_path)
    for number, client in enumerate("abcdef"):
        train(store, client, packed(number))
    assert store.host.used + store.leaving.used <= 2 * BYTES
    assert len([*tmp_path.glob("clients-*")]) >= 4
    records = [store.peek(client) for client in "abcdef"]
    assert [value_of(record.worked()) for record in records if record is not None] == [0, 1, 2, 3, 4, 5]
    for client in "abc":
        store.settle(client, 1)
    for client in "def":
        store.settle(client, -1)
    assert [value_of(store.fetch(client)) for client in "abc"] == [0, 1, 2]
    assert [*store.held()] == ["a", "b", "c"]
    store.mark(())  # the files of the undone work go
    assert len([*tmp_path.glob("clients-*")]) <= 3
    store.close()


def test_untouched_clients_have_no_state(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=BYTES), tmp_path)
    assert store.peek("a") is None
    train(store, "a", packed(1))
    store.settle("a", -1)
    assert store.peek("a") is None
    assert store.fetch("a") is None
    assert list(store) == []
    assert store.save() == {}
    store.close()


def test_a_round_is_taken_back_and_leaves_no_file(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=1), tmp_path)
    store.put("a", packed(1))
    store.put("b", packed(2))
    undo = store.mark(["a", "b", "new"])
    for client in ("a", "b", "new"):
        train(store, client, packed(9))
        store.settle(client, 1)
    assert value_of(store.fetch("new")) == 9
    undo()
    assert store.peek("new") is None
    assert value_of(store.fetch("a")) == 1
    assert value_of(store.fetch("b")) == 2
    store.mark([])
    store._writer.shutdown()
    names = {kept.saved.result().name for kept in store._kept.values() if kept.saved is not None}
    assert client_files(tmp_path) == names
    store.close()
    assert client_files(tmp_path) == set()


def test_prefetch_reads_what_fits_in_the_background(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=6 * BYTES), tmp_path)
    for client in "abcdefghijkl":
        store.put(client, packed(ord(client)))
    assert not states_in_memory(store) & {"a", "b", "c", "d"}
    store.prefetch(["nobody", "a", "b", "c", "d"])
    coming = {client for client, kept in store._kept.items() if kept.reading is not None}
    assert coming == {"a", "b", "c"}
    assert store.host.used + store.leaving.used <= 6 * BYTES
    for client in "abcd":
        assert value_of(store.fetch(client)) == ord(client)
    store.close()


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    store = ClientStore(Budget(host=BYTES), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", full)
        store.put("a", packed(1))
        with pytest.raises(RunError, match=r"cannot write .*clients-.*: no space left"):
            store.put("b", packed(2))
    assert value_of(store.fetch("a")) == 1
    assert value_of(store.fetch("b")) == 2
    store.close()


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    store = ClientStore(Budget(host=BYTES), tmp_path)
    store.put("a", packed(1))
    store.put("b", packed(2))
    next(tmp_path.glob("clients-*")).write_bytes(b"short")
    with pytest.raises(RunError, match=r"client state in .*clients-00000001.* cannot be read"):
        store.fetch("a")
    store.close()


def test_without_a_folder_nothing_leaves_memory() -> None:
    store = ClientStore(Budget(host=1))
    for client in "abc":
        store.put(client, packed(ord(client)))
    assert states_in_memory(store) == {"a", "b", "c"}


class Pretended(Transfers):
    """A device that is not there: copies that are made at once."""

    def __init__(self) -> None:
        self.lowered = self.lifted = 0

    def holds(self, state: State) -> bool:
        return True

    def made_here(self, state: State) -> Copy:
        return Copy(state)

    def use(self, copy: Copy) -> State:
        return copy.state

    def lower(self, copy: Copy) -> Copy:
        self.lowered += 1
        return Copy(moved(copy.state, torch.clone))

    def lift(self, copy: Copy) -> Copy:
        self.lifted += 1
        return Copy(moved(copy.state, torch.clone))

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def with_a_device(store: ClientStore) -> Pretended:
    store._transfers = transfers = Pretended()
    return transfers


def test_states_go_down_one_step_at_a_time(tmp_path: Path) -> None:
    store = ClientStore(Budget(2 * BYTES, 2 * BYTES), tmp_path)
    transfers = with_a_device(store)
    for client in "abcdef":
        store.put(client, packed(ord(client)))
    assert {client for client, kept in store._kept.items() if kept.device is not None} == {"e", "f"}
    assert states_in_memory(store) == {"c", "d"}
    assert transfers.lowered == 4
    assert value_of(store.fetch("d")) == ord("d")
    assert value_of(store.fetch("f")) == ord("f")
    lowered = transfers.lowered
    assert value_of(store.fetch("e")) == ord("e")
    assert store._kept["d"].device is None
    assert transfers.lowered == lowered, "d still lay in the host's memory and needed no copy"
    store.close()


def test_where_memory_runs_out_half_of_the_states_leave_the_device(tmp_path: Path) -> None:
    store = ClientStore(Budget(99 * BYTES, 99 * BYTES), tmp_path)
    assert not store.give_way(), "this one has no device"
    with_a_device(store)
    for client in "abcd":
        store.put(client, packed(ord(client)))
    assert store.give_way()
    assert {client for client, kept in store._kept.items() if kept.device is not None} == {"c", "d"}
    assert value_of(store.fetch("a")) == ord("a")
    assert len(store.device) == 2, "no more may come back"
    assert store.give_way()
    assert not store.give_way(), "the one used last stays"
    store.close()


CLIENTS = [str(number) for number in range(6)]


class AgainstADict(RuleBasedStateMachine):
    """Any sequence of rounds, reads, checkpoints and crashes gives what a plain dict gives."""

    @initialize(room=st.integers(1, 8 * BYTES), device=st.none() | st.integers(0, 4 * BYTES))
    def begin(self, room: int, device: int | None) -> None:
        self.room, self.device = room, device
        self.folder = Path(tempfile.mkdtemp())
        self.numbers = itertools.count(1)
        self.saved: dict[str, float] = {}
        self.round = 0
        self._open()

    def _open(self) -> None:
        """As after a start or a resume."""
        self.store = ClientStore(Budget(self.device or 0, self.room), self.folder)
        if self.device is not None:
            with_a_device(self.store)
        self.checkpoints = Checkpoints(self.folder)
        loaded = self.checkpoints.load()
        for client, path in (loaded.clients if loaded else {}).items():
            self.store.put(client, path)
        self.model = dict(self.saved)

    @rule(
        cohort=st.sets(st.sampled_from(CLIENTS)), lost=st.sets(st.sampled_from(CLIENTS)), back=st.booleans()
    )
    def play(self, cohort: set[str], lost: set[str], back: bool) -> None:
        self.round += 1
        before, undo = dict(self.model), self.store.mark(sorted(cohort))
        for client in sorted(cohort):
            value = float(next(self.numbers))
            record = self.store.record(client)
            assert value_of(record.start()[0]) == self.model.get(client)
            state: State = packed(value) if value % 2 else dict(packed(value))
            train(self.store, client, state, self.round)
            if client not in lost:
                self.model[client] = value
        for client in sorted(cohort):
            self.store.settle(client, self.round if client not in lost else -1)
        if back:
            undo()
            self.model = before

    @rule(client=st.sampled_from(CLIENTS))
    def read(self, client: str) -> None:
        assert value_of(self.store.fetch(client)) == self.model.get(client)

    @rule(clients=st.lists(st.sampled_from(CLIENTS)))
    def prefetch(self, clients: list[str]) -> None:
        self.store.prefetch(clients)

    @rule()
    def checkpoint(self) -> None:
        self.checkpoints.save(self.round, {}, self.store.save(), {})
        self.saved = dict(self.model)

    @rule(polite=st.booleans())
    def stop(self, polite: bool) -> None:
        self._end(polite)
        self._open()
        assert client_files(self.folder) == self._named()

    def _end(self, polite: bool) -> None:
        self.checkpoints.close()
        if polite:
            self.store.close()
            assert client_files(self.folder) == self._named()
        self.store._writer.shutdown()
        self.store._reader.shutdown()

    def _named(self) -> set[str]:
        kept = self.folder.glob("checkpoint-*.json")
        return {name for one in kept for name in json.loads(one.read_text())["clients"].values()}

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "store"):
            used = self.store.host.used + self.store.leaving.used
            assert used <= (max(self.room, BYTES) if self.device is None else self.room)
            assert self.store.device.used <= max(self.device or 0, BYTES)
            assert used == sum(
                kept.nbytes
                for kept in self.store._kept.values()
                if kept.host is not None or kept.reading is not None
            )
            assert self.store.device.used == sum(
                kept.nbytes for kept in self.store._kept.values() if kept.device is not None
            )
            assert set(self.store) == set(self.store._kept) == set(self.model)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self._end(polite=True)
            shutil.rmtree(self.folder)


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 6},
    "models": ["mlp-small", "conv-large"],
    "method": {"name": "fedmrl", "d1": 16},
    "training": {"rounds": 4, "participation": 0.5, "batch_size": 64, "optimizer": {"lr": 0.05}},
    "checkpoint": {"every": 0},
}


def experiment(memory: str | int = "auto", **changes: Any) -> Experiment:
    return Experiment.make(**{**SETTINGS, "engine": {"memory": memory, "workers": 1}, **changes})


def one_client(**changes: Any) -> int:
    """The bytes of the largest client."""
    federation = experiment(**changes).build()
    return max(
        size(federation.clients.build_client(client).snapshot()) for client in federation.population.ids
    )


def assert_same_logs(one: Path, other: Path) -> None:
    for log in ("metrics.jsonl", "ledger.jsonl"):
        assert (one / log).read_bytes() == (other / log).read_bytes()


def assert_no_leak(folder: Path) -> None:
    kept = sorted((folder / "checkpoints").glob("checkpoint-*.json"))
    assert 1 <= len(kept) <= 3
    assert (folder / "checkpoints" / Checkpoints.MANIFEST).read_bytes() == kept[-1].read_bytes()
    expected = {Checkpoints.MANIFEST, *(path.name for path in kept)}
    for manifest in (json.loads(path.read_text()) for path in kept):
        expected |= {manifest["server"], *manifest["clients"].values()}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == expected


class Onlooker(Observer):
    """Notes how many files there are, and may stop the run."""

    def __init__(self, folder: Path, stop: int | None = None) -> None:
        self.folder, self.stop = folder, stop
        self.files: list[int] = []

    def round(self, end: RoundEnd) -> None:
        self.files.append(len(client_files(self.folder / "checkpoints")))
        if end.round == self.stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", [{"name": "fedmrl", "d1": 16}, "scaffold"])
@pytest.mark.parametrize("every", [0, 1000])
def test_a_run_on_disk_is_the_run_in_memory(
    tmp_path: Path, written: list[Path], method: str | dict[str, Any], every: int
) -> None:
    options: dict[str, Any] = {"method": method, "checkpoint": {"every": every}}
    whole = run(experiment(**options), out=tmp_path / "whole")
    in_memory = len(written)
    onlooker = Onlooker(tmp_path / "tiny")
    tiny = run(experiment(one_client(method=method), **options), out=tmp_path / "tiny", watcher=onlooker)
    assert len(written) > in_memory
    assert all(count > 0 for count in onlooker.files[1:])
    assert max(onlooker.files) <= 5 * 6
    assert_same_logs(tiny.folder, whole.folder)
    assert_no_leak(tiny.folder)
    assert_no_leak(whole.folder)


def test_a_stopped_run_goes_on_from_the_disk(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(experiment(one_client()), out=tmp_path / "run", watcher=Onlooker(tmp_path / "run", stop=3))
    resume(tmp_path / "run")
    assert_same_logs(tmp_path / "run", whole.folder)
    assert_no_leak(tmp_path / "run")


KILLED = """
import os, signal, sys
from potluck import Experiment
from potluck import Observer, run

class Kill(Observer):
    def round(self, end):
        if end.round == 3:
            os.kill(os.getpid(), signal.SIGKILL)

run(Experiment.load(sys.argv[1]), out=sys.argv[2], watcher=Kill())
"""


def test_a_killed_run_goes_on_from_the_disk(tmp_path: Path) -> None:
    whole = run(experiment(), out=tmp_path / "whole")
    asked = tmp_path / "tiny.yaml"
    asked.write_text(experiment(one_client()).to_yaml())
    ended = subprocess.run([sys.executable, "-c", KILLED, asked, tmp_path / "run"], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert 0 < json.loads((tmp_path / "run/checkpoints" / Checkpoints.MANIFEST).read_text())["round"] < 3
    resume(tmp_path / "run")
    assert_same_logs(tmp_path / "run", whole.folder)
    assert_no_leak(tmp_path / "run")


def test_a_fault_leaves_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    class Fault(Observer):
        def round(self, end: RoundEnd) -> None:
            if end.round == 3:
                raise ZeroDivisionError

    asked = experiment(one_client(), checkpoint={"every": 0})
    with pytest.raises(ZeroDivisionError):
        run(asked, out=tmp_path / "run", watcher=Fault())
    assert_no_leak(tmp_path / "run")
    whole = run(experiment(), out=tmp_path / "whole")
    resume(tmp_path / "run")
    assert_same_logs(tmp_path / "run", whole.folder)


def test_an_undone_round_is_played_again_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the round was settled, before its lines were written."""
    whole = run(experiment(), out=tmp_path / "whole")
    lines, stopped = Examiner.lines, []

    def stop_once(self: Examiner, when: Any, round_: int, answers: Any) -> Any:
        if round_ == 3 and not stopped:
            stopped.append(round_)
            raise KeyboardInterrupt
        return lines(self, when, round_, answers)

    monkeypatch.setattr(Examiner, "lines", stop_once)
    with pytest.raises(Interrupted):
        run(experiment(one_client()), out=tmp_path / "broken")
    assert_no_leak(tmp_path / "broken")
    resume(tmp_path / "broken")
    assert_same_logs(tmp_path / "broken", whole.folder)


def test_a_budget_too_small_for_a_client_is_refused_at_the_start(tmp_path: Path) -> None:
    needed = one_client()
    with pytest.raises(
        ConfigError, match=rf"engine\.memory: {needed - 1} bytes .* client 1 \(conv-large\).* {needed};"
    ):
        run(experiment(needed - 1), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("auto", None), ("20GB", 20 * 10**9), ("512MB", 512 * 10**6), ("1.5 gb", 1_500_000_000),
        ("2GiB", 2 * 2**30), ("7B", 7), ("123", 123), (4096, 4096), ("1kb", 1000),
    ],
)  # fmt: skip
def test_sizes(given: str | int, wanted: int | None) -> None:
    asked = EngineSettings.model_validate({"memory": given})
    assert asked.memory_bytes() == wanted
    assert EngineSettings.model_validate(asked.model_dump()) == asked


@pytest.mark.parametrize("given", ["", "lots", "-1GB", "20XB", "GB", True, -3, 1e30, "1e9", None, [1]])
def test_a_size_that_is_none(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.memory: give a size such as 20GB .* or auto"):
        experiment(given)


def test_what_auto_means() -> None:
    budget = Budget.of(None, torch.device("cpu"))
    assert budget.device == 0
    assert 0 < budget.host < 2**50
    assert Budget.of(1000, torch.device("cpu")) == Budget(0, 1000)


# On a GPU -------------------------------------------------------------------------------------------------


MILLION = 1 << 20


def on_a_gpu(test: Any) -> Any:
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def large(value: float) -> Packed:
    flat = torch.full((MILLION,), float(value), device="cuda")
    return Packed(flat, (("w", 0, (1024, 1024), (1024, 1)),), {"n": torch.tensor(int(value), device="cuda")})


def keep_busy(stream: torch.cuda.Stream) -> None:
    """A few milliseconds of work, so that what is queued after it has not been done when the host goes on."""
    with torch.cuda.stream(stream):
        matrix = torch.ones(4096, 4096, device="cuda")
        for _ in range(8):
            matrix = matrix @ matrix * 0


@on_a_gpu
@pytest.mark.parametrize(("device", "host"), [(3, 100), (3, 4), (1, 0)])
def test_states_come_back_bit_for_bit_while_streams_are_busy(tmp_path: Path, device: int, host: int) -> None:
    nbytes = 4 * MILLION + 8
    store = ClientStore(Budget(device * nbytes, host * 2 * nbytes), tmp_path, "cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call]
    expected = dict.fromkeys(map(str, range(16)), 0.0)
    seen: list[tuple[float, torch.Tensor]] = []
    main = torch.cuda.current_stream()
    for round_ in range(1, 6):
        cohort = [str((round_ * 5 + number) % 16) for number in range(8)]
        store.prefetch(str((int(client) + 5) % 16) for client in cohort)
        for number, client in enumerate(cohort):
            stream = streams[number % 4]
            stream.wait_stream(main)
            keep_busy(stream)
            with torch.cuda.stream(stream):
                record = store.record(client)
                state, _ = record.start()
                before = torch.zeros(MILLION, device="cuda") if state is None else state["w"].flatten()
                seen.append((expected[client], (before - expected[client]).abs().max()))
                fresh = large(0)
                fresh.flat.copy_(before).add_(round_ + int(client))
                train(store, client, fresh, round_)
            del record, state, before, fresh
        for stream in streams:
            main.wait_stream(stream)
        for client in cohort:
            store.settle(client, round_)
            expected[client] += round_ + int(client)
        assert store.device.used <= max(store.device.limit, nbytes)
        assert store.host.used + store.leaving.used <= store.host.limit
        for number, client in enumerate(expected):
            stream = streams[number % 4]
            stream.wait_stream(main)
            keep_busy(stream)
            with torch.cuda.stream(stream):
                state = store.fetch(client)
                if state is not None:
                    assert state["w"].is_cuda
                    seen.append((expected[client], (state["w"] - expected[client]).abs().max()))
                del state
        for stream in streams:
            main.wait_stream(stream)
    torch.cuda.synchronize()
    assert [(value, gap.item()) for value, gap in seen if gap.item() != 0] == []
    store.close()
    assert client_files(tmp_path) == set()


@on_a_gpu
def test_an_untouched_copy_goes_down_without_being_copied(tmp_path: Path) -> None:
    nbytes = 4 * MILLION + 8
    store = ClientStore(Budget(nbytes, 100 * nbytes), tmp_path, "cuda")
    store.put("a", large(1))
    store.put("b", large(2))
    pinned = store._kept["a"].host
    assert pinned is not None
    assert all(tensor.is_pinned() for tensor in pinned.wait().values())
    assert store.fetch("a") is not None
    assert store.fetch("b") is not None
    assert store._kept["a"].device is None
    assert store._kept["a"].host is pinned
    store.close()


@on_a_gpu
def test_checkpoints_of_states_on_the_device(tmp_path: Path) -> None:
    store, checkpoints = ClientStore(Budget(), tmp_path, "cuda"), Checkpoints(tmp_path)
    for number in range(8):
        keep_busy(torch.cuda.current_stream())
        store.put(str(number), large(number))
    checkpoints.save(1, {"x": torch.ones(3, device="cuda")}, store.save(), {})
    for number in range(8):
        store.put(str(number), large(100))
    checkpoints.close()
    store.close()
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    again = ClientStore(Budget(2 * 4 * MILLION), tmp_path, "cuda")
    for client, path in loaded.clients.items():
        again.put(client, path)
    for number in range(8):
        state = again.fetch(str(number))
        assert state is not None
        assert state["w"].is_cuda
        assert torch.equal(state["w"], torch.full((1024, 1024), float(number), device="cuda"))
    again.close()
    assert len(client_files(tmp_path)) == 8


@on_a_gpu
def test_the_budget_of_a_device() -> None:
    device = torch.device("cuda")
    free = torch.cuda.mem_get_info(device)[0]
    assert 0 < Budget.of(None, device).device < free
    assert Budget.of(1 << 20, device) == Budget(1 << 20, 0)
    beyond = Budget.of(1 << 50, device)
    assert beyond.device + beyond.host == 1 << 50
    assert beyond.device < free
