"""Guards of the server turned against honest clients: a minority must not have them refused or left out."""

import pytest
import sites
from links import EndsAfter, Killed, Link, Told, blown_up, is_training, serve
from test_going_back import ALIKE, PatientLink, experiment

from potluck.deploy import wire
from potluck.deploy.site import Site
from potluck.deploy.suspects import Tie, find_suspect, find_tie, have_diverged
from potluck.engine.norms import Ratios, SentPart, norm_ratios
from potluck.engine.protocol import Failure, Request
from potluck.errors import RoundFailed

NOT_FINITE = "what would leave is not finite; lower training.optimizer.lr"


def of(link, *clients):
    """The experiment and the link with these clients only; those beyond the third have the first one's data."""
    for number, client in enumerate(clients[3:], 3):
        link.sites[number] = Site(client, "mlp-small", sites.loader("0"), link.home / client, simulated=True)
    for number in range(len(clients), 3):
        link.sites.pop(number)
    return {"sites": clients, "classes": 10}


def tiny(*clients):
    """Updates a thousand times too small."""
    return blown_up(
        lambda order: isinstance(order, Request) and order.client in clients and order.steps == ("train",),
        1e-3,
    )


def refusals(told):
    return [one for one in told.notices if "(training.max_norm)" in one and "goes on without" in one]


def test_the_word_of_one_client_does_not_take_a_round_back(tmp_path):
    link, told, said = Link(tmp_path, model="mlp-small"), Told(), []
    small = tiny("1")

    def lie(order, data):
        if is_training(order, "1", 2) and not said:
            said.append(order)
            return wire.pack_reply(Failure("1", NOT_FINITE))
        return small(order, data)

    link.tamper = lie
    settings = sites.federated("fedavg", rounds=3, **ALIKE).variant(partition=of(link, "0", "1"))
    result = serve(link, tmp_path / "run", settings, told)
    assert said
    assert not [one for one in told.notices if "going back" in one]
    assert "went_back" not in result.summary
    assert not [one for one in told.notices if "without client 0" in one]


def test_of_two_nobody_is_left_out_and_both_ways_on_are_named(tmp_path):
    link, told = PatientLink(tmp_path), Told()
    link.tamper = blown_up(lambda order: is_training(order, "1", 1))
    settings = experiment(3).variant(partition=of(link, "0", "1"))
    with pytest.raises(RoundFailed) as error:
        serve(link, tmp_path / "run", settings, told)
    sentence = str(error.value)
    assert "the message of client 1 was" in sentence
    assert "times as large as that of client 0" in sentence
    assert "--exclude 1, or" in sentence
    assert sentence.endswith("--exclude 0")
    assert not [one for one in told.notices if "going back" in one]


def test_an_operator_who_excluded_the_honest_side_first_can_still_change_sides(tmp_path):
    link = PatientLink(tmp_path)
    link.tamper = blown_up(lambda order: is_training(order, "1", 1))
    settings = experiment(3).variant(partition=of(link, "0", "1"))
    for choice in ({}, {"exclude": ["0"]}):
        with pytest.raises(RoundFailed):
            serve(link, tmp_path / "run", settings, **choice)
    result = serve(link, tmp_path / "run", settings, include=["0"], exclude=["1"])
    assert result.summary["excluded"] == ["1"]


def test_a_third_that_is_lost_does_not_make_one_word_enough():
    failures = {"liar": NOT_FINITE, "lost": "client lost: no answer within 60 s"}
    assert not have_diverged(failures, ("a", "liar", "lost"), {"a", "lost"})
    assert have_diverged(failures | {"a": NOT_FINITE}, ("a", "liar", "lost"), {"a", "lost"})
    assert have_diverged({"b": NOT_FINITE, "c": NOT_FINITE}, ("a", "b", "c"), {"a"})
    assert not have_diverged({"liar": NOT_FINITE}, ("a", "liar"), {"a"})


def test_who_stands_out_does_so_against_a_majority():
    assert find_suspect({"a": 1.0, "b": 1.0, "c": 1e-3, "d": 1e-3}) is None
    assert find_suspect({"a": 1.0, "b": 1e30}) is None
    assert find_tie({"a": 1.0, "b": 1e30}) == Tie(("b",), ("a",), 1e30)
    assert find_tie({"a": 2.0, "b": 1.0, "c": 1e3, "d": 2e3}) == Tie(("c", "d"), ("b", "a"), 500.0)
    assert find_tie({"a": 2.0, "b": 1.0}) is None
    assert find_tie({"a": 2.0, "b": 1.0, "c": 1e3}) is None


def test_the_tiny_updates_of_one_of_two_have_nobody_refused(tmp_path):
    link, told = Link(tmp_path, model="mlp-small"), Told()
    link.tamper = tiny("1")
    settings = sites.federated("fedavg", rounds=3, **ALIKE).variant(partition=of(link, "0", "1"))
    serve(link, tmp_path / "run", settings, told)
    assert not refusals(told)
    (first, *_) = [one for one in told.notices if "nobody is refused" in one]
    assert "round 1, step train: the norm of 'model' from 0 is more than 100 times that from 1" in first


@pytest.mark.parametrize("restarts", [False, True])
def test_of_two_a_message_far_larger_than_the_other_and_than_its_own_last_is_refused(tmp_path, restarts):
    link, told = Link(tmp_path, model="mlp-small"), Told()
    lie = blown_up(lambda order: is_training(order, "1", 2), 1e6)
    settings = sites.federated("fedavg", rounds=3, **ALIKE).variant(partition=of(link, "0", "1"))
    if restarts:
        with pytest.raises(Killed):
            serve(link, tmp_path / "run", settings, EndsAfter(1))
    link.tamper = lie
    serve(link, tmp_path / "run", settings, told)
    (refused,) = refusals(told)
    assert refused.startswith("round 2 goes on without client 1")


def test_two_of_four_do_not_have_the_other_two_refused(tmp_path):
    link, told = Link(tmp_path, model="mlp-small"), Told()
    link.tamper = tiny("2", "3")
    settings = sites.federated("fedavg", rounds=2, **ALIKE).variant(partition=of(link, "0", "1", "2", "3"))
    serve(link, tmp_path / "run", settings, told)
    assert not refusals(told)
    ties = [one for one in told.notices if "nobody is refused" in one]
    assert "the norm of 'model' from 0, 1 is more than 100 times that from 2, 3" in ties[0]


def test_one_of_four_is_still_refused(tmp_path):
    link, told = Link(tmp_path, model="mlp-small"), Told()
    link.tamper = blown_up(lambda order: is_training(order, "3", 1) and order.steps == ("train",), 1e6)
    settings = sites.federated("fedavg", rounds=1, **ALIKE).variant(partition=of(link, "0", "1", "2", "3"))
    serve(link, tmp_path / "run", settings, told)
    (refused,) = refusals(told)
    assert "without client 3" in refused


def test_zeros_are_no_measure_of_what_others_send():
    part = SentPart("model", ("model",), ("model/w",), 1)
    sent = {client: [(part, value)] for client, value in {"0": 1.0, "liar": 0.0, "2": 1620.0}.items()}
    assert norm_ratios(sent, {("2", ("model",)): 1500.0})["2", ("model",)] == Ratios(1.08, 1.08)
    assert norm_ratios(sent, {})["2", ("model",)] == Ratios(1.0, 1620.0)
    assert norm_ratios({"liar": [(part, 0.0)]}, {}) == {}
