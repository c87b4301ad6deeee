"""Clients that spoil rounds again and again, alone or with another that covers for them."""

from dataclasses import replace

import pytest
import torch
from links import EndsAfter, Killed, Told, is_training, serve
from test_small_cohorts import largest
from test_unlike_groups import IDS, PAIR, FiveSites, dropped, experiment, lie

from potluck.core.message import Message
from potluck.deploy import wire
from potluck.deploy.register import WentBack
from potluck.deploy.suspects import Setback, have_diverged
from potluck.deploy.taking_back import going_further_back, work_that_stays
from potluck.engine.protocol import Answer, Failure, Request

ALIKE = dict.fromkeys(IDS, "mlp-small")
NOT_FINITE = "what would leave is not finite; lower training.optimizer.lr"


def both(first, second):
    return lambda order, data: second(order, first(order, data))


def left_out(result):
    return [(one["round"], one["without"]) for one in result.summary.get("went_back", ())]


def says_that_it_can_go_on(client, round_):
    """It sends again what it sent in the round before."""
    sent = []

    def tamper(order, data):
        if is_training(order, client, round_ - 1) and order.purpose == "train":
            sent.append(data)
        return sent[-1] if is_training(order, client, round_) else data

    return tamper


def test_one_that_says_it_can_go_on_does_not_keep_the_others_from_going_back(tmp_path):
    link = FiveSites(tmp_path, ALIKE)
    link.tamper = both(lie(1, factor=1e30), says_that_it_can_go_on("3", 2))
    result = serve(link, tmp_path / "run", experiment("fedavg", ALIKE, 2, max_norm="none", quorum=0.6))
    assert left_out(result) == [(1, "1")]
    failures = dict.fromkeys("024", NOT_FINITE)
    assert have_diverged(failures, IDS, {"1"}, ended=True)
    assert not have_diverged(failures, IDS, {"1"})  # the round was finished: those who can go on do
    assert not Setback(2, IDS, dict.fromkeys("02", NOT_FINITE), ended=True).diverged("1")


def test_who_spoils_two_rounds_is_excluded_for_good_and_can_be_taken_back(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = lie(1, 2, factor=1e30)
    result = serve(link, tmp_path / "run", experiment("fedavg", ALIKE, 4, max_norm="none"), told)
    assert left_out(result) == [(1, "1"), (2, "1")]
    assert result.summary["excluded"] == ["1"]
    (said,) = [one for one in told.notices if "excluded from the run" in one]
    assert said.startswith("client 1 was left out of round 1 for the same reason")
    assert said.endswith("as by --exclude 1 (--include 1 takes it back)")
    assert "1" not in link.asked(4)


def test_two_that_spoil_rounds_are_both_left_out_of_each_and_excluded(tmp_path):
    link = FiveSites(tmp_path, ALIKE)
    link.tamper = both(lie(1, 2, factor=1e30), lie(1, 2, client="3", factor=1e28))
    result = serve(link, tmp_path / "run", experiment("fedavg", ALIKE, 3, max_norm="none"))
    assert left_out(result) == [(1, "1"), (1, "3"), (2, "1"), (2, "3")]
    assert result.summary["excluded"] == ["1", "3"]


def test_of_two_with_a_model_of_their_own_nobody_is_excluded_for_good(tmp_path):
    link = FiveSites(tmp_path, PAIR)
    link.tamper = lie(1, 2, factor=1e38)
    result = serve(link, tmp_path / "run", experiment("fedavg", PAIR, 4, max_norm="none"))
    assert left_out(result) == [(1, "1"), (2, "1")]
    assert "excluded" not in result.summary


def test_where_one_round_is_not_enough_the_server_goes_further_back(tmp_path):
    """Whoever lied did not in the round before the one that all fail in, and honest messages are large by then."""
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = lie(1, 2, factor=1e6)
    result = serve(link, tmp_path / "run", experiment("fedavg", ALIKE, 4, max_norm="none"), told)
    (back,) = [one for one in told.notices if "played again" in one]
    assert back.startswith("round 3: most clients fail over values that are not finite or far too large")
    assert back.endswith("round 1 and all since are played again, without client 1 in round 1")
    assert left_out(result) == [(1, "1")]
    assert [end.round for end in told.ends][-4:] == [1, 2, 3, 4]


def test_a_lie_of_the_round_itself_is_found_where_clients_go_on_from_it_at_once(tmp_path):
    """In FedMD clients train on what all have sent in the same round."""
    link = FiveSites(tmp_path, ALIKE)

    def tamper(order, data):
        answer = wire.unpack_reply(data)
        if not (is_training(order, "1", 2) and isinstance(answer, Answer)):
            return data
        up = {name: torch.full_like(value, 3e38) for name, value in answer.up.items()}
        return wire.pack_reply(replace(answer, up=Message(up)))

    link.tamper = tamper
    result = serve(link, tmp_path / "run", experiment("fedmd", ALIKE, 2, max_norm="none"))
    assert left_out(result) == [(2, "1")]


@pytest.mark.parametrize("seed", [0, 1])
def test_few_that_say_not_finite_have_no_honest_donor_blamed(tmp_path, seed):
    """Of three that are asked two may lie, and of all five they are a minority."""
    link, told = FiveSites(tmp_path, ALIKE), Told()

    def tamper(order, data):
        asked = isinstance(order, Request) and order.client in "13" and order.purpose == "train"
        return wire.pack_reply(Failure(order.client, NOT_FINITE)) if asked else data

    link.tamper = tamper
    asked = experiment("fedavg", ALIKE, 3, participation=0.6).variant(seed=seed)
    result = serve(link, tmp_path / "run", asked, told)
    assert told.ends[-1].round == 3
    assert "bad_starts" not in result.summary
    assert not [one for client in "024" for one in dropped(told, client)]


def test_who_begins_anew_has_its_first_weights_and_not_those_that_have_grown(tmp_path):
    """The liar's twin has trained on with what the liar sent, and its own weights are as large."""
    link, told = FiveSites(tmp_path, PAIR), Told()
    link.tamper = lie(*range(1, 6), factor=15.0)
    serve(link, tmp_path / "run", experiment("fedavg", PAIR, 9, optimizer={"lr": 0.05}), told)
    assert [one for one in told.notices if "nobody of 1, 3 can train" in one]
    assert not [one for one in dropped(told, "3") if "first weights are" in one]
    assert not [one for one in dropped(told, "3") if one.startswith(("round 8", "round 9"))]


def test_the_largest_numbers_of_two_do_not_end_a_run_of_few(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = largest("1", "3")
    asked = experiment("fedapen", ALIKE, 4, participation=0.6, max_norm="none")
    serve(link, tmp_path / "run", asked, told)
    assert told.ends[-1].round == 4


def says_not_finite(order):
    return wire.pack_reply(Failure(order.client, NOT_FINITE))


def test_two_liars_among_three_that_are_asked_have_no_honest_client_excluded(tmp_path):
    """They send little together with one honest client, and say that nobody can go on: of all five they are few."""
    link, said, little = FiveSites(tmp_path, ALIKE), set(), lie(1, 2, factor=0.02)
    little = both(little, lie(1, 2, client="3", factor=0.02))

    def tamper(order, data):
        asked = isinstance(order, Request) and order.client in "13" and order.stamp.round in (2, 3)
        if asked and (order.client, order.stamp.round) not in said:
            said.add((order.client, order.stamp.round))
            return says_not_finite(order)
        return little(order, data)

    link.tamper = tamper
    asked = experiment("fedavg", ALIKE, 4, participation=0.6, attempts=1).variant(seed=135)
    told = Told()
    result = serve(link, tmp_path / "run", asked, told)
    assert [link.asked(1)[:3], link.asked(2)[:3]] == [["0", "1", "3"]] * 2
    assert left_out(result) == []
    assert "excluded" not in result.summary


def test_who_failed_before_a_round_was_taken_back_does_not_count_after_it(tmp_path):
    """The honest client that failed over a lie can go on by then, and the word of two of five is no proof."""
    link, told, large = FiveSites(tmp_path, ALIKE), Told(), lie(1, factor=1e30)

    def tamper(order, data):
        later = isinstance(order, Request) and order.client in "13" and order.stamp.round == 2
        return says_not_finite(order) if later else large(order, data)

    link.tamper = tamper
    asked = experiment("fedavg", ALIKE, 3, participation=0.6, max_norm="none").variant(seed=5)
    result = serve(link, tmp_path / "run", asked, told)
    assert left_out(result) == [(1, "1")]
    assert not [one for one in told.notices if "nobody stood out" in one]


def test_where_the_others_diverge_as_well_nobody_is_excluded_for_good(tmp_path):
    """Their messages are twelve times what a new model has: it is the settings, and one is only the first."""
    link, tamper = FiveSites(tmp_path, ALIKE), lie(1, 2, client="4", factor=1e30)
    for client in "0123":
        tamper = both(tamper, lie(1, client=client, factor=12.0))
    link.tamper = tamper
    asked = experiment("fedavg", ALIKE, 3, max_norm="none", optimizer={"lr": 1e-4})
    result = serve(link, tmp_path / "run", asked)
    assert left_out(result) == [(1, "4"), (2, "4")]
    assert "excluded" not in result.summary


def test_an_exclusion_outlives_the_server_and_is_undone_by_the_operator(tmp_path):
    link, told = FiveSites(tmp_path, ALIKE), Told()
    link.tamper = lie(1, 2, factor=1e30)
    asked = experiment("fedavg", ALIKE, 5, max_norm="none")
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", asked, EndsAfter(2))
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", asked, EndsAfter(3))
    assert "1" not in link.asked(4)
    result = serve(link, tmp_path / "run", asked, told, include=["1"])
    assert "1" in link.asked(5)
    assert "excluded" not in result.summary
    assert left_out(result) == [(1, "1"), (2, "1")]
    assert not dropped(told, "1")


def test_of_several_that_stood_out_each_is_named_with_its_rounds():
    went = [WentBack(round=round_, without=client, times=20.0) for round_, client in ((2, "1"), (3, "3"))]
    assert going_further_back("why", went).endswith(
        "without client 1 in round 2 and without client 3 in round 3"
    )
    assert work_that_stays(5, went).endswith("without client 1,3 (another --out, with --exclude 1,3)")
