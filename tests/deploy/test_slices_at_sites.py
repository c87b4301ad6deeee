"""Methods that cut one network by width, among sites: each knows its own model and, from the pool, the parent."""

import dataclasses

import pytest
import sites
import torch
from test_sites import Courier, make_site, play

from potluck.core.message import Message
from potluck.deploy.rehearsal import propose
from potluck.deploy.run import open_folder
from potluck.deploy.site import REHEARSAL
from potluck.deploy.welcome import welcome
from potluck.deploy.wire import LARGEST_OPEN, Hello, pack_order, unpack_reply
from potluck.engine.protocol import Failure, Request, Stamp
from potluck.runs.api import run

WIDTHS = tuple({"name": "conv-large", "scale": scale} for scale in (0.08, 0.04, 0.08))


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", {"name": "fjord", "distil": True}], ids=str)
def test_sites_play_what_a_simulation_plays(method, tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "MODELS", WIDTHS)
    play(sites.federated(method), Courier(tmp_path), open_folder(tmp_path / "run"))
    run(sites.simulated(method), out=tmp_path / "serial")
    assert sites.log(tmp_path / "run") == sites.log(tmp_path / "serial")


PLAIN = tuple({"name": "mlp-large", "scale": scale} for scale in (1.0, 0.5, 1.0))  # without batch norm


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "fjord"])
def test_models_without_batch_norm_can_be_pinned(method, tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "MODELS", PLAIN)
    told, link = sites.federated(method), Courier(tmp_path / "sites")
    for number, client in enumerate(sites.IDS):
        seen = make_site(client, tmp_path / "rehearsal")
        agreed, _ = propose(seen.federation(welcome(told, REHEARSAL)["experiment"], REHEARSAL), client)
        link.sites[number] = dataclasses.replace(link.sites[number], agreement=agreed)
    play(told, link, open_folder(tmp_path / "run"))
    run(sites.simulated(method), out=tmp_path / "serial")
    assert sites.log(tmp_path / "run") == sites.log(tmp_path / "serial")


def test_a_part_that_a_site_has_not_lets_nothing_in(tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "MODELS", PLAIN)
    site = make_site("0", tmp_path)
    site.answer(pack_order(Hello(welcome(sites.federated("fjord"), "a1"))))
    assert site.most_bytes < LARGEST_OPEN // 100
    model = {name: value.clone() for name, value in site.resident.live["model"].wire().items()}
    down = Message({"model": model, "statistics": {"any": torch.zeros(10, 10)}})
    order = Request("0", ("train",), down, Stamp("a1", 1, 1, 1, 0, 0))
    reply = unpack_reply(site.answer(pack_order(order)))
    assert isinstance(reply, Failure)
    assert "'statistics/any' is not part of 'statistics'" in reply.reason
