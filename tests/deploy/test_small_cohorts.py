"""Rounds that ask few of the clients, or one: a liar among them must not end the run."""

from dataclasses import replace

import pytest
import torch
from links import EndsAfter, Killed, Told, serve
from test_unlike_groups import IDS, FiveSites
from test_unlike_groups import experiment as five

from potluck.core.message import Message
from potluck.deploy import wire
from potluck.deploy.suspects import Suspect, find_suspect, find_tie
from potluck.engine.norms import Ratios, SentPart, norm_ratios
from potluck.engine.protocol import Answer, Request
from potluck.errors import RoundFailed

ALIKE = dict.fromkeys(IDS, "mlp-small")
OPTIONS = {
    "fedmrl": {"d1": 8},
    "feddf": {"steps": 4, "every": 2, "batch": 20},
    "fed-et": {"steps": 4, "batch": 20},
}
RANGED = ("counts", "classes")


def experiment(method, share, rounds=8, **training):
    settings = {"name": method, **OPTIONS.get(method, {})}
    return five(settings, ALIKE, rounds, participation=share, **training)


def largest(*clients):
    """The largest numbers that there are, in every message of these clients."""

    def tamper(order, data):
        asked = isinstance(order, Request) and order.client in clients and order.purpose == "train"
        answer = wire.unpack_reply(data)
        if not asked or not isinstance(answer, Answer):
            return data
        up = {
            name: torch.full_like(value, 3e38) if value.is_floating_point() and name not in RANGED else value
            for name, value in answer.up.items()
        }
        return wire.pack_reply(replace(answer, up=Message(up)))

    return tamper


def refused(told):
    return [one for one in told.notices if "(training.max_norm)" in one and "goes on without" in one]


@pytest.mark.parametrize(
    ("method", "share", "liars"),
    [
        ("fedavg", 0.2, "1"),
        ("fedproto", 0.2, "1"),
        ("fedgh", 0.2, "1"),
        ("fedmrl", 0.2, "1"),
        ("feddf", 0.2, "1"),
        ("fed-et", 0.4, "1"),
        ("fedgh", 0.4, "1"),
        ("fedavg", 0.6, "13"),
        ("fedgh", 0.6, "13"),
    ],
)
def test_liars_do_not_end_a_run_whose_rounds_ask_few(tmp_path, method, share, liars):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = largest(*liars)
    serve(link, tmp_path / "run", experiment(method, share), told)
    assert {end.round for end in told.ends} == {*range(1, 9)}
    honest = [client for client in IDS if client not in liars]
    assert not [one for one in refused(told) for client in honest if f"without client {client}:" in one]


def first_drawn(link, method, share, tmp_path):
    """Who plays the first round."""
    with pytest.raises(Killed):
        serve(link, tmp_path / "look", experiment(method, share), EndsAfter(0))
    return link.asked(1)


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedgh"])
def test_nor_does_one_that_is_asked_before_all_others(tmp_path, method):
    (liar,) = first_drawn(FiveSites(tmp_path / "look", ALIKE), method, 0.2, tmp_path)
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = largest(liar)
    serve(link, tmp_path / "run", experiment(method, 0.2), told)
    assert {end.round for end in told.ends} == {*range(1, 9)}
    assert {one for round_ in range(1, 9) for one in link.asked(round_)} > {liar}


def test_where_all_diverge_the_run_still_ends_and_the_rate_is_named(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    settings = experiment("fedproto", 0.2, optimizer={"lr": 1e30})
    with pytest.raises(RoundFailed, match=r"lower training\.optimizer\.lr"):
        serve(link, tmp_path / "run", settings, told)


def test_clients_that_were_not_asked_speak_by_what_they_sent_last():
    part = SentPart("model", ("model",), ("model/w",), 1)
    liar, absent = {"liar": [(part, 1e6)]}, {("model",): [1.0, 2.0]}
    assert norm_ratios(liar, {}) == {}
    assert norm_ratios(liar, {}, absent)["liar", ("model",)] == Ratios(5e5, 5e5)
    two = liar | {"other": [(part, 1e6)]}
    assert norm_ratios(two, {}, absent)["liar", ("model",)] == Ratios(1.0, 5e5)
    assert norm_ratios(two, {}, {("model",): [1.0, 2.0, 2.0]})["liar", ("model",)] == Ratios(5e5, 5e5)


def test_who_was_not_in_a_round_has_a_voice_but_is_no_suspect():
    assert find_suspect({"a": 1e30}) is None
    assert find_suspect({"a": 1e30}, {"b": 1.0}) is None
    assert find_suspect({"a": 1e30}, {"b": 1.0, "c": 2.0}) == Suspect("a", 1e30 / 1.5)
    assert find_suspect({"a": 1.0}, {"b": 1e30, "c": 2.0, "d": 1.0}) is None
    assert find_suspect({"a": 1.0, "b": 1e30}, {"c": 2.0}) == Suspect("b", 1e30 / 1.5)
    assert find_suspect({"a": 1.0}, {"tiny": 1e-9, "b": 1.0}) is None
    assert find_tie({"a": 1.0, "b": 1e30}) is not None
