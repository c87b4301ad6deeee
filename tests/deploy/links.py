"""Sites of this process behind a courier, with people who come late, leave, or lose an answer."""

from __future__ import annotations

from dataclasses import replace

import sites

from potluck.core.message import Message
from potluck.deploy import wire
from potluck.deploy.run import open_folder, prepared
from potluck.deploy.run import play as play_prepared
from potluck.deploy.site import Site
from potluck.engine.protocol import Answer, Examination, Request
from potluck.engine.retries import Clock
from potluck.runs.observers import Observer

FEDMRL = {"name": "fedmrl", "d1": 8}


class Time:
    """Time that passes only when somebody waits; what is due by then is done."""

    def __init__(self):
        self.seconds = 0.0
        self.waits = []
        self.due = []

    def clock(self):
        return Clock(lambda: self.seconds, self.sleep)

    def sleep(self, seconds):
        self.seconds += seconds
        self.waits.append(seconds)
        for moment, action in [*self.due]:
            if moment <= self.seconds:
                self.due.remove((moment, action))
                action()

    def at(self, moment, action):
        self.due.append((moment, action))


class Link:
    """Carries bytes to sites of this process; those in `away` are not connected."""

    def __init__(self, home, away=(), model=None, simulated=True):
        self.home, self.away = home, set(away)
        entry = {client: model or sites.builder(client) for client in sites.IDS}
        self.make = lambda client: Site(
            client, entry[client], sites.loader(client), home / client, simulated=simulated
        )
        self.sites = {number: self.make(client) for number, client in enumerate(sites.IDS)}
        self.lose = lambda order: None  # a sentence: no answer comes
        self.tamper = lambda order, answer: answer
        self.orders = []

    def nodes(self):
        return [node for node, site in self.sites.items() if site.client not in self.away]

    def keys(self):
        return {}

    def took(self):
        return []

    def exchange(self, letters, timeout, most):
        return [self._answer(node, data) for node, data in letters]

    def _answer(self, node, data):
        order = wire.unpack_order(data)
        self.orders.append(order)
        lost = self.lose(order)
        return lost or self.tamper(order, self.sites[node].answer(data))

    def asked(self, round_):
        """Who was asked to train in a round."""
        found = [one.client for one in self.orders if isinstance(one, Request) and one.stamp.round == round_]
        return [*dict.fromkeys(found)]


class Told(Observer):
    """Keeps what a run tells."""

    def __init__(self):
        self.notices, self.ends = [], []

    def notice(self, sentence):
        self.notices.append(sentence)

    def round(self, end):
        self.ends.append(end)


class Killed(Exception):
    """A server ended without its doing."""


class EndsAfter(Told):
    """Ends the server when a round is over and on record, as a kill would."""

    def __init__(self, round_):
        super().__init__()
        self.last = round_

    def round(self, end):
        super().round(end)
        if end.round == self.last + 1:
            raise Killed


def serve(link, folder, experiment, told=None, time=None, **options):
    """A federation as `potluck serve` plays it, in a time of its own."""
    clock, home = (time or Time()).clock(), open_folder(folder)
    with home.locked():
        return play_prepared(prepared(experiment), link, home, told or Told(), clock=clock, **options)


def is_evaluation(order, client, round_):
    return isinstance(order, Examination) and (order.client, order.stamp.round) == (client, round_)


def is_training(order, client, round_):
    return isinstance(order, Request) and (order.client, order.stamp.round) == (client, round_)


def blown_up(when, factor=1e30):
    """An answer whose tensors are multiplied, for the orders chosen."""

    def tamper(order, data):
        answer = wire.unpack_reply(data)
        if not (when(order) and isinstance(answer, Answer)):
            return data
        up = {
            name: value * factor if value.is_floating_point() else value for name, value in answer.up.items()
        }
        return wire.pack_reply(replace(answer, up=Message(up)))

    return tamper
