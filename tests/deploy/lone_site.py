"""One site of a federation and the orders a server sends it, for tests: bytes in, bytes out."""

from __future__ import annotations

import sites
import torch

from potluck.core.message import Message
from potluck.deploy import wire
from potluck.deploy.site import Site
from potluck.deploy.welcome import welcome
from potluck.engine.protocol import Request, Stamp

RUN = "a1"
OPTIONS = {"fedmrl": {"d1": 8}, "fedmd": {"samples": 30, "initial": 1}}


def make_site(home, client="0", simulated=True, **options):
    return Site(
        client, sites.builder(client), sites.loader(client), home / client, simulated=simulated, **options
    )


def offer(method="fedmrl", run=RUN, rounds=2):
    return welcome(sites.federated({"name": method, **OPTIONS.get(method, {})}, rounds), run)


def greet(site, told):
    return wire.unpack_reply(site.answer(wire.pack_order(wire.Hello(told))))


def joined(home, method="fedmrl", rounds=2, **options):
    """A site that has joined a run."""
    site = make_site(home, **options)
    greet(site, offer(method, rounds=rounds))
    assert site.resident is not None
    return site


def request(down, round_=1, exchange=1, accepted=0, attempt=1, incarnation=0, steps=("train",)):
    return Request("0", steps, down, Stamp(RUN, round_, attempt, exchange, accepted, incarnation))


def ask(site, order):
    return wire.unpack_reply(site.answer(wire.pack_order(order)))


def same(one, other):
    return one.up.keys() == other.up.keys() and all(
        torch.equal(one.up[name], other.up[name]) for name in one.up
    )


def small(site, factor=1.0):
    """A downlink of FedMRL."""
    return Message({"small": _made_up(site.resident.live["small"].state(), factor)})


def head(site, factor=1.0):
    """A downlink of FedRE, whose replies hold private noise."""
    return Message({"head": _made_up(site.resident.live["model"].module.head.state_dict(), factor)})


def _made_up(state, factor):
    return {
        name: torch.linspace(-0.1, 0.1, value.numel()).reshape(value.shape) * factor
        for name, value in state.items()
    }
