"""The Ray engine: the bits of the serial engine, also when homes are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import StopAfter
from potluck import Experiment
from potluck.core.card import ClientId
from potluck.core.message import Content, Message
from potluck.core.method import _registry
from potluck.core.server import Server
from potluck.core.state import Report
from potluck.data import from_arrays
from potluck.engine.factory import check_engine
from potluck.engine.protocol import Answer, Failure, Request, Stamp
from potluck.engine.serial import SerialEngine
from potluck.engine.settings import EngineSettings
from potluck.engine.store.state_files import StateFiles, read
from potluck.engine.transactions import Errand, opened
from potluck.engine.wire import TensorFrame, errand_frame, read_done
from potluck.engine.workers import WorkerFault
from potluck.errors import ConfigError, RunError
from potluck.methods.scaffold import Scaffold
from potluck.runs.api import resume, run
from potluck.runs.loop import Interrupted
from potluck.testing.bench import ALL, Bench
from potluck.version import __version__

ray = pytest.importorskip("ray")

from ray_homes import Engines, WarmHomes, same  # noqa: E402

import potluck.engine.ray.engine as ray_engine  # noqa: E402
import potluck.engine.ray.handles as handles  # noqa: E402
import potluck.engine.ray.home as ray_home  # noqa: E402
import potluck.engine.ray.homes as ray_homes  # noqa: E402
from potluck.engine.ray import alike, door  # noqa: E402
from potluck.engine.ray import cluster as clusters  # noqa: E402
from potluck.engine.ray.alike import Machines  # noqa: E402
from potluck.engine.ray.balance import Seconds, shared_out  # noqa: E402
from potluck.engine.ray.cluster import Cluster, Node  # noqa: E402
from potluck.engine.ray.door import check_door  # noqa: E402
from potluck.engine.ray.engine import RayEngine  # noqa: E402
from potluck.engine.ray.handles import Call, Home  # noqa: E402
from potluck.engine.ray.home import BUNDLE, HomeProcess, Letter, _bundles  # noqa: E402
from potluck.engine.ray.home import opened as home_opened  # noqa: E402
from potluck.engine.ray.homes import LOSSES, Homes, _packed  # noqa: E402
from potluck.engine.ray.job import use_for_every_driver  # noqa: E402
from potluck.engine.ray.owed import Owed, Recall, Replay, is_due  # noqa: E402
from potluck.engine.ray.parcel import _is_loose, pack, unpack  # noqa: E402
from potluck.engine.ray.spots import Spot, choose_spots, fitting, home_settings  # noqa: E402

SCHEDULE: list[Sequence[ClientId]] = [ALL, ("0", "2"), ALL]
ON_RAY = EngineSettings(name="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster on this machine, for all tests."""
    found = Cluster(None)
    yield found
    WarmHomes.pool.clear()
    found.close()


@pytest.fixture
def engines(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setattr(ray_engine, "Homes", WarmHomes)
    found = Engines()
    found.kill_after()
    yield found
    found.close()


# --- the same bits --------------------------------------------------------------------------------------


def test_workers_do_not_look_for_modules_in_the_current_folder(cluster: Cluster) -> None:
    @ray.remote
    def places() -> list[str]:
        import sys

        return sys.path

    found = ray.get(places.remote())
    assert found
    assert not {"", str(Path.cwd()), str(Path.cwd().resolve())} & {*found}


def test_no_driver_of_a_simulation_tells_its_workers_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.job_config.JobConfig", ray.job_config.JobConfig)
    use_for_every_driver()
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path.extend(["/somewhere"])  # what Ray does in `connect`
    assert not job._get_proto_job_config().py_driver_sys_path


@pytest.mark.parametrize("method", ["fedproto", "fedmd"])
def test_the_bits_of_the_serial_engine(engines: Engines, method: str) -> None:
    played = Bench(method, make_engine=engines).play(SCHEDULE)
    assert same(Bench(method).play(SCHEDULE).states(), played.states())


PLUGIN = """
from potluck.methods.fedproto import FedProto
from beside import NAME

class Mine(FedProto):
    name = NAME
"""


def own_model(input: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, classes)
    )


@pytest.mark.parametrize("as_file", [False, True], ids=["objects", "a file"])
def test_code_and_data_of_the_user_travel(engines: Engines, tmp_path: Path, as_file: bool) -> None:
    """A method in a plugin, models and data by name or given as objects; begun on a cluster, ended here."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "beside.py").write_text("NAME = 'mine-on-ray'\n")
    values: dict[str, Any] = {
        "data": "digits" if as_file else Bench("local").data,
        "partition": {"kind": "iid", "clients": 3},
        "models": ["conv-small" if as_file else own_model, "mlp-small"],
        "training": {"rounds": 3, "batch_size": 64},
        "checkpoint": {"every": 0},
        "plugins": [str(tmp_path / "mine.py")],
        "method": "mine-on-ray",
    }
    here = Experiment.make(**values, engine={"device": "cpu", "workers": 1})
    there = Experiment.make(**values, engine={"name": "ray", "workers": 2})
    run(here, out=tmp_path / "here")
    with pytest.raises(Interrupted):
        run(there, out=tmp_path / "there", watcher=StopAfter(2))
    assert there.portable is as_file
    resume(tmp_path / "there", experiment=here)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


# --- homes that fail; last, as they must be started again -------------------------------------------------


def test_a_killed_home_leaves_no_trace(engines: Engines) -> None:
    engines.kill_after(2)
    played = Bench("scaffold", make_engine=engines).play(SCHEDULE)
    assert engines.lost == 1
    assert same(Bench("scaffold").play(SCHEDULE).states(), played.states())


@pytest.fixture
def owing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes send no state before somebody needs it."""
    monkeypatch.setattr(RayEngine, "_behind", lambda engine, errand: -1e9)


@pytest.mark.parametrize("method", ["fedproto", "fedmd"])
@pytest.mark.usefixtures("owing")
def test_states_stay_at_their_homes_until_somebody_needs_them(engines: Engines, method: str) -> None:
    played = Bench(method, make_engine=engines).play(SCHEDULE)
    engine = played.local
    assert isinstance(engine, RayEngine)
    stored = {client: engine.store.stored(client) for client in ALL}
    assert all(isinstance(state, Owed) and state.arrived is None for state in stored.values())
    assert same(Bench(method).play(SCHEDULE).states(), played.states())
    assert not any(isinstance(engine.store.stored(client), Owed) for client in ALL)
    assert not engine._owed
    assert not engine._kept


@pytest.mark.parametrize("replies", [(2,), (6,), (9,), (3, 5)])
@pytest.mark.usefixtures("owing")
def test_states_that_a_killed_home_had_are_made_again(engines: Engines, replies: tuple[int, ...]) -> None:
    """In the first round, in a later one, and twice; rounds of two exchanges go on in their middle."""
    engines.kill_after(*replies)
    played = Bench("fedmd", make_engine=engines).play(SCHEDULE)
    assert engines.lost >= 1  # the second may be struck when it is dead already
    assert same(Bench("fedmd").play(SCHEDULE).states(), played.states())


@pytest.mark.usefixtures("owing")
def test_states_are_made_again_when_all_homes_are_lost_at_rest(engines: Engines) -> None:
    played = Bench("scaffold", make_engine=engines).play(SCHEDULE)
    engine = played.local
    assert isinstance(engine, RayEngine)
    for home in engine.homes.alive:
        ray.kill(home.actor)
    assert same(Bench("scaffold").play(SCHEDULE).states(), played.states())
    assert engines.lost == 2


class Reusing(Scaffold):
    """Sends all that it sends in the same memory, round after round."""

    def downlink(self, server: Server, client: ClientId) -> Content:
        sent = Message(super().downlink(server, client))
        memory = self.__dict__.setdefault("memory", {})
        own = memory.setdefault(sent.signature, {name: value.clone() for name, value in sent.items()})
        return {name: own[name].copy_(value) for name, value in sent.items()}


@pytest.mark.usefixtures("owing")
def test_downlinks_are_kept_as_they_were_sent(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reusing, "name", "reusing")  # for this test alone: others play every method
    monkeypatch.setitem(_registry, "reusing", Reusing)
    played = Bench(Reusing, make_engine=engines).play([ALL] * 2)
    engine = played.local
    assert isinstance(engine, RayEngine)
    kept = [state.errand.request.down for state in engine._owed.values() if state.errand is not None]
    assert len({id(down) for down in kept}) == len({engine.clients.kind(client) for client in ALL})
    for home in engine.homes.alive:
        ray.kill(home.actor)
    assert same(Bench(Reusing).play([ALL] * 2).states(), played.states())


@pytest.mark.usefixtures("owing")
def test_a_checkpoint_has_the_states_that_were_elsewhere(engines: Engines, tmp_path: Path) -> None:
    """And undone work leaves the state before it, which no home has any more."""
    played = Bench("fedmd", make_engine=engines).play([ALL])
    engine = played.local
    assert isinstance(engine, RayEngine)
    before = {client: engine.store.stored(client) for client in ALL}
    undo = engine.store.mark(ALL)
    played.round(ALL)
    undo()
    expected = Bench("fedmd").play([ALL]).states()
    assert all(same({client: expected[client]}, {client: state}) for client, state in before.items())
    engine.store._files = StateFiles(tmp_path)
    saved = engine.store.save()
    assert all(same({client: read(saved[client].result())}, {client: expected[client]}) for client in ALL)


@pytest.mark.usefixtures("owing")
def test_a_client_that_moves_takes_its_state_along(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round every client is at the other home; nothing is trained again."""
    turns, begun = itertools.count(), list[Any]()

    def swapped(items: Sequence[Any], homes: Sequence[Any], *others: Any) -> dict[Any, list[Any]]:
        if isinstance(items[0], Recall):
            return shared_out(items, homes, *others)
        turn = next(turns)
        return {home: [*items][(place + turn) % 2 :: 2] for place, home in enumerate(homes)}

    begin = Home.begin
    monkeypatch.setattr(ray_engine, "shared_out", swapped)
    monkeypatch.setattr(Home, "begin", lambda home, *asked: (begun.extend(asked[0]), begin(home, *asked)))
    played = Bench("fedproto", make_engine=engines).play([ALL] * 3)
    assert not any(isinstance(one, Replay) for one in begun)
    assert len([one for one in begun if isinstance(one, Recall)]) == 2 * len(ALL)
    assert same(Bench("fedproto").play([ALL] * 3).states(), played.states())


def test_a_state_is_sent_when_it_would_cost_more_to_lose_it() -> None:
    assert not is_due(seconds=0.01, nbytes=50_000_000)  # training a small client on a GPU
    assert is_due(seconds=10.0, nbytes=50_000_000)
    assert is_due(seconds=0.01, nbytes=40_000)


@pytest.mark.parametrize("behind", [None, -1e9], ids=["sent", "owed"])
def test_a_fault_ends_the_round_and_leaves_nothing_behind(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, behind: float | None
) -> None:
    """A home that raises is ended, and requests that were not handed out are not done later."""
    monkeypatch.setattr(RayEngine, "_behind", lambda engine, errand: behind)
    engines.settings = EngineSettings(name="ray", workers=1)
    played = Bench("local", make_engine=engines).play([ALL])
    engine = played.local
    assert isinstance(engine, RayEngine)
    request = SimpleRequest.of(played, "0")
    broken = dataclasses.replace(request, steps=("nonsense",))
    with pytest.raises(WorkerFault, match="nonsense"):
        engine.run([broken, *(SimpleRequest.of(played, client) for client in ("1", "2", "3"))])
    assert not any(home.share for home in engine.homes.alive)
    engine.settle(2, ALL, ())
    assert same(Bench("local").play([ALL]).states(), played.states())


# --- a home, without a cluster --------------------------------------------------------------------------


class InProcess(SerialEngine):
    """Sends every request through a home in this process, as a driver would."""

    def __init__(self, clients: Any, at_once: bool = False) -> None:
        super().__init__(clients)
        settings = EngineSettings(device="cpu", workers=1)
        home, about = home_opened(lambda: unpack(pack(clients.recipe())), settings.model_dump(), 1.0)
        assert isinstance(home, HomeProcess), about
        self.home, self.numbers = home, itertools.count(1)
        self.home.at_once = at_once
        self.versions: dict[ClientId, int] = {}

    def run(self, requests: Sequence[Any]) -> list[Any]:
        errands = [opened(self.store, request) for request in requests]
        assert all(isinstance(one, Errand) for one in errands)
        replies = self.home.serve([self.letter(one) for one in errands if isinstance(one, Errand)], ())
        found = [read_done(TensorFrame.unpack(reply)) for bundle in replies for reply in bundle]
        for request, done in zip(requests, found, strict=True):
            self.store.record(request.client).store(request, done)
        return [done.answer for done in found]

    def letter(self, errand: Errand) -> list[np.ndarray]:
        client = errand.request.client
        version = self.versions.get(client, 0)
        self.versions[client] = next(self.numbers)
        frame = errand_frame(errand)
        note = {
            **frame.note,
            "version": version,
            "becomes": self.versions[client],
            "common": None,
            "behind": None,
        }
        groups = {name: group for name, group in frame.groups.items() if name != "state"}
        return TensorFrame(note, groups).pack()


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once, as a GPU does"])
def test_a_home_keeps_what_its_clients_ended_with(at_once: bool) -> None:
    """No state is sent at all: rounds of two exchanges go on from what the home has."""
    bench = Bench("fedmd", make_engine=lambda clients: InProcess(clients, at_once))
    assert same(Bench("fedmd").play(SCHEDULE).states(), bench.play(SCHEDULE).states())


@pytest.mark.parametrize("common", [None, 0], ids=["to one client", "to many clients"])
def test_a_home_puts_downlinks_on_its_device(common: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InProcess(Bench("fedproto").build().clients)
    down = Message({"classes": torch.arange(3)})
    errand = Errand(Request("0", ("train",), down, Stamp("e", 1, 1, 0, 0)), None, {}, True)
    frame = TensorFrame.unpack(engine.letter(errand))
    letter = TensorFrame({**frame.note, "common": common}, {} if common is not None else frame.groups)
    heard: list[Letter] = []
    monkeypatch.setattr(engine.home, "_replies", lambda letters: heard.extend(letters) or [])
    engine.home.device = torch.device("meta")
    assert not [*engine.home.serve([letter.pack()], [TensorFrame({}, {"down": down}).pack()])]
    assert [str(one.request.down["classes"].device) for one in heard] == ["meta"]  # type: ignore[index]


def test_answers_come_from_a_device_in_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's would: all small tensors of a type in one copy, in their shapes."""
    monkeypatch.setattr(ray_home, "_is_small", lambda value: value.nbytes <= 1000)
    copied, cpu = list[int](), torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda value: (copied.append(value.numel()), cpu(value))[1])
    report = Report(3, {"loss": torch.tensor(0.5)}, {"accuracy": torch.tensor(0.25, dtype=torch.float64)})
    up = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(3), "large": torch.ones(300)}
    answers = [Answer(client, Message(up), report) for client in ("0", "1")]
    first, failure, second = ray_home.on_host([answers[0], Failure("2", "no"), answers[1]])
    assert sorted(copied) == [2, 6, 14, 300, 300]
    assert failure == Failure("2", "no")
    for found in (first, second):
        assert isinstance(found, Answer)
        assert all(torch.equal(found.up[name], value) for name, value in up.items())
        assert found.report.losses["loss"].item() == 0.5
        assert found.report.metrics["accuracy"].dtype == torch.float64


def test_small_replies_travel_together() -> None:
    small, large = [np.zeros(10, np.uint8)], [np.zeros(BUNDLE, np.uint8)]
    bundles = [*_bundles([small, small, large, small, large, large, small])]
    assert [len(bundle) for bundle in bundles] == [3, 2, 1, 1]
    assert [reply[0].nbytes for bundle in bundles for reply in bundle][2] == BUNDLE


def test_a_home_says_what_it_does_not_have() -> None:
    played = Bench("local", make_engine=InProcess).play([ALL])
    engine = played.local
    assert isinstance(engine, InProcess)
    engine.home.limit = 0
    engine.home._trim()
    assert list(engine.home.versions) == ["3"]
    letters = [
        engine.letter(Errand(request, None, first=True))
        for request in [SimpleRequest.of(played, client) for client in ("0", "3")]
    ]
    bundles = [*engine.home.serve(letters, ())]
    missing, found = (TensorFrame.unpack(reply).note for bundle in bundles for reply in bundle)
    assert missing["missing"]
    assert found["reply"]["client"] == "3"


class SimpleRequest:
    """A request to train in the next round."""

    @staticmethod
    def of(played: Any, client: ClientId) -> Any:
        from potluck.core.message import Message
        from potluck.engine.protocol import Request

        return Request(client, ("train",), Message(), played.rounds.stamp(client, 2, 1, 1))


# --- balance --------------------------------------------------------------------------------------------


def test_the_longest_first_and_at_home_where_that_costs_nothing() -> None:
    costs = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}
    everyone_at = {"a": 0, "b": 0, "c": 1, "d": None}
    shares = shared_out(list(costs), [0, 1], costs.__getitem__, everyone_at.__getitem__)
    assert shares == {0: ["a", "d"], 1: ["b", "c"]}  # b leaves home: it would end at 7, the ideal is 5
    seconds = Seconds()
    assert seconds.expected("cnn", 10) == 10
    seconds.note("cnn", 10, 1.0)
    assert seconds.expected("cnn", 20) == pytest.approx(2.0)
    assert seconds.expected("another", 20) == pytest.approx(2.0)


# --- bad input ------------------------------------------------------------------------------------------

NODES = [Node("1", "north", 4, 0), Node("2", "south", 2, 0)]


@pytest.mark.parametrize(
    ("nodes", "settings", "sentence"),
    [
        (
            NODES,
            {"device": "cuda"},
            "engine.device: no machine of the cluster has a GPU: north with 4 cores .*; use cpu$",
        ),
        (
            NODES,
            {"workers": 7},
            "engine.workers: 7 homes of 1 cores are asked for, the cluster has room for 6",
        ),
        (NODES, {"threads": 8}, "engine.threads: no machine of the cluster has 8 cores: north with 4"),
        (NODES, {"device": ("cuda:0", "cuda:1")}, "engine.device: a home of a Ray cluster has one device"),
        (NODES, {"device": "tpu"}, "engine.device: there is no device 'tpu'"),
    ],
)
def test_what_a_cluster_does_not_have(nodes: list[Node], settings: Mapping[str, Any], sentence: str) -> None:
    asked = EngineSettings(name="ray", **settings)
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        choose_spots(asked, str(home_settings(asked, nodes).device), nodes, 100)


def test_homes_are_dealt_out_to_machines_in_turn() -> None:
    spots = choose_spots(EngineSettings(name="ray", threads=2), "cpu", NODES, 100)
    assert [(spot.node, spot.cpus, spot.share) for spot in spots] == [
        ("1", 2, 0.5),
        ("2", 2, 1),
        ("1", 2, 0.5),
    ]
    gpus = [Node("1", "north", 4, 1), Node("2", "south", 2, 1)]
    asked = EngineSettings(name="ray", workers=4)
    assert home_settings(asked, gpus).device == "cuda"
    assert [spot.gpus for spot in choose_spots(asked, "cuda", gpus, 100)] == [0.5] * 4


HERE, THERE = '[["127.0.0.1", "north"]]', '[["192.0.2.1", "south"]]'


def test_addresses() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{door.getsockname()[1]}"
    for address, sentence in {
        nobody: f"engine.address: nobody listens at {nobody} .*; start a Ray cluster there",
        "head": "engine.address: give the head of a Ray cluster, such as 10.0.0.5:6379, not 'head'",
        "ray://head:10001": "engine.address: give the head of a Ray cluster",
        "127.0.0.1:99999": "engine.address: give the head of a Ray cluster",
        f"127.0.0.1:{'9' * 5000}": "engine.address: give the head of a Ray cluster",
    }.items():
        with pytest.raises(ConfigError, match=f"^{sentence}"):
            check_engine(ON_RAY.model_copy(update={"address": address}))
    with pytest.raises(ConfigError, match=r"address is that of a Ray cluster; set engine\.name to ray"):
        EngineSettings(address="head:1")


@pytest.mark.parametrize(
    ("own", "anybody", "alone", "sentence"),
    [
        ((0, HERE, ""), (1, "", "InvalidAuthToken"), False, None),
        ((0, HERE, ""), (0, HERE, ""), False, "takes commands without a token"),
        ((0, HERE, ""), (0, HERE, ""), True, None),  # nobody else reaches it
        (
            (0, THERE, ""),
            (1, "", ""),
            False,
            r"no node .* this machine, they are on south \(192.0.2.1\)",
        ),
        ((0, "[]", ""), (1, "", ""), False, "no node .* they are on none; start one here with: ray start"),
        ((1, "", "x\nInvalidAuthToken: it is missing or incorrect"), None, False, "wants its token: set RAY"),
        (
            (1, "", "Traceback\nRuntimeError: Version mismatch: The cluster\n  Ray: 2.60.0"),
            None,
            False,
            r"install the same Ray .* of 10.0.0.5:6379: Version mismatch: The cluster Ray: 2.60.0$",
        ),
        ((-1, "", "no answer within 20 s"), None, False, r"does not answer \(no answer within 20 s\)"),
    ],
)
def test_the_door_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, own: Any, anybody: Any, alone: bool, sentence: str | None
) -> None:
    answers = iter([own, anybody])
    monkeypatch.setattr(door, "_knocking", lambda *address, **environment: contextlib.nullcontext())
    monkeypatch.setattr(door, "_heard", lambda process: next(answers))
    if sentence is None:
        door.check_door("10.0.0.5:6379", alone)
        return
    with pytest.raises(ConfigError, match=f"^engine.address: .*{sentence}"):
        door.check_door("10.0.0.5:6379", alone)


def test_a_cluster_is_asked_in_another_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster itself, not what this process has: one without a token takes drivers that have one."""
    address = ray.get_runtime_context().gcs_address
    check_door(address, alone=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(ConfigError, match=f"^engine.address: the cluster at {address} wants its token"):
        check_door(address, alone=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    with pytest.raises(ConfigError, match=f"^engine.address: the cluster at {address} wants its token"):
        check_door(address, alone=False)


@pytest.mark.parametrize("version", ["2.55.0", "2.61.0", "3.0.0"])
def test_another_version_of_ray(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(clusters.metadata, "version", lambda name: version)
    with pytest.raises(
        ConfigError, match=f"^engine.name: Ray {version} is installed, potluck works with 2.55.1"
    ):
        check_engine(ON_RAY)


class FewHomes(Homes):
    """Homes without a cluster, but for a list of its machines."""

    def __init__(self, mixed: bool = False, nodes: Sequence[Node] = ()) -> None:
        self.settings, self.heard = EngineSettings(name="ray", mixed=mixed), list[str]()
        self.notice, self.alive, self.known = self.heard.append, [], []
        self.coming, self.spots, self.losses = [], [Spot("1", 1, 0, 1)], 0
        self.again, self.why = 0.0, ""
        self.machines = Machines(mixed, self.notice)
        self.cluster = SimpleNamespace(nodes=lambda: [*nodes])  # type: ignore[assignment]

    def take(self, node: str, **about: Any) -> None:
        self._admit(Home(None, None, node), {"used": 0.0, **about})  # type: ignore[arg-type]


def test_unlike_machines_are_refused_by_name() -> None:
    one, other = {"potluck": __version__, "torch": "2.13"}, {"potluck": __version__, "torch": "2.12"}
    homes = FewHomes(mixed=False)
    homes.take("north", fingerprint=one)
    with pytest.raises(ConfigError, match=r"^engine.mixed: north has torch 2.13, south has 2.12, so numbers"):
        homes.take("south", fingerprint=other)
    other_version = (
        rf"^engine.name: .* has potluck {__version__}, south has 2; install the same potluck\[ray\]"
    )
    with pytest.raises(ConfigError, match=other_version):
        homes.take("south", fingerprint=one | {"potluck": "2"})
    with pytest.raises(ConfigError, match=other_version):  # before a home is opened: it would not understand
        homes.machines.check_version("south", "2")
    with pytest.raises(ConfigError, match=r"^engine.name: south: there is no data set"):
        homes.take("south", refused="there is no data set")
    mixed = FewHomes(mixed=True)
    mixed.take("north", fingerprint=one)
    mixed.take("south", fingerprint=other)
    assert mixed.heard == [
        "numbers may differ from those of other machines: north has torch 2.13, south has 2.12"
    ]


def test_cpus_of_two_makers_are_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = FewHomes(mixed=False)
    for node, maker in (("north", "AuthenticAMD"), ("south", "GenuineIntel")):
        monkeypatch.setattr(alike, "cpu_maker", lambda maker=maker: maker)
        found = alike.fingerprint(torch.device("cpu"), 1)
        refused = pytest.raises(ConfigError, match="north has CPU AuthenticAMD, south has GenuineIntel")
        with refused if node == "south" else contextlib.nullcontext():
            homes.take(node, fingerprint=found)


class OpeningHomes(FewHomes):
    """Two homes on each of two machines; they are ready as soon as they are asked, the one asked last first."""

    def __init__(self, refusing: str) -> None:
        super().__init__()
        self.refusing, self.asked = refusing, list[str]()

    def _spots_with_room(self) -> list[Spot]:
        return [Spot(node, 1, 0, 0.5) for node in ("north", "south") for _ in range(2)]

    def _make(self, spot: Spot, anywhere: bool = False) -> Home:
        return Home(None, spot, spot.node, machine=spot.node)

    def _greeted(self, homes: Sequence[Home]) -> list[Home]:
        return [*homes]

    def _open(self, home: Home) -> Any:
        self.asked.append(home.node)
        return len(self.asked)

    def _warm(self, homes: Sequence[Home]) -> None:
        assert [home.node for home in homes] == ["north", "south"]

    def _opened(self, home: Home) -> Mapping[str, Any]:
        if home.node == self.refusing:
            return {"refused": "its data are not those of the driver"}
        return {"fingerprint": {"potluck": __version__}, "used": 0.0}


def test_one_home_of_each_machine_finds_out_whether_the_data_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any other home is opened; and the machine that refuses is heard first."""
    monkeypatch.setattr(ray_homes.ray, "wait", lambda refs, num_returns, timeout: ([max(refs)], []))
    homes = OpeningHomes(refusing="south")
    with pytest.raises(ConfigError, match=r"^engine.name: south: its data are not those of the driver"):
        homes._start()
    assert homes.asked == ["north", "south"]
    homes = OpeningHomes(refusing="")
    homes._start()
    assert homes.asked == ["north", "south", "south", "north"]
    assert [home.node for home in homes.alive] == ["north", "north", "south", "south"]


def test_data_that_a_home_does_not_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "partition": {"kind": "iid", "clients": 2},
        "models": ["mlp-small"],
        "method": "local",
    }
    built = Experiment.make(data="digits", **values).build()
    recipe = built.clients.recipe()  # type: ignore[misc]
    engine = EngineSettings(device="cpu", workers=1).model_dump()
    other = recipe.__class__(**{**vars(recipe), "fingerprints": ("another",)})  # type: ignore[call-arg]
    assert home_opened(lambda: other, engine, 1.0) == (
        None,
        {
            "refused": "its data are not those of the driver, though they have the same name; copy the driver's "
            "there"
        },
    )


def test_public_data_that_a_home_does_not_have() -> None:
    """They are compared like all others: a method that distils on them would learn something else there."""

    def recipe(shift: int) -> Any:
        x = (torch.arange(200 * 64).reshape(200, 64) % (7 + shift)).float().numpy()
        public = {"data": from_arrays(x, np.arange(200) % 10, name="public"), "samples": 100}
        built = Experiment.make(
            data=from_arrays(x[:, ::-1].copy(), np.arange(200) % 10, name="own"),
            partition={"kind": "iid", "clients": 2},
            models=["mlp-small"],
            method="fedmd",
            public=public,
        ).build()
        return built.clients.recipe()  # type: ignore[misc]

    engine = EngineSettings(device="cpu", workers=1).model_dump()
    one, other = recipe(0), recipe(1)
    assert one.fingerprints != other.fingerprints
    alike = dataclasses.replace(one, fingerprints=(one.fingerprints[0], *other.fingerprints[1:]))
    assert "not those of the driver" in home_opened(lambda: alike, engine, 1.0)[1]["refused"]
    assert home_opened(lambda: one, engine, 1.0)[0] is not None


def test_what_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"^engine.name: what was given from Python cannot be sent .*lock"):
        _packed(SimpleNamespace(given=lambda: lock))  # type: ignore[arg-type]


# --- slow machines --------------------------------------------------------------------------------------


class Clock:
    """Ten seconds pass between any two looks at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(ray_homes.time, "monotonic", self.look)

    def look(self) -> float:
        self.now += 10
        return self.now


class LateHomes(FewHomes):
    """A home is made when there is none, and ready long after that."""

    ready = 500.0
    made = 0

    def _replace(self, spot: Spot) -> None:
        self.made += 1
        self.coming.append(Home(None, spot, "late"))

    def _arrivals(self, seconds: float = 0.0) -> None:
        if self.coming and ray_homes.time.monotonic() > self.ready:
            self.alive.append(self.coming.pop())


def test_a_home_that_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    homes = LateHomes(nodes=NODES)
    homes.wait_for_one()
    assert (len(homes.alive), homes.made) == (1, 1)


@pytest.mark.parametrize(("nodes", "waited"), [((), 120), (NODES, 600)])
def test_nobody_left_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, nodes: Sequence[Node], waited: float
) -> None:
    clock, homes = Clock(monkeypatch), LateHomes(nodes=nodes)
    homes.ready, homes.why = 10_000.0, "north: its process ended"
    with pytest.raises(
        RunError, match=r"^no home is left .* \(north: its process ended\); .*potluck resume$"
    ):
        homes.wait_for_one()
    assert waited < clock.now < 2 * waited


def test_attempts_to_replace_a_home_have_an_end_and_time_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, homes = Clock(monkeypatch), FewHomes(nodes=NODES)
    pauses = []
    for _ in range(LOSSES + 1):
        before = clock.now
        homes._count_loss("it never ran")
        pauses.append(homes.again - before - 10)
    assert pauses == [2, 4, 8, 16]
    monkeypatch.setattr(homes, "_replace", lambda spot: homes._count_loss("it never ran"))
    with pytest.raises(RunError, match=r"it never ran"):
        homes.wait_for_one()


def test_homes_that_die_while_the_head_is_slow_do_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a head knows which machine is gone it gives homes to that one: they die, more than may be lost."""
    Clock(monkeypatch)
    homes = LateHomes(nodes=NODES)
    homes.losses, homes.ready = LOSSES + 1, 100.0
    homes.wait_for_one()
    assert len(homes.alive) == 1


@pytest.mark.parametrize(
    ("used", "arrives", "hung"), [(12.5, True, False), (11.5, True, True), (0.0, False, False)]
)
def test_a_home_that_works_has_time(
    monkeypatch: pytest.MonkeyPatch, used: float, arrives: bool, hung: bool
) -> None:
    """Of 100 s without an answer a home that used 10 s of CPU time before has worked for 2 s or more."""
    monkeypatch.setattr(handles.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(handles, "_pulse", lambda home: "pulse")
    monkeypatch.setattr(handles, "_cpu_seconds", lambda pulse: used)
    monkeypatch.setattr(handles.ray, "wait", lambda refs, timeout: (refs, []) if arrives else ([], refs))
    home = Home(None, Spot("1", 1, 0, 1), used=10.0)
    home.call = Call(None, deque(), since=0.0)
    assert not home.is_hung(deadline=200.0)
    assert home.call.pulse is None  # nobody was asked
    assert home.is_hung(deadline=99.0) is hung
    assert home.call.since == (100.0 if arrives else 0.0)
    if not arrives:
        monkeypatch.setattr(handles, "PATIENCE", 0.0)
        assert home.is_hung(deadline=99.0)  # the machine does not answer either


def test_room_on_machines() -> None:
    spots = [Spot("1", 2, 0, 1), Spot("2", 2, 0, 1), Spot("1", 2, 0, 1)]
    assert fitting(spots, {"1": (3.0, 0.0), "2": (4.0, 1.0)}) == spots[:2]
    shared = [Spot("1", 0, 1 / 3, 1)] * 3
    assert fitting(shared, {"1": (4.0, 0.9999)}) == shared
    assert fitting(shared, {"2": (4.0, 1.0)}) == []


def test_what_is_installed_does_not_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever pip put it; a file of the user's does."""
    (tmp_path / "installed" / "there-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "installed" / "there").mkdir()
    (tmp_path / "installed" / "there" / "__init__.py").write_text("class One: pass")
    (tmp_path / "installed" / "there" / "inside.py").write_text("class Two: pass")
    (tmp_path / "own.py").write_text("class Three: pass")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.syspath_prepend(tmp_path)
    modules = {name: importlib.import_module(name) for name in ("there", "there.inside", "own")}
    assert [name for name, module in modules.items() if _is_loose(name, module)] == ["own"]
