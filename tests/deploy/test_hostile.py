"""Hostile replies through the real server: each is refused and named, and nobody else loses a round."""

import json
from collections import Counter, deque
from dataclasses import dataclass

import hostile
import pytest
import sites
from test_sites import OPTIONS, SAME_MODEL, Courier, play

import potluck.deploy.engine
from potluck.deploy import wire
from potluck.deploy.run import open_folder
from potluck.engine.protocol import Examination
from potluck.runs.observers import Observer

METHODS = ("fedproto", "fedgh", "fedre", "fedavg", "fedmrl", "fedin", "fedmuscle")
LIAR = "1"
STRANGERS = 100  # nodes from this number on only introduce themselves, and leave


class Queue:
    """Kinds of lies, every one so many times, in an order drawn from a seed."""

    def __init__(self, table, draw, times=1):
        self.table, self.draw, order = table, draw, []
        for _ in range(times):
            names = list(table)
            order += [names.pop(draw.number(0, len(names))) for _ in range(len(names))]
        self.waiting = deque(order)

    def __len__(self):
        return len(self.waiting)

    def lie(self, data):
        """The name of the next kind that has something to work on here, and what it makes of honest bytes."""
        for _ in range(len(self.waiting)):
            name = self.waiting.popleft()
            found = self.table[name](self.draw, data)
            if found is not None:
                return name, found
            self.waiting.append(name)  # for another method
        return "", data


@dataclass
class Lies:
    """What a liar has yet to tell."""

    cards: Queue
    answers: Queue
    examinations: Queue

    @classmethod
    def drawn(cls, seed, times=1):
        draw = hostile.Draw(seed)
        tables = hostile.CARDS, hostile.ANSWERS, hostile.EXAMINATIONS
        return cls(*(Queue(table, draw, times) for table in tables))


class Liar(Courier):
    """Carries honest bytes, but those of client 1. Strangers come in its name before it does."""

    def __init__(self, home, lies, strangers, **options):
        super().__init__(home, **options)
        self.lies, self.strangers = lies, set(range(STRANGERS, STRANGERS + strangers))
        self.told = {"card": {}, "answer": {}, "examination": {}}  # kinds by node or round
        self.tamper, self.later = self.lie, False

    def nodes(self):
        return [0, 2, *self.strangers] if self.strangers else list(self.sites)

    def _answer(self, node, data):
        if node not in self.strangers:
            return super()._answer(node, data)
        self.strangers.remove(node)
        return self._told("card", node, self.lies.cards, self.sites[1].answer(data))

    def lie(self, order, data):
        if isinstance(order, wire.Hello) or order.client != LIAR:
            return data
        if isinstance(order, Examination):
            return self._told("examination", order.stamp.round, self.lies.examinations, data)
        if self.later and order.stamp.exchange <= order.stamp.round % 2:
            return data  # every other round begins honestly
        return self._told("answer", order.stamp.round, self.lies.answers, data)

    def _told(self, what, where, queue, data):
        name, found = queue.lie(data)
        if name:
            self.told[what][where] = name
        return found


def experiment(method, rounds):
    same = SAME_MODEL if method == "fedavg" else {}
    others = {
        "training": {"rounds": rounds, "batch_size": 256, "optimizer": {"lr": 0.05}},
        "engine": {"device": "cpu", "workers": 1, "deadline": 60, "patience": 60},
        "public": {"data": "digits", "samples": 40},
    }
    return sites.federated({"name": method, **OPTIONS.get(method, {})}, **others, **same)


def lied_to(method, home, lies, rounds, strangers):
    """Play rounds with a liar; how many lies of which kinds were told, all of them refused."""
    courier = Liar(home, lies, strangers, **({"model": "conv-small"} if method == "fedavg" else {}))
    courier.later = method == "fedmuscle"  # its rounds have several exchanges
    notices, watcher, folder = [], Observer(), home / "run"
    watcher.notice = notices.append
    play(experiment(method, rounds), courier, open_folder(folder), watcher)

    out = [notice for notice in notices if "goes on without" in notice]
    assert all(f"goes on without client {LIAR}" in notice for notice in out), out
    refused = {int(notice.split()[1]) for notice in out}
    taken = {round_: kind for round_, kind in courier.told["answer"].items() if round_ not in refused}
    assert not taken, f"{method} took {taken}"
    strange = {int(notice.split()[1]) for notice in notices if "was not taken in" in notice}
    assert strange == courier.told["card"].keys(), f"{method}: {courier.told['card']}"
    lines = sites.log(folder)
    for round_ in range(1, rounds + 1):
        measured, missing = (
            {line["client"] for line in lines if line["round"] == round_ and ("missing" in line) is lacks}
            for lacks in (False, True)
        )
        lie = courier.told["examination"].get(round_)
        assert missing == ({LIAR} if lie else set()), f"{method}, round {round_}: {lie}"
        assert measured == {"0", "1", "2"} - missing, f"{method}, round {round_}: {lie}"
    assert all(0 <= line["test"]["accuracy"] <= 1 for line in lines if "missing" not in line)
    assert all(notice.isprintable() and len(notice) < 2500 for notice in notices)
    json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    return Counter(kind for kinds in courier.told.values() for kind in kinds.values())


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(potluck.deploy.engine, "LOOK", 0.0)


def test_no_hostile_reply_is_taken_and_nobody_else_loses_a_round(tmp_path):
    lies, told = Lies.drawn(18), Counter()
    for left, method in zip(range(len(METHODS), 0, -1), METHODS, strict=True):
        shares = [-(-len(queue) // left) for queue in (lies.cards, lies.answers)]
        told += lied_to(method, tmp_path / method, lies, rounds=shares[1], strangers=shares[0])
    assert len(told) >= 80, sorted(hostile.kinds().keys() - told.keys())


@pytest.mark.faults
def test_a_thousand_hostile_replies(tmp_path):
    told = Counter()
    for number, method in enumerate(METHODS):
        lies = Lies.drawn(1000 + number)
        told += lied_to(method, tmp_path / method, lies, rounds=72, strangers=len(lies.cards))
    assert sum(told.values()) >= 1000
    assert told.keys() == hostile.kinds().keys()
    print(f"{sum(told.values())} hostile replies of {len(told)} kinds, none taken")
