"""The client's half of a federation and the server's, without Flower: bytes in, bytes out."""

import functools
import json
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import sites
import torch

from potluck.core.message import Message
from potluck.core.state import Report
from potluck.core.task import Task
from potluck.data import DataConfig
from potluck.deploy import wire
from potluck.deploy.flower.watching import ALIVE, BAD_INPUT
from potluck.deploy.flower.worker import _accept, read_one
from potluck.deploy.register import Register
from potluck.deploy.rehearsal import rehearse
from potluck.deploy.run import key_register, open_folder, prepared
from potluck.deploy.run import play as play_prepared
from potluck.deploy.site import Site, kept_secret
from potluck.deploy.site_data import site_data
from potluck.deploy.welcome import SENT, welcome
from potluck.engine import frames
from potluck.engine.protocol import Answer, Examination, Failure, Request, Stamp
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.errors import ConfigError, DataError, MessageError, PotluckError, RunError
from potluck.files import write_checked
from potluck.models import build
from potluck.runs.api import resume, run
from potluck.runs.observers import Observer

RUN = "a1"
OPTIONS = {
    "fedmrl": {"d1": 8},
    "fedin": {"noise": 0.8, "project": "fixed"},
    "fedmuscle": {"peers": 2, "batch": 20, "bundle": 2},
    "fedhenn": {"samples": 30},
    "cofed": {"margin": 0.0},
    "feddf": {"steps": 4, "every": 2, "patience": 4},
    "fed-et": {"steps": 2},
    "creamfl": {"server_model": "mlp-small"},
}
SAME_MODEL = {"models": {"pool": "conv-small", "rep_dim": 16, "init": "per_client"}}


def make_site(client, home, model=None, **options):
    entry = model or sites.builder(client)
    return Site(client, entry, sites.loader(client), home / client, simulated=True, **options)


def play(experiment, *others, **options):
    """A federation as `potluck serve` plays it."""
    return play_prepared(prepared(experiment), *others, **options)


class Courier:
    """Carries bytes to sites of this process. `lose(order)` may say why an order's answer does not come."""

    def __init__(self, home, lose=lambda order: None, **options):
        self.sites = {number: make_site(client, home, **options) for number, client in enumerate(sites.IDS)}
        self.lose = lose
        self.carried = []
        self.shown = {}
        self.tamper = lambda order, answer: answer

    def nodes(self):
        return list(self.sites)

    def keys(self):
        return self.shown

    def took(self):
        return []

    def exchange(self, letters, timeout, most):
        answers = [self._answer(node, data) for node, data in letters]
        return [
            answer
            if isinstance(answer, str) or len(answer) <= limit
            else frames.too_large("its reply", len(answer), limit)
            for answer, limit in zip(answers, most, strict=True)
        ]

    def _answer(self, node, data):
        order = wire.unpack_order(data)
        self.carried.append(order)
        answer = self.tamper(order, self.sites[node].answer(data))
        return self.lose(order) or answer


@pytest.mark.parametrize(
    "method",
    ["fedmrl", "fedproto", "fedin", "fedre", "fedmuscle", "fedmd", "cofed", "creamfl", "fedhenn", "feddf"],
)
def test_a_federation_gives_the_numbers_of_the_simulation(method, tmp_path):
    options = {"name": method, **OPTIONS.get(method, {})}
    whens = {"evaluate": {"when": ["before", "after_training", "after_aggregation"]}}
    play(sites.federated(options, **whens), Courier(tmp_path), open_folder(tmp_path / "run"))
    run(sites.simulated(options, **whens), out=tmp_path / "serial")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert sites.log(tmp_path / "run", name) == sites.log(tmp_path / "serial", name)


def test_sites_with_tasks_of_their_own_meet_on_public_data(tmp_path):
    """Two sites tell digits apart, the third finds them in a picture, pixel by pixel."""
    method = {"name": "fedmuscle", "peers": 1, "batch": 20}
    experiment = sites.federated(method).variant(partition={"sites": sites.IDS})
    digits, segments = (DataConfig(name=name).load() for name in ("digits", "digits-segments"))
    few = {"data": replace(segments, x=segments.x[:40], y=segments.y[:40], train_rows=30), "public": digits}
    names = {"classification": "conv-small", "segmentation": "conv-dense"}
    courier = Courier(tmp_path, model=lambda task: build(names[task.kind], task, 16))
    courier.sites[1].load = lambda: few
    play(experiment, courier, open_folder(tmp_path / "run"))
    last = [one for one in sites.log(tmp_path / "run") if one["round"] == 2]
    assert {one["client"]: "mean_iou" in one["test"] for one in last} == {"0": False, "1": True, "2": False}


def test_a_site_without_public_data_or_with_others_is_refused(tmp_path):
    experiment = sites.federated({"name": "fedmuscle", "peers": 2, "batch": 20})
    courier = Courier(tmp_path)
    own = courier.sites[1].load
    courier.sites[1].load = lambda: {key: value for key, value in own().items() if key != "public"}
    told = "client 1: fedmuscle needs public data, those called 'digits'; give them as public in what --data loads"
    with pytest.raises(RunError, match=told):
        play(experiment, courier, open_folder(tmp_path / "run"))
    courier = Courier(tmp_path / "others")
    courier.sites[1].load = lambda: own() | {"public": torch.zeros(80, 1, 8, 8)}
    with pytest.raises(ConfigError, match="client 1 has public samples with other ids than the server"):
        play(experiment, courier, open_folder(tmp_path / "run2"))
    courier = Courier(tmp_path / "turned")
    courier.sites[1].load = lambda: own() | {"public": own()["public"].x.flip(0)}
    with pytest.raises(ConfigError, match="client 1 has public samples with other images than the server"):
        play(experiment, courier, open_folder(tmp_path / "run3"))


def test_a_client_whose_reply_is_lost_is_out_for_the_round_and_its_work_is_undone(tmp_path):
    def lose(order):
        lost = isinstance(order, Request) and (order.client, order.stamp.round) == ("1", 2)
        return "no answer within 60 s" if lost else None

    notices = []
    watcher = Observer()
    watcher.notice = notices.append
    method, others = {"name": "fedmrl", "d1": 8}, {"rounds": 3}
    play(sites.federated(method, **others), Courier(tmp_path, lose), open_folder(tmp_path / "run"), watcher)
    expected = sites.serial(method, tmp_path / "serial", away={("1", 2)}, **others)
    assert sites.log(tmp_path / "run") == expected
    assert "round 2 goes on without client 1: no answer within 60 s" in notices


class Killed(BaseException):
    """The server dies here."""


def test_a_server_that_starts_again_goes_on_with_the_same_run_and_undoes_what_it_had_not_taken(tmp_path):
    def die(order):
        if isinstance(order, Request) and (order.client, order.stamp.round) == ("2", 2):
            raise Killed

    experiment, folder = sites.federated("scaffold", **SAME_MODEL), tmp_path / "run"
    first = Courier(tmp_path, die, model="conv-small")
    with pytest.raises(Killed):
        play(experiment, first, open_folder(folder))
    again = Courier(tmp_path, model="conv-small")
    again.sites = first.sites  # the clients are still there, two of them after a step the server never took
    play(experiment, again, open_folder(folder))
    run(sites.simulated("scaffold", **SAME_MODEL), out=tmp_path / "serial")
    assert sites.log(folder) == sites.log(tmp_path / "serial")
    starts = [
        {order.stamp.incarnation for order in one.carried if isinstance(order, Request)}
        for one in (first, again)
    ]
    assert [len(one) for one in starts] == [1, 1]
    assert max(starts[0]) < min(starts[1]), "a server that starts again has a higher number"


def test_sites_that_start_again_between_two_rounds_go_on_where_they_were(tmp_path):
    method = {"name": "fedmrl", "d1": 8}
    courier = Courier(tmp_path)

    def restart(order):
        if isinstance(order, Examination):  # the last exchange of a round
            node = sites.IDS.index(order.client)
            courier.sites[node] = make_site(order.client, tmp_path)

    courier.lose = restart
    play(sites.federated(method), courier, open_folder(tmp_path / "run"))
    run(sites.simulated(method), out=tmp_path / "serial")
    assert sites.log(tmp_path / "run") == sites.log(tmp_path / "serial")


@pytest.mark.parametrize(
    "method", ["fedmrl", "fedproto", "fedin", "fedre", "fedgh", "fedallrep", "feddf", "fed-et"]
)
def test_the_largest_legal_message_is_known_and_no_honest_one_is_larger(tmp_path, method):
    found = make_site("0", tmp_path)
    enrol(found, method)
    federation, live = found.resident.federation, found.resident.live
    rounds = Rounds(federation, SerialEngine(federation.clients))
    downs = [found.resident.performer.largest_down(live)]
    for exchange in rehearse(federation, "0"):
        assert (
            exchange.up.nbytes <= rounds.largest_reply("0", exchange.steps) <= 4 * exchange.up.nbytes + 4096
        )
        downs.append(exchange.down.nbytes)
    assert max(downs) == downs[0]


def test_a_site_whose_model_the_server_cannot_build_is_refused(tmp_path):
    found = make_site("0", tmp_path, sites.builder("2"))
    refused = enrol(found, "feddf").reason
    assert "feddf: the model of client 0 has other tensors than the architecture" in refused


WRONG_UPLOADS = {
    "shape": (lambda tensors: {name: value.reshape(-1) for name, value in tensors.items()}, "has shape"),
    "nan": (lambda tensors: {name: value * torch.nan for name, value in tensors.items()}, "is not finite"),
    "extra": (lambda tensors: tensors | {"spy": torch.zeros(1)}, "tensor 'spy' is not declared"),
    "type": (
        lambda tensors: {name: value.long() for name, value in tensors.items()},
        "has type torch.int64, declared torch.float32",
    ),
    "size": (lambda tensors: tensors | {"spy": torch.zeros(1 << 20)}, "bytes, at most"),
}


@pytest.mark.parametrize("fault", WRONG_UPLOADS)
def test_an_upload_that_breaks_the_contract_is_refused_and_the_round_goes_on(tmp_path, fault):
    change, sentence = WRONG_UPLOADS[fault]

    def tamper(order, data):
        if not (isinstance(order, Request) and (order.client, order.stamp.round) == ("1", 1)):
            return data
        answer = wire.unpack_reply(data)
        return wire.pack_reply(replace(answer, up=Message(change(dict(answer.up)))))

    notices, watcher, courier = [], Observer(), Courier(tmp_path)
    watcher.notice, courier.tamper = notices.append, tamper
    method = {"name": "fedmrl", "d1": 8}
    play(sites.federated(method), courier, open_folder(tmp_path / "run"), watcher)
    (told,) = [notice for notice in notices if "goes on without" in notice]
    assert told.startswith("round 1 goes on without client 1")
    assert sentence in told
    assert sites.log(tmp_path / "run") == sites.serial(method, tmp_path / "serial", away={("1", 1)})


KEYS = {number: f"SHA256:{number}" for number in range(4)}


def test_a_client_id_belongs_to_the_key_it_came_with_first(tmp_path):
    courier, notices, watcher = Courier(tmp_path), [], Observer()
    courier.shown, watcher.notice = KEYS, notices.append
    folder = open_folder(tmp_path / "run")

    def intrude(order):
        if isinstance(order, Examination) and order.stamp.round == 1:
            courier.sites[3] = make_site("1", tmp_path / "elsewhere")

    courier.lose = intrude
    play(sites.federated("local"), courier, folder, watcher, keys={})
    known = {client: KEYS[number] for number, client in enumerate(sites.IDS)}
    assert json.loads((folder / "federation.json").read_text())["keys"] == known
    assert (
        "node 3 was not taken in: client 1: the key of its node, SHA256:3, is not its own, SHA256:1"
        in notices
    )
    assert {order.client for order in courier.carried if isinstance(order, Request)} == set(sites.IDS)


@pytest.mark.parametrize(
    ("shown", "keys", "sentence"),
    [
        ({}, {}, "client 0: its node has shown no key"),
        (
            dict.fromkeys(range(3), "SHA256:0"),
            {},
            "client 1: the key of its node, SHA256:0, is that of client 0",
        ),
        (KEYS, {"2": "SHA256:9"}, "client 2: the key of its node, SHA256:2, is not its own, SHA256:9"),
    ],
)
def test_a_client_with_another_key_does_not_join(tmp_path, shown, keys, sentence):
    courier = Courier(tmp_path)
    courier.shown = shown
    settings = {"engine": {"device": "cpu", "patience": 0.1}}
    with pytest.raises(RunError, match=sentence):
        play(sites.federated("local", **settings), courier, open_folder(tmp_path / "run"), keys=keys)


def test_a_key_is_kept_when_the_server_starts_again(tmp_path):
    folder = open_folder(tmp_path / "run")
    write_checked(folder / "federation.json", {"run": RUN, "starts": 1})
    assert key_register(Register(folder), {}).refuse("0", "SHA256:0") == ""
    assert "is not its own" in key_register(Register(folder), {}).refuse("0", "SHA256:1")
    assert (
        key_register(Register(folder), {"0": "SHA256:1"}).refuse("0", "SHA256:1") == ""
    )  # by the operator's hand


def test_settings_of_a_run_cannot_change_and_a_finished_one_is_left_alone(tmp_path):
    courier, folder = Courier(tmp_path), tmp_path / "run"
    play(sites.federated("local", rounds=1), courier, open_folder(folder))
    with pytest.raises(RunError, match="other settings"):
        play(sites.federated("local", rounds=2), courier, open_folder(folder))
    with pytest.raises(RunError, match="finished"):
        play(sites.federated("local", rounds=1), courier, open_folder(folder))
    with pytest.raises(ConfigError, match="run it with potluck serve"):
        resume(folder)  # there are no data here to go on with


def test_a_client_is_known_by_its_id_whatever_node_it_comes_from(tmp_path):
    method = {"name": "fedmrl", "d1": 8}
    courier = Courier(tmp_path)

    def move(order):
        if isinstance(order, Examination) and (order.client, order.stamp.round) == ("1", 1):
            courier.sites[17] = courier.sites.pop(1)

    courier.lose = move
    play(sites.federated(method), courier, open_folder(tmp_path / "run"))
    run(sites.simulated(method), out=tmp_path / "serial")
    assert sites.log(tmp_path / "run") == sites.log(tmp_path / "serial")


def test_clients_that_do_not_join_are_named(tmp_path):
    courier = Courier(tmp_path)
    del courier.sites[1]
    courier.sites[2].load = lambda: 3
    settings = {"engine": {"device": "cpu", "patience": 0.1}}
    with pytest.raises(RunError, match=r"have not joined: 1, 2; client 2: DataError at the site"):
        play(sites.federated("local", **settings), courier, open_folder(tmp_path / "run"))


# --- one site -------------------------------------------------------------------------------------------


def enrol(site, method="fedmrl", **changes):
    told = welcome(sites.federated({"name": method, **OPTIONS.get(method, {})}, rounds=10), RUN)
    told["experiment"]["method"] |= changes
    return wire.unpack_reply(site.answer(wire.pack_order(wire.Hello(told))))


def request(server_down, round_=1, exchange=1, accepted=0, **stamp):
    at = Stamp(RUN, round_, stamp.pop("attempt", 1), exchange, accepted, **stamp)
    return Request("0", ("train",), server_down, at)


def ask(site, order):
    return wire.unpack_reply(site.answer(wire.pack_order(order)))


@pytest.fixture
def site(tmp_path):
    found = make_site("0", tmp_path)
    enrol(found)
    return found


@pytest.fixture
def down(site):
    assert site.resident is not None
    return Message({"small": site.resident.live["small"].state()})


def same(one, other):
    return one.up.keys() == other.up.keys() and all(
        torch.equal(one.up[name], other.up[name]) for name in one.up
    )


def test_a_card_tells_what_the_method_asks_for_and_no_more(tmp_path):
    for method, told in {"fedmrl": set(), "fedproto": {"width", "classes_held"}}.items():
        card = enrol(make_site("0", tmp_path / method), method).card
        assert (card.client, card.samples, set(card.extra)) == ("0", 84, told)


def test_a_repeated_exchange_gives_the_stored_reply_also_after_a_restart(site, down, tmp_path):
    first = ask(site, request(down))
    again = make_site("0", tmp_path)
    assert same(first, ask(site, request(down)))
    assert same(first, ask(again, request(down)))
    other = ask(again, request(Message({"small": {}})))
    assert "exchange 1 of round 1 came again, with another content" in other.reason


def test_a_round_that_was_not_accepted_is_undone_and_an_accepted_one_stands(site, down, tmp_path):
    first = ask(site, request(down))
    site = make_site("0", tmp_path)
    assert same(first, ask(site, request(down, attempt=2)))
    second = ask(site, request(down, round_=2, accepted=1))
    assert not same(first, second)
    site = make_site("0", tmp_path)
    assert same(second, ask(site, request(down, round_=2, accepted=1, attempt=2)))


def test_a_refused_round_is_not_examined_either(site, down):
    def accuracy(settled, accepted=0):
        at = Stamp(RUN, 1, 1, 0, accepted, settled=settled)
        return ask(site, Examination("0", down, at, ("mix-large",))).report.metrics

    before = accuracy(settled=True)
    ask(site, request(down))
    assert accuracy(settled=True) == before
    assert accuracy(settled=False) == accuracy(settled=True, accepted=1) != before


def test_a_server_older_than_its_clients_is_refused(site, down):
    for round_ in (1, 2, 3, 4):
        ask(site, request(down, round_=round_, accepted=round_ - 1))
    reason = ask(site, request(down, round_=1, accepted=0, incarnation=1)).reason
    assert reason.startswith(
        "client 0: the server goes on from round 0 of this client, which is past round 3"
    )


def test_a_client_whose_folder_is_older_than_the_run_is_refused(site, down):
    reason = ask(site, request(down, round_=4, accepted=3)).reason
    assert "goes on from round 3 of this client, whose newest state here is of round 0" in reason


def test_an_earlier_start_of_the_server_is_refused(site, down):
    ask(site, request(down, incarnation=2))
    assert "start 1 of the server is still sending" in ask(site, request(down, incarnation=1)).reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors | {"spy": torch.zeros(1)}, "tensor 'spy' is not declared"),
        (lambda tensors: {name: value.reshape(-1) for name, value in tensors.items()}, "has shape"),
        (lambda tensors: {name: value * torch.nan for name, value in tensors.items()}, "is not finite"),
        (lambda tensors: dict([*tensors.items()][1:]), "is missing"),
    ],
)
def test_a_message_that_breaks_the_contract_touches_nothing(site, down, change, reason):
    wrong = ask(site, request(Message(change(dict(down)))))
    assert isinstance(wrong, Failure)
    assert wrong.reason.startswith("client 0")
    assert reason in wrong.reason
    assert site.resident.record.begun is False


def test_nothing_larger_than_a_legal_order_is_read(site, down, tmp_path):
    most = site.most_bytes
    assert (
        len(wire.pack_order(request(down))) <= site.resident.most_bytes <= most == wire.LARGEST_INTRODUCTION
    )
    big = make_site("0", tmp_path)
    enrol(big)
    assert big.most_bytes == most  # a worker that was started again knows it before it hears of the run
    here, there = socket.socketpair()
    with here, there:
        head = json.dumps({"note": {}, "sizes": [most + 1]}).encode()
        here.sendall(len(head).to_bytes(8, "little") + head)
        assert read_one(site, there) is None
        _, (reply,) = frames.receive(here)
    sentence = f"client 0: an order has {most + 1:,} bytes, at most {most:,} are allowed"
    assert wire.unpack_reply(reply).reason == sentence


def test_a_worker_that_gets_no_thread_takes_the_next_connection(site, tmp_path, monkeypatch):
    path = tmp_path / "door"
    with frames.listening(path) as door:
        threading.Thread(target=_accept, args=(door, site, queue.Queue()), daemon=True).start()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with frames.connect(str(path)) as channel:
                channel.settimeout(5)
                with pytest.raises(EOFError):
                    frames.receive(channel)
        with frames.connect(str(path)) as channel:
            channel.settimeout(5)
            frames.send(channel, {"ask": ALIVE})
            assert frames.receive(channel) == ({}, [])


def test_a_run_that_has_changed_since_it_was_joined_is_refused(site, tmp_path):
    reason = enrol(make_site("0", tmp_path), d1=4).reason
    assert reason == f"client 0: run {RUN} is not as it was when this site joined it; start a new run"


def head_of(site):
    state = site.resident.live["model"].module.head.state_dict()
    return Message({"head": {name: value.clone() for name, value in state.items()}})


def private_site(home):
    found = Site("0", sites.builder("0"), sites.loader("0"), home / "0")
    enrol(found, "fedre")
    return found


def test_a_round_that_is_begun_anew_has_other_private_noise_and_a_repeated_one_the_stored_reply(tmp_path):
    found = private_site(tmp_path)
    down = head_of(found)
    first = ask(found, request(down))
    assert same(first, ask(found, request(down)))
    assert same(first, ask(found, request(down, attempt=2)))
    other = Message({name: value * 2 for name, value in down.items()})
    again = ask(found, request(other, attempt=3))
    assert not torch.equal(first.up["label"], again.up["label"])
    assert same(first, ask(private_site(tmp_path), request(down, incarnation=1)))


def test_noise_from_the_seed_is_the_simulations_in_every_attempt(tmp_path):
    found = make_site("0", tmp_path)
    enrol(found, "fedre")
    down = head_of(found)
    assert same(ask(found, request(down)), ask(found, request(down, attempt=2)))


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (Request("1", ("train",), Message(), Stamp(RUN, 1, 1, 1, 0)), "this was meant for client 1"),
        (Request("0", ("spy",), Message(), Stamp(RUN, 1, 1, 1, 0)), "fedmrl has no step 'spy'"),
        (Request("0", (), Message(), Stamp(RUN, 1, 1, 1, 0)), "fedmrl has no step"),
        (Request("0", ("train",), Message(), Stamp("b2", 1, 1, 1, 0)), "it has not joined this run yet"),
        (Request("0", ("train",), Message(), Stamp("../b", 1, 1, 1, 0)), "is no name of a run"),
    ],
)
def test_orders_that_make_no_sense_are_refused(site, order, reason):
    assert reason in ask(site, order).reason


def test_bytes_that_are_no_order_are_refused(site):
    for data in (b"", b"hello", Message().encode(), Message().encode({wire.KEY: '{"order": "dance"}'})):
        assert isinstance(wire.unpack_reply(site.answer(data)), Failure)


def test_a_server_cannot_name_code_for_a_site_to_run(tmp_path):
    reason = enrol(make_site("0", tmp_path), weights="os:system").reason
    assert "name the function 'os:system'; a site runs no code but its own" in reason


class Pact:
    """An agreement that writes down what it is asked, and refuses one thing."""

    def __init__(self, refuses=""):
        self.refuses, self.asked = refuses, []

    def _asked(self, what, *details):
        self.asked.append((what, *details))
        if what == self.refuses:
            raise PotluckError(f"this site did not agree to {what}")

    def admit_options(self, method, config):
        self._asked("options", method, config["d1"])

    def admit(self, method, client):
        self._asked("method", method.name, client.id)

    def let_measure(self, metrics):
        if metrics:
            self._asked("metrics", *metrics)

    def let_join(self, runs):
        """Any number of runs."""

    def let_play(self, rounds):
        """Any number of rounds."""

    def let_examine(self, round_, asked):
        """Any number of evaluations."""

    def let_in(self, steps, message):
        self._asked("in", steps)

    def let_try(self, round_, attempt):
        self._asked("try", round_, attempt)

    def let_out(self, steps, round_, message, spent=0):
        self._asked("out", steps, round_, spent)
        return spent + message.nbytes


def test_an_agreement_is_asked_before_anything_is_touched_and_before_anything_leaves(tmp_path):
    pact = Pact()
    site = make_site("0", tmp_path, agreement=pact)
    enrol(site)
    down = Message({"small": site.resident.live["small"].state()})
    ask(site, request(down))
    again = make_site("0", tmp_path, agreement=pact)  # the count of attempts survives a restart
    ask(again, request(down, attempt=2))
    ask(again, request(Message({name: value * 2 for name, value in down.items()}), attempt=3))
    admitted = [("options", "fedmrl", 8), ("method", "fedmrl", "0")]
    out = [("out", ("train",), 1, 0)] * 2  # of what is known before the work, and of what is there after it
    first, second = ([("try", 1, number), ("in", ("train",)), *out] for number in (1, 2))
    assert pact.asked == [*admitted, *first, *admitted, *second]


@pytest.mark.parametrize("refuses", ["options", "method", "try", "in", "out"])
def test_what_an_agreement_refuses_does_not_happen(tmp_path, refuses):
    site = make_site("0", tmp_path, agreement=Pact(refuses))
    reply = enrol(site)
    if refuses in ("try", "in", "out"):
        reply = ask(site, request(Message({"small": site.resident.live["small"].state()})))
        assert site.resident.record.begun is False
    assert reply == Failure("0", f"client 0: this site did not agree to {refuses}")


# --- data, secret, frames -------------------------------------------------------------------------------


def test_a_sites_data_may_be_arrays_or_a_map_style_data_set():
    pairs = [([float(row)] * 4, row % 2) for row in range(6)]
    whole, split = site_data({"train": pairs, "test": (torch.zeros(3, 4), torch.ones(3).long())}, "0", 2)
    assert (whole.task.input, whole.task.classes) == ((4,), 2)
    assert [len(rows) for rows in split["0"].parts] == [6, 0, 3]
    assert torch.equal(whole.y, torch.tensor([0, 1, 0, 1, 0, 1, 1, 1, 1]))


def test_a_sites_targets_of_a_regression_stay_what_they_are():
    pairs = [(torch.full((4,), float(row)), torch.tensor(row / 4)) for row in range(6)]
    with pytest.raises(DataError, match=r"client 0: y must be one integer class .* say task='regression'"):
        site_data({"train": pairs}, "0", None)
    whole, _ = site_data({"train": pairs, "task": "regression"}, "0", None)
    assert (whole.task.kind, whole.y.tolist()) == ("regression", [0, 0.25, 0.5, 0.75, 1, 1.25])


@pytest.mark.parametrize("data", [{"test": ([1], [2])}, {"train": 3}, {"train": ([[1.0]], [0]), "spy": 1}])
def test_data_that_cannot_be_used_are_named(data):
    with pytest.raises(DataError, match="client 7"):
        site_data(data, "7", 2)


def test_a_secret_is_made_once_and_nobody_else_can_read_it(tmp_path):
    first = kept_secret(tmp_path / "home", "a")
    assert kept_secret(tmp_path / "home", "a") == first
    assert kept_secret(tmp_path / "home", "b").integer != first.integer  # two runs share no noise
    assert (tmp_path / "home" / "secret").stat().st_mode & 0o077 == 0


def test_a_server_cannot_go_back_to_an_earlier_round(site, down):
    ask(site, request(down, round_=2))
    assert "round 1 came after round 2" in ask(site, request(down, round_=1)).reason


def test_only_what_a_client_needs_is_told_of_an_experiment():
    told = welcome(sites.federated("local"), RUN)
    assert set(told["experiment"]) == {*SENT, "data", "engine", "partition"}
    with pytest.raises(ConfigError, match="sites"):
        welcome(sites.simulated("local"), RUN)


def test_a_reply_that_cannot_be_read_is_an_error_of_the_message():
    good = Answer("0", Message({"w": torch.ones(2)}), Report(3, {"loss": torch.tensor(0.1)}))
    back = wire.unpack_reply(wire.pack_reply(good))
    assert (back.report.steps, back.report.losses) == (3, good.report.losses)
    assert torch.equal(back.up["w"], good.up["w"])
    for about in ({"reply": "answer", "client": "0"}, {"reply": "dance", "client": "0"}, []):
        with pytest.raises(MessageError):
            wire.unpack_reply(Message().encode({wire.KEY: json.dumps(about)}))


@pytest.mark.parametrize(
    "told",
    [
        {"width": "wide"},
        {"width": 0},
        {"classes_held": [10]},
        {"names": {"w": [-1]}},
        {"names": [1]},
        {"spy": 1},
    ],
)
def test_a_card_that_makes_no_sense_is_refused(told):
    about = {
        "reply": "card",
        "client": "0",
        "samples": {"train": 1, "validation": 0, "test": 0},
        "extra": told,
    }
    about["task"] = {"kind": "classification", "classes": 10, "input": [4]}
    with pytest.raises(MessageError, match="cannot be read"):
        wire.unpack_reply(Message().encode({wire.KEY: json.dumps(about)}))


def test_a_record_keeps_only_the_files_it_needs(site, down):
    for round_ in range(1, 8):
        ask(site, request(down, round_=round_, accepted=round_ - 1))
    files = sorted(path.suffix for path in site.resident.record.folder.iterdir())
    assert (
        files == [".answer"] * 4 + [".json"] + [".safetensors"] * 4
    )  # three accepted rounds and an open one


def test_what_tells_of_the_sites_files_stays_in_its_log(site, down, tmp_path, capsys):
    ask(site, request(down))
    (site.resident.record.folder / "record.json").write_text("{")
    reason = ask(make_site("0", tmp_path), request(down)).reason
    assert reason == "client 0: RunError at the site; the log of its worker says more"
    assert f"the record in {tmp_path}/0/runs/a1 cannot be read" in capsys.readouterr().err


def test_what_goes_wrong_in_a_sites_own_code_stays_in_its_log(tmp_path, capsys):
    def load():
        raise KeyError("Jane Doe")

    reason = enrol(Site("0", sites.builder("0"), load, tmp_path)).reason
    assert reason == "client 0: KeyError at the site; the log of its worker says more"
    assert "Jane Doe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            {"name": "fedmrl", "d1": 64},
            "d1 is 64, but client 0 (build_secret_net) has representation width 37",
        ),
        ({"name": "heterofl"}, "client 0 (build_secret_net) has a tensor 'trunk.hidden.weight'"),
    ],
)
def test_a_model_that_does_not_fit_is_described_in_the_sites_log_alone(tmp_path, capsys, method, told):
    def build_secret_net(input, classes):
        parts = {
            "flat": torch.nn.Flatten(),
            "hidden": torch.nn.Linear(64, 37),
            "last": torch.nn.Linear(37, 10),
        }
        return torch.nn.Sequential(OrderedDict(parts))

    lone = Site("0", build_secret_net, sites.loader("0"), tmp_path)
    reply = ask(lone, wire.Hello(welcome(sites.federated(method, models={"pool": "mlp-small"}), RUN)))
    assert reply.reason == "client 0: ModelError at the site; the log of its worker says more"
    assert told in capsys.readouterr().err


# --- the worker process ---------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path):
    """Starts worker processes at one socket, and ends them."""
    place = Path(tempfile.mkdtemp(prefix="potluck-"))
    file, begun = sites.write_site(tmp_path / "site", "0"), []

    def start(path=place / "worker", errors=None):
        words = [sys.executable, "-m", "potluck.deploy.flower.worker", "--client", "0", "--simulated"]
        words += ["--model", f"{file}:build", "--data", f"{file}:load", "--home", str(tmp_path / "home")]
        process = subprocess.Popen(
            [*words, "--socket", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        begun.append(process)
        assert process.stdout.readline() == (b"" if errors else b"ready\n")
        return process

    yield start, place / "worker", tmp_path / "site"
    for process in begun:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
    shutil.rmtree(place)


def ask_process(path, order):
    with frames.connect(str(path)) as channel:
        frames.send(channel, {}, [wire.pack_order(order)])
        _, (reply,) = frames.receive(channel)
    return wire.unpack_reply(reply)


def test_a_worker_killed_in_mid_step_goes_on_where_it_was(worker, site, down):
    start, path, trap = worker
    process = start()
    ask_process(path, wire.Hello(welcome(sites.federated({"name": "fedmrl", "d1": 8}), RUN)))
    first = ask_process(path, request(down))
    (trap / "die").touch()
    with pytest.raises(EOFError):
        ask_process(path, request(down, round_=2, accepted=1))
    assert process.wait(10) == -signal.SIGKILL
    start()
    second = ask_process(path, request(down, round_=2, accepted=1, attempt=2))
    assert same(first, ask(site, request(down)))
    assert same(second, ask(site, request(down, round_=2, accepted=1, attempt=2)))


def test_a_worker_ends_with_whoever_started_it(worker):
    process = worker[0]()
    process.stdin.close()
    assert process.wait(10) == 0


def test_a_worker_that_cannot_open_its_socket_says_so_and_is_not_started_again(worker, tmp_path):
    process = worker[0](tmp_path / "none" / "door", subprocess.PIPE)
    with process.stderr as errors:
        assert (
            errors.read().decode().startswith(f"error: cannot open a socket at {tmp_path}/none/door: No such")
        )
    assert process.wait(10) == BAD_INPUT


# --- numbers to predict ---------------------------------------------------------------------------------


def numbers(client):
    """A site's own data set: a number for every digit."""
    data = sites.simulated("local").load_data()
    rows = slice(60 * int(client), 60 * int(client) + 60)
    task = Task("regression", 1, data.task.input)
    y = data.y[rows].float() / 10
    return {"data": replace(data, task=task, x=data.x[rows], y=y, train_rows=40, class_names=("tenths",))}


def of_numbers(home, method):
    courier = Courier(home, model=lambda task: build("mlp-small", task))
    for number, client in enumerate(sites.IDS):
        courier.sites[number].load = functools.partial(numbers, client)
    values = sites.federated(method).model_copy(deep=True)
    return values.variant(partition={"sites": list(sites.IDS), "classes": 1}), courier


def test_sites_predict_numbers(tmp_path):
    experiment, courier = of_numbers(tmp_path, "fedavg")
    play(experiment, courier, open_folder(tmp_path / "run"))
    last = sites.log(tmp_path / "run")[-1]
    assert last["test"]["metric"] == "r2"
    assert last["test"]["samples"] == 20


def test_a_method_of_classes_refuses_sites_that_predict_numbers(tmp_path):
    experiment, courier = of_numbers(tmp_path, "fedproto")
    with pytest.raises(
        ConfigError, match="fedproto learns from one class per sample; client 0 has regression"
    ):
        play(experiment, courier, open_folder(tmp_path / "run"))
