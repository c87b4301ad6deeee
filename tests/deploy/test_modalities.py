"""CreamFL over sites of several modalities: what one site sees of a public sample, the others cannot know."""

from dataclasses import replace
from functools import cache

import pytest
import sites
import torch
from hostile import note_of, noted
from links import EndsAfter, Killed, Link, Told, serve

from potluck.core.message import Message
from potluck.core.state import Report
from potluck.data import DataConfig
from potluck.deploy import wire
from potluck.deploy.rehearsal import propose
from potluck.deploy.site import Site
from potluck.deploy.welcome import welcome
from potluck.engine.protocol import Answer, Request

CREAMFL = {"name": "creamfl", "batch": 20}
SEEN = {"0": ("digits", "conv-small"), "1": ("digits-captions", "dual-small"), "2": ("digits", "mlp-small")}
TEXTS = {"kind": "text-classification", "classes": 10, "input": [5], "vocabulary": 9}


@cache
def few(name):
    data = DataConfig(name=name).load()
    return replace(data, x=data.x[:60], y=data.y[:60], train_rows=40)


def site(home, client, **options):
    name, model = SEEN[client]
    public = DataConfig(name="digits-captions").load()
    return Site(
        client, model, lambda: {"data": few(name), "public": public}, home / client, simulated=True, **options
    )


def mixed(rounds=3):
    """Two sites with images, one with pairs of images and texts, as the method is for."""
    return sites.federated(
        CREAMFL,
        rounds,
        models={"pool": {client: model for client, (_, model) in SEEN.items()}, "rep_dim": 16},
        public={"data": "digits-captions", "samples": 40},
    ).variant(partition={"sites": sites.IDS})


def downlinks(link, round_):
    return [set(one.down) for one in link.orders if isinstance(one, Request) and one.stamp.round == round_]


def left_out(told):
    return [notice for notice in told.notices if "goes on without" in notice]


@pytest.mark.parametrize("pinned", [False, True])
def test_sites_with_images_and_with_pairs_get_the_tables_of_both(tmp_path, pinned):
    link, told = Link(tmp_path), Told()
    for number, client in enumerate(SEEN):
        told_of = welcome(mixed(), "check")["experiment"]
        checked = site(tmp_path / "check", client).federation(told_of, "check") if pinned else None
        agreement = propose(checked, client)[0] if checked else None
        link.sites[number] = site(tmp_path, client, agreement=agreement)
    serve(link, tmp_path / "run", mixed(), told)
    assert not left_out(told)
    assert downlinks(link, 2) == [{"image", "pair"}] * 3
    assert [end.round for end in told.ends] == [1, 2, 3]


def as_texts(link, late):
    """Client 1 says that its task is about texts, and sends something of the right shape."""

    def tamper(order, data):
        if isinstance(order, Request) and order.stamp.round == 1:
            link.away = set()
        note = note_of(data)
        if note["client"] != "1":
            return data
        if isinstance(order, wire.Hello):
            return noted(data, note | {"task": TEXTS})
        if isinstance(order, Request):
            rows = torch.nn.functional.normalize(
                torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
            )
            return wire.pack_reply(Answer("1", Message({"representations": rows}), Report(1, {}, {})))
        return data

    link.away, link.tamper = {"1"} if late else set(), tamper
    return link


def alike(rounds):
    training = {"rounds": rounds, "batch_size": 64, "optimizer": {"lr": 0.05}, "start_quorum": 0.5}
    values = {"models": {"pool": "mlp-small", "rep_dim": 16}, "public": {"data": "digits", "samples": 40}}
    everyone = {"sites": sites.IDS}
    return sites.federated(CREAMFL, rounds, training=training, **values).variant(partition=everyone)


@pytest.mark.parametrize("late", [False, True])
def test_a_card_of_another_modality_puts_nobody_else_out(tmp_path, late):
    link, told = as_texts(Link(tmp_path, model="mlp-small"), late), Told()
    serve(link, tmp_path / "run", alike(4), told)
    assert [end.round for end in told.ends] == [1, 2, 3, 4]
    assert not [notice for notice in left_out(told) if "without client 1:" not in notice]


def test_the_table_of_a_modality_that_nobody_has_any_more_is_no_obstacle(tmp_path):
    """The only client with texts is excluded; the server still has its table and sends it."""
    link, told = as_texts(Link(tmp_path, model="mlp-small"), late=False), Told()
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", alike(4), EndsAfter(1))
    serve(link, tmp_path / "run", alike(4), told, exclude=["1"])
    assert told.ends[-1].round == 4
    assert not left_out(told)
    assert downlinks(link, 4) == [{"image", "text"}] * 2
