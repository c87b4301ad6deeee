"""Cards that no honest client has: they are turned away, and cost the server neither its life nor its memory."""

import pytest
import sites
from hostile import note_of, noted
from links import Link, Told, serve

from potluck.core.task import Task
from potluck.data import public as public_data
from potluck.deploy import enrolled, wire
from potluck.deploy.misfits import without_misfits
from potluck.engine.protocol import Examination
from potluck.errors import ConfigError
from potluck.models import registry

FEDMUSCLE = {"name": "fedmuscle", "peers": 1, "batch": 20, "bundle": 2}


def late(home, liar, **task):
    """A link to two honest clients, and a liar that comes after round 1 with another task on its card."""
    link = Link(home, away={liar})

    def tamper(order, data):
        if isinstance(order, wire.Hello) and note_of(data).get("client") == liar:
            return noted(data, note_of(data) | {"task": note_of(data)["task"] | task})
        return data

    def come(order):
        if isinstance(order, Examination) and order.stamp.round == 1:
            link.away.clear()

    link.tamper, link.lose = tamper, come
    return link


def federated(method, **changes):
    experiment = sites.federated(method, rounds=2).variant(**changes)
    training = experiment.training.model_dump(mode="json")
    return experiment.variant(training={**training, "start_quorum": 0.6, "quorum": 0.5})


# --- shapes that a kind of task cannot have -------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "segmentation", "input": [7]},
        {"kind": "segmentation", "input": [1, 7]},
        {"kind": "text-classification", "input": [1, 7, 7]},
        {"kind": "retrieval", "input": [9, 9], "image": [1, 3, 3]},
        {"kind": "retrieval", "input": [20], "image": [9]},
        {"kind": "retrieval", "input": [20]},
    ],
)
def test_a_task_has_samples_that_its_kind_can_have(wrong):
    with pytest.raises(ValueError, match=f"{wrong['kind']} samples? .*"):
        Task.from_json({"classes": 3, **wrong})


def test_a_model_does_not_fit_samples_without_height_and_width():
    assert not any(
        one.fits(Task("segmentation", 3, (7,))) for one in registry._registry.values() if one.takes
    )


def test_an_odd_card_that_comes_late_is_turned_away(tmp_path):
    told, link = Told(), late(tmp_path, "1", kind="segmentation", input=[7])
    serve(link, tmp_path / "run", federated({"name": "fedhenn", "samples": 30}), told)
    assert len(told.ends) == 2
    assert any(
        "node 1 was not taken in" in one and "segmentation samples have 3 axes" in one for one in told.notices
    )


def test_any_error_over_a_card_turns_that_client_away(tmp_path, monkeypatch):
    build, told = enrolled._facts, Told()

    def odd(enrolments, *rest):
        if "1" in enrolments:
            raise ZeroDivisionError("of a card")
        return build(enrolments, *rest)

    monkeypatch.setattr(enrolled, "_facts", odd)
    serve(late(tmp_path, "1"), tmp_path / "run", federated({"name": "fedhenn", "samples": 30}), told)
    assert len(told.ends) == 2
    assert any(
        "client 1 cannot join after round 1: ZeroDivisionError: of a card" in one for one in told.notices
    )


def test_any_error_at_the_start_is_that_of_one_client_or_one_sentence():
    task = Task("classification", 2, (1,))

    def build(roster):
        if "b" in roster:
            raise ZeroDivisionError("of a card")
        return roster

    tasks = dict.fromkeys("abc", task)
    assert without_misfits(("a", "b", "c"), tasks, None, build) == (
        ("a", "c"),
        {"b": "ZeroDivisionError: of a card"},
    )
    with pytest.raises(ConfigError, match="cannot be set up: ZeroDivisionError: of a card"):
        without_misfits(("b",), tasks, None, build)


# --- memory ---------------------------------------------------------------------------------------------


def sizes_made(monkeypatch):
    """The shapes that public images are brought to."""
    found, make = [], public_data._images

    def images(public, rows, shape):
        found.append(shape)
        return make(public, rows, shape)

    monkeypatch.setattr(public_data, "_images", images)
    return found


def test_a_card_with_huge_samples_is_turned_away(tmp_path, monkeypatch):
    told, made = Told(), sizes_made(monkeypatch)
    link = late(tmp_path, "2", input=[1, 2100, 2100])
    serve(link, tmp_path / "run", federated(FEDMUSCLE, partition={"sites": sites.IDS}), told)
    assert len(told.ends) == 2
    assert any(
        "client 2 has samples of 4,410,000 numbers (1×2100×2100), and a server takes at most 4,194,304" in one
        for one in told.notices
    )
    assert max(made) == (1, 8, 8)


def test_public_samples_are_not_brought_to_the_size_of_every_card(tmp_path, monkeypatch):
    """The server looks at the samples of its own view alone; of the others it needs to know which exist."""
    told, made = Told(), sizes_made(monkeypatch)
    link = late(tmp_path, "2", input=[1, 300, 300])
    serve(link, tmp_path / "run", federated(FEDMUSCLE, partition={"sites": sites.IDS}), told)
    assert len(told.ends) == 2
    assert (1, 300, 300) not in made


def test_the_servers_own_view_of_public_samples_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(enrolled, "most_public", lambda: 60 * 64 * 4)
    told = Told()
    link = late(tmp_path, "0", input=[1, 9, 9])
    serve(link, tmp_path / "run", federated(FEDMUSCLE, partition={"sites": sites.IDS}), told)
    assert len(told.ends) == 2
    assert any("client 0 would have the server hold 60 public samples" in one for one in told.notices)
