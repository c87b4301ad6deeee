"""Cards that no honest client has: they are turned away, and cost the server neither its life nor its memory."""

import pytest
import sites
from hostile import note_of, noted
from links import Link, Time, Told, serve

from potluck.core.card_fields import parse_fields
from potluck.core.task import Task
from potluck.data import public as public_data
from potluck.deploy import enrolled, served_run, wire
from potluck.deploy.engine import GRACE
from potluck.deploy.misfits import without_misfits
from potluck.deploy.site import Site
from potluck.deploy.suspects import NOT_FINITE
from potluck.engine.protocol import Examination, Failure, Request
from potluck.errors import ConfigError, RoundFailed
from potluck.experiment.schema import Experiment
from potluck.models import ModelPool, registry

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
    def build(roster):
        if "b" in roster:
            raise ZeroDivisionError("of a card")
        return roster

    facts = {client: {"task": 1} for client in "abc"}
    assert without_misfits(("a", "b", "c"), facts, build) == (
        ("a", "c"),
        {"b": "ZeroDivisionError: of a card"},
    )
    with pytest.raises(ConfigError, match="cannot be set up: ZeroDivisionError: of a card"):
        without_misfits(("b",), facts, build)


# --- several cards that do not fit ----------------------------------------------------------------------


def of_one_width(least=1, foes=()):
    """Builds a roster of clients with the same width, as `abcXY` has it; no two `foes` are in it together."""

    def build(roster):
        different = len({client.isupper() and client for client in roster}) > 1
        if different or len(roster) < least or any(set(pair) <= set(roster) for pair in foes):
            raise ConfigError(f"{', '.join(roster)} do not fit")
        return roster

    return build


@pytest.mark.parametrize(
    ("roster", "needed", "options", "begins"),
    [
        ("abcXY", 3, {}, "abc"),
        ("XYabc", 3, {}, "abc"),
        ("XYaZb", 2, {}, "ab"),
        ("abcXY", 3, {"least": 3}, "abc"),
        ("abcdefghX", 5, {"foes": ["ab"]}, "cdefgh"),  # who is wrong, a or b, nobody can say
    ],
)
def test_the_largest_group_that_fits_begins(roster, needed, options, begins):
    facts = {client: {"task": 1, "width": client if client.isupper() else 16} for client in roster}
    federation, out = without_misfits(tuple(roster), facts, of_one_width(**options), needed)
    assert "".join(federation) == begins
    assert set(out) == set(roster) - set(begins)


@pytest.mark.parametrize(("unlike", "begins"), [(400, 600), (1000, None)])
def test_hundreds_of_unlike_cards_do_not_keep_the_server_busy(unlike, begins):
    roster = tuple(f"c{number}" for number in range(1000))
    width = {client: max(0, unlike - number) for number, client in enumerate(roster)}
    facts, built = {client: {"task": 1, "width": width[client]} for client in roster}, []

    def build(members):
        built.append(len(members))
        if len({width[client] for client in members}) > 1:
            raise ConfigError("these have several widths")
        return members

    if begins is None:
        with pytest.raises(ConfigError, match="fit among themselves"):
            without_misfits(roster, facts, build, 2)
    else:
        federation, out = without_misfits(roster, facts, build, 2)
        assert (len(federation), len(out)) == (begins, unlike)
    assert len(built) < 30_000


def test_of_two_groups_as_large_nobody_can_say_which_is_wrong():
    facts = {client: {"width": client in "ab"} for client in "abcd"}

    def build(roster):
        if len({client in "ab" for client in roster}) > 1:
            raise ConfigError("these have two widths")
        return roster

    with pytest.raises(ConfigError, match="client a, b on one side and client c, d on the other fit among"):
        without_misfits(tuple("abcd"), facts, build)


def with_widths(home, widths, **options):
    """A link to five clients, some of whose cards tell another width than the others'."""

    def tamper(order, data):
        note = note_of(data) if isinstance(order, wire.Hello) else {}
        if note.get("client") in widths:
            return noted(data, note | {"extra": note["extra"] | {"width": widths[note["client"]]}})
        return data

    link = Link(home, **options)
    five = {str(number): sites.IDS[number % 3] for number in range(5)}
    link.sites = {
        number: Site(client, "mlp-small", sites.loader(like), home / client, simulated=True)
        for number, (client, like) in enumerate(five.items())
    }
    link.tamper = tamper
    return link


def five(**training):
    settings = sites.settings("fedproto", 1, models={"pool": "mlp-small"})
    settings["training"] |= {"start_quorum": 0.6, **training}
    return Experiment.make(partition={"sites": [*map(str, range(5))], "classes": 10}, **settings)


@pytest.mark.parametrize("widths", [{"3": 1, "4": 1}, {"0": 1, "1": 2}])
def test_two_cards_of_five_do_not_end_the_server(tmp_path, widths):
    told, link = Told(), with_widths(tmp_path, widths)
    serve(link, tmp_path / "run", five(), told)
    assert sorted({*"01234"} - {*link.asked(1)}) == [*widths]
    for client in widths:
        (said,) = [one for one in told.notices if f"client {client} cannot take part" in one]
        assert "one representation width" in said


def test_where_too_few_fit_the_others_are_waited_for(tmp_path):
    told, link, time = Told(), with_widths(tmp_path, {"3": 1, "4": 1}, away={"1", "2"}), Time()
    time.at(GRACE + 5, link.away.clear)
    settings = five().engine.model_dump(mode="json") | {"patience": 60}
    serve(link, tmp_path / "run", five().variant(engine=settings), told, time)
    assert link.asked(1) == ["0", "1", "2"]
    assert any("waiting for the other clients" in one for one in told.notices)


def test_two_that_come_late_and_do_not_fit_each_other(tmp_path, monkeypatch):
    """Each of them fits those that are here."""
    told, link = Told(), with_widths(tmp_path, {}, away={"3", "4"})
    build = served_run.enrolled_federation

    def apart(experiment, enrolments):
        if {"3", "4"} <= set(enrolments):
            raise ConfigError("3 and 4 do not fit")
        return build(experiment, enrolments)

    monkeypatch.setattr(served_run, "enrolled_federation", apart)
    link.lose = lambda order: link.away.clear() if isinstance(order, Examination) else None
    serve(link, tmp_path / "run", five(rounds=2), told)
    assert len(told.ends) == 2
    assert any("client 4 cannot join after round 1: 3 and 4 do not fit" in one for one in told.notices)


# --- one that is there before the others ----------------------------------------------------------------


def first_of_all(home, tamper):
    """A link to client 0, which is there alone until it has begun, and the time in which the others come."""
    link, time = Link(home, away={"1", "2"}, model="mlp-small"), Time()
    time.at(GRACE + 5, link.away.clear)
    link.tamper = tamper
    return link, time


def begun_by_one(method):
    return sites.federated(
        method,
        models={"pool": "mlp-small"},
        training={"rounds": 1, "batch_size": 64, "start_quorum": 0.3, "quorum": 0.3},
        engine={"device": "cpu", "workers": 1, "deadline": 60, "patience": 60},
    )


@pytest.mark.parametrize(("method", "width"), [("fedtgp", 1 << 20), ("fedgen", 17)])
def test_a_card_for_which_the_server_cannot_be_built_is_turned_away(tmp_path, method, width):
    def tamper(order, data):
        if isinstance(order, wire.Hello) and note_of(data).get("client") == "0":
            return noted(data, note_of(data) | {"extra": note_of(data)["extra"] | {"width": width}})
        return data

    told, (link, time) = Told(), first_of_all(tmp_path, tamper)
    serve(link, tmp_path / "run", begun_by_one(method), told, time)
    assert link.asked(1) == ["1", "2"]
    assert any("waiting for the other clients" in one for one in told.notices)
    assert any("client 0 cannot take part" in one for one in told.notices)


@pytest.mark.parametrize(("restarted", "reason"), [(False, NOT_FINITE), (True, "it will not")])
def test_where_the_one_that_began_fails_the_others_are_waited_for(tmp_path, restarted, reason):
    def tamper(order, data):
        mine = isinstance(order, Request) and order.client == "0"
        return wire.pack_reply(Failure("0", reason)) if mine else data

    told, (link, time) = Told(), first_of_all(tmp_path, tamper)
    if restarted:
        time.due.clear()
        with pytest.raises(RoundFailed, match=reason):
            serve(link, tmp_path / "run", begun_by_one("fedproto"), told, time)
        link.away.clear()
    serve(link, tmp_path / "run", begun_by_one("fedproto"), told, time)
    assert link.asked(1) == ["0", "1", "2"]
    assert any(reason in one and "waiting for the other clients: 1, 2" in one for one in told.notices)
    assert "taken in after round 0: 1, 2" in told.notices


def test_a_model_without_tensors_is_none():
    with pytest.raises(ValueError, match="a model without tensors"):
        parse_fields({"names": {}}, Task("classification", 3, (1,)))


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


@pytest.mark.parametrize("liar", ["0", "2"])
def test_nothing_is_built_for_a_task_that_the_others_do_not_have(tmp_path, monkeypatch, liar):
    seen, build = set(), ModelPool._build

    def recorded(pool, key, task, *others, **options):
        seen.add(task.input)
        return build(pool, key, task, *others, **options)

    monkeypatch.setattr(ModelPool, "_build", recorded)
    link, told = late(tmp_path, liar, input=[1, 900, 900]), Told()
    link.away.clear()
    serve(link, tmp_path / "run", federated({"name": "fed-et", "steps": 2, "batch": 20}), told)
    assert seen == {(1, 8, 8)}
    assert any(f"client {liar} cannot take part" in one and "another task" in one for one in told.notices)


def test_the_servers_own_view_of_public_samples_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(enrolled, "most_public", lambda: 60 * 64 * 4)
    told = Told()
    link = late(tmp_path, "0", input=[1, 9, 9])
    serve(link, tmp_path / "run", federated(FEDMUSCLE, partition={"sites": sites.IDS}), told)
    assert len(told.ends) == 2
    assert any("client 0 would have the server hold 60 public samples" in one for one in told.notices)
