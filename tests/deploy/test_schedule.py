"""Fifty kill events over all processes of a federation: it ends with the bytes of an undisturbed run.

POTLUCK_FAULT_SEED draws another schedule, POTLUCK_SCHEDULE_LOG names a file for a log of what happened.
"""

from __future__ import annotations

import contextlib
import os
import time

import pytest
import sites
from schedule import Blow, draw, generator
from supervised import Supervised, newest_state, server_state

from potluck.files import read_json

pytest.importorskip("flwr")

SEED, EVENTS, ROUNDS = int(os.environ.get("POTLUCK_FAULT_SEED", "18")), 50, 10
METHODS = (
    {"name": "fedmrl", "d1": 8},
    "fedre",  # private noise
    {"name": "fedin", "noise": 0.8, "project": "fixed"},  # two exchanges, private noise
    "fedproto",
    {"name": "fedmrl", "d1": 8},
)


def experiment(method, rounds, quorum, deadline, **training):
    asked = {"rounds": rounds, "batch_size": 16, "optimizer": {"lr": 0.05}, "quorum": quorum} | training
    engine = {"device": "cpu", "workers": 1, "deadline": deadline, "patience": 400}
    return sites.federated(method, training=asked, engine=engine)


def test_a_schedule_is_drawn_from_its_seed_and_covers_every_process():
    drawn = draw(SEED, EVENTS, ROUNDS)
    assert drawn == draw(SEED, EVENTS, ROUNDS) != draw(SEED + 1, EVENTS, ROUNDS)
    events = [event for one in drawn for event in one]
    assert len(events) == EVENTS
    targets = {event.first.target for event in events}
    assert targets == {event.first.target for event in events if event.first.stop}
    assert targets == {"server", "superlink", "gate", "supernode", "worker", "join"}
    assert {event.phase for event in events} == {"joining", "training", "evaluation", "between"}
    assert sum(event.second is not None for event in events) >= 10


@pytest.mark.faults
@pytest.mark.parametrize("number", range(len(METHODS)))
def test_a_disturbed_federation_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, number):
    asked = experiment(METHODS[number], ROUNDS, quorum=1.0, deadline=150)
    with contextlib.closing(Supervised(tmp_path, asked)) as federation:
        federation.tell(f"federation {number + 1} of {len(METHODS)}: {METHODS[number]}, seed {SEED}")
        federation.prepare()
        for client in sites.IDS:
            federation.join_one(client)
        federation.serve_all()
        for event in draw(SEED, EVENTS, ROUNDS)[number]:
            federation.play(event)
        federation.end()
    undisturbed, run = federation.reference(), federation.name_of_run()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (federation.run / name).read_bytes() == (undisturbed / "run" / name).read_bytes(), name
    assert server_state(federation.run) == server_state(undisturbed / "run")
    for client in sites.IDS:
        mine, expected = tmp_path / client / "home", undisturbed / client
        assert newest_state(mine, run) == newest_state(expected, run)
    federation.tell(
        "  metrics, ledger, states of the server and of all sites: the bytes of an undisturbed run"
    )


@pytest.mark.faults
def test_with_half_a_quorum_a_federation_goes_on_without_the_missing_and_says_who_was(tmp_path):
    """One client comes late, one lapses, one is gone for good; then the server is killed and starts without it."""
    late, lapsing, gone = map(str, generator(SEED).permutation(sites.IDS))
    asked = experiment({"name": "fedmrl", "d1": 8}, 8, quorum=0.5, deadline=25, start_quorum=0.6)
    with contextlib.closing(Supervised(tmp_path, asked)) as federation:
        federation.tell(f"quorum 0.5: {late} comes late, {lapsing} lapses, {gone} is gone for good")
        federation.prepare()
        for client in (lapsing, gone):
            federation.join_one(client)
        federation.serve_all()
        federation.wait(lambda: federation.rounds() == 1, 300)
        federation.join_one(late)
        federation.wait(
            lambda: f"taken in after round {federation.rounds()}: {late}" in federation.log("serve"), 300
        )
        federation.tell(f"{late} was taken in after round {federation.rounds()}")
        held = federation.rounds() + 2
        (tmp_path / lapsing / "hold").touch()
        federation.wait(lambda: federation.rounds() >= held, 300)
        (tmp_path / lapsing / "hold").unlink()
        federation.tell(f"{lapsing} was held up to round {federation.rounds()}")
        federation.services.pop(f"join-{gone}").close()
        federation.tell(f"{gone} is gone in round {federation.rounds() + 1}")
        ended = federation.rounds() + 1
        federation.wait(lambda: federation.rounds() >= ended, 300)
        time.sleep(generator(SEED).uniform(0, 5))
        federation.strike(Blow("server"))
        federation.end()
    said = federation.log("serve")
    assert f"goes on without client {lapsing}" in said
    assert f"goes on without client {gone}" in said or f"going on without {gone}" in said
    summary = read_json(federation.run / "summary.json")
    assert summary["accuracy"]["missing"]["last"] == [gone]
    last = {line["client"]: "missing" in line for line in sites.log(federation.run) if line["round"] == 8}
    assert last == {late: False, lapsing: False, gone: True}
