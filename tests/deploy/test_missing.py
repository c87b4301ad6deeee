"""Clients that are not there when they are measured, and rounds that wait for those that are lost."""

import json

import pytest
import sites
from links import FEDMRL, EndsAfter, Killed, Link, Time, Told, is_evaluation, is_training, serve

from potluck.deploy import wire
from potluck.deploy.rehearsal import propose
from potluck.deploy.site import REHEARSAL
from potluck.deploy.welcome import welcome
from potluck.engine.evaluation.lapses import Lapses
from potluck.engine.protocol import Examination, Failure, Request
from potluck.engine.retries import GROWING
from potluck.errors import RoundFailed
from potluck.report.log import read_metrics
from potluck.runs.open import open as open_run


def test_a_lapse_in_an_evaluation_has_a_second_try_after_a_wait(tmp_path):
    link, time = Link(tmp_path), Time()
    lapses = iter(["no answer within 60 s"])
    link.lose = lambda order: next(lapses, None) if is_evaluation(order, "1", 2) else None
    result = serve(link, tmp_path / "run", sites.federated(FEDMRL), time=time)
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial")
    assert time.waits == [GROWING[0]]
    assert "missing" not in result.summary["accuracy"]


def test_an_evaluation_waits_for_its_quorum_as_a_round_does(tmp_path):
    link, time = Link(tmp_path), Time()
    training = {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "quorum": 1.0}
    link.lose = lambda order: "away" if is_evaluation(order, "1", 1) and time.seconds < 70 else None
    engine = {"device": "cpu", "patience": 200}
    serve(link, tmp_path / "run", sites.federated(FEDMRL, training=training, engine=engine), time=time)
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial")
    assert time.waits == [*GROWING[:4]]


def test_who_was_not_measured_is_named_and_rounds_are_compared_over_the_same_clients(tmp_path):
    link, told = Link(tmp_path), Told()
    link.lose = lambda order: "no answer within 60 s" if is_evaluation(order, "1", 3) else None
    result = serve(link, tmp_path / "run", sites.federated(FEDMRL, rounds=3), told)
    (line,) = [one for one in sites.log(tmp_path / "run") if "missing" in one]
    assert (line["round"], line["client"], line["when"]) == (3, "1", "after_aggregation")
    assert line["missing"] == "client 1: no answer within 60 s"
    found = result.summary["accuracy"]
    assert found["missing"] == {"last": ["1"], "rounds": {"3": ["1"]}}
    assert (found["coverage"], sorted(found["per_client"])) == (2, ["0", "2"])
    assert dict(told.ends[-1].missing) == {"1": "client 1: no answer within 60 s"}
    values = {
        (one["round"], one["client"]): one["test"]["accuracy"]
        for one in sites.log(tmp_path / "run")
        if "test" in one
    }
    (curve,) = (series.curve("") for series in read_metrics(tmp_path / "run").series.values())
    means = [(values[round_, "0"] + values[round_, "2"]) / 2 for round_ in (1, 2, 3)]
    assert curve.mean.tolist() == pytest.approx(means)
    assert "without client 1" in str(result)
    assert "1 was not measured in the last round" in (tmp_path / "run" / "report.html").read_text()
    assert open_run(tmp_path / "run").curves()["accuracy"].tolist() == pytest.approx(means)


def test_a_round_without_one_of_the_clients_measured_last_is_not_compared(tmp_path):
    link = Link(tmp_path)
    link.lose = lambda order: "no answer within 60 s" if is_evaluation(order, "1", 1) else None
    result = serve(link, tmp_path / "run", sites.federated(FEDMRL, rounds=3))
    found = result.summary["accuracy"]
    assert found["missing"] == {"last": [], "rounds": {"1": ["1"]}}
    (series,) = read_metrics(tmp_path / "run").series.values()
    assert series.curve("").rounds.tolist() == [2, 3]
    assert found["rounds"]["best_by_test"] in (2, 3)


def test_a_client_that_stays_away_costs_one_wait_and_one_more_at_the_end(tmp_path):
    link, time = Link(tmp_path), Time()
    link.lose = lambda order: (
        "no answer" if order.__class__.__name__ == "Examination" and order.client == "1" else None
    )
    serve(link, tmp_path / "run", sites.federated(FEDMRL, rounds=4), time=time)
    assert time.waits == [GROWING[0]] * 2


class Slow(Link):
    """A client that leaves out examinations: each costs as long as the server waits for it."""

    def __init__(self, home, time, leaves_out, client="1"):
        super().__init__(home)
        self.time, self.leaves_out, self.client = time, leaves_out, client
        self.cost = {}

    def exchange(self, letters, timeout, most):
        answers = super().exchange(letters, timeout, most)
        if any(isinstance(one, str) for one in answers):
            round_ = self.orders[-1].stamp.round
            self.cost[round_] = self.cost.get(round_, 0.0) + timeout
            self.time.seconds += timeout
        return answers

    def _answer(self, node, data):
        order = wire.unpack_order(data)
        if isinstance(order, Examination) and order.client == self.client and self.leaves_out(order, self):
            self.orders.append(order)
            return "no answer came in time"
        return super()._answer(node, data)


MOMENTS = {"when": ["before", "after_training", "after_aggregation"]}
DEADLINE = 600.0


@pytest.mark.parametrize("evaluate", [{"when": ["after_aggregation"]}, MOMENTS])
def test_who_leaves_out_every_other_evaluation_costs_one_deadline_in_many_rounds(tmp_path, evaluate):
    time = Time()
    link = Slow(tmp_path, time, lambda order, link: order.stamp.round % 2 == 0)
    engine = {"device": "cpu", "workers": 1, "deadline": DEADLINE}
    settings = sites.federated("local", rounds=10, evaluate=evaluate, engine=engine)
    result = serve(link, tmp_path / "run", settings, time=time)
    assert sum(link.cost.values()) <= 1.5 * DEADLINE
    assert link.cost.get(10, 0.0) < 0.5 * DEADLINE  # the last round too
    assert "1" in result.summary["accuracy"]["missing"]["rounds"]["2"]


class Silent(Slow):
    """A client that answers evaluations and leaves out the training orders chosen."""

    def _answer(self, node, data):
        order = wire.unpack_order(data)
        if isinstance(order, Request) and order.client == self.client and self.leaves_out(order, self):
            self.orders.append(order)
            return "no answer within 600 s"
        return Link._answer(self, node, data)


def silent(tmp_path, leaves_out, rounds, quorum=0.5, told=None, time=None):
    time = time or Time()
    link = Silent(tmp_path, time, leaves_out)
    engine = {"device": "cpu", "workers": 1, "deadline": DEADLINE, "patience": DEADLINE}
    training = {"rounds": rounds, "batch_size": 256, "optimizer": {"lr": 0.05}, "quorum": quorum}
    settings = sites.federated("local", engine=engine, training=training)
    serve(link, tmp_path / "run", settings, told, time=time)
    return link


def test_who_never_answers_a_training_costs_two_deadlines_in_many_rounds(tmp_path):
    told = Told()
    link = silent(tmp_path, lambda order, link: True, 20, told=told)
    assert sum(link.cost.values()) <= 2.5 * DEADLINE
    assert [one for one in told.notices if "not asked, as it let the server wait in vain" in one]
    assert len(told.ends) == 20


def test_who_is_back_after_one_lapse_takes_part_again(tmp_path):
    told = Told()
    link = silent(tmp_path, lambda order, link: order.stamp.round == 2, 5, told=told)
    assert [one for one in told.notices if "goes on without client 1" in one] == [
        "round 2 goes on without client 1: no answer within 600 s"
    ]
    assert sum(link.cost.values()) == DEADLINE


def test_who_is_needed_for_the_quorum_has_the_whole_deadline(tmp_path):
    left = [2, 3]

    def leaves_out(order, link):
        return order.stamp.round in left and not left.remove(order.stamp.round)

    link = silent(tmp_path, leaves_out, 4, quorum=1.0)
    assert link.cost == {2: DEADLINE, 3: DEADLINE}


def test_a_server_that_starts_again_still_doubts_who_has_lapsed(tmp_path):
    time = Time()
    link = Slow(tmp_path, time, lambda order, link: order.stamp.round % 2 == 1)
    engine = {"device": "cpu", "workers": 1, "deadline": DEADLINE}
    settings = sites.federated("local", rounds=4, engine=engine)
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", settings, EndsAfter(1), time=time)
    serve(link, tmp_path / "run", settings, time=time)
    assert link.cost[1] >= DEADLINE
    assert link.cost[3] < 0.5 * DEADLINE


def test_who_says_at_once_that_its_disk_is_full_is_not_blamed_for_the_time_that_another_one_took(tmp_path):
    time, full = Time(), [1, 3]  # rounds in whose evaluation client 2 has no room at first
    link = Slow(tmp_path, time, lambda order, link: order.stamp.round == 1)

    def tamper(order, data):
        if is_evaluation(order, "2", order.stamp.round) and order.stamp.round in full:
            full.remove(order.stamp.round)
            return wire.pack_reply(Failure("2", "RunError at the site", lost=True))
        return data

    link.tamper = lambda order, data: data if isinstance(order, wire.Hello) else tamper(order, data)
    engine = {"device": "cpu", "workers": 1, "deadline": DEADLINE}
    result = serve(link, tmp_path / "run", sites.federated("local", rounds=4, engine=engine), time=time)
    assert not full
    assert {*result.summary["accuracy"]["missing"]["rounds"]} == {"1"}
    assert result.summary["accuracy"]["missing"]["rounds"]["1"] == ["1"]


def started_again(lapses):
    """What a server knows that starts again after a round."""
    found = Lapses()
    found.recall(lapses.kept())
    return found


@pytest.mark.parametrize("restart", [started_again, lambda lapses: lapses])
def test_who_is_trusted_again_and_lapses_again_is_doubted_for_longer_and_longer(restart):
    lapses, trusted = Lapses(), []
    for round_ in range(1, 60):
        lapses = restart(lapses)
        lapses.begin(round_)
        if not lapses.is_doubted("1"):
            trusted.append(round_)
            lapses.note(["1"], DEADLINE)
    assert trusted == [1, 10, 27]
    assert not lapses.is_dropped("1")  # it has answered in the short time


@pytest.mark.parametrize("restart", [started_again, lambda lapses: lapses])
def test_who_leaves_out_the_short_time_too_is_not_asked_and_who_costs_no_time_is_not_doubted(restart):
    lapses, dropped = Lapses(), []
    for round_ in range(1, 10):
        lapses = restart(lapses)
        lapses.begin(round_)
        dropped += [round_] if lapses.is_dropped("1") else []
        lapses.note(["1"], DEADLINE)
        lapses.note(["2"], 0.0)
    assert dropped == [4, 5, 6, 7, 8, 9]
    assert not lapses.is_doubted("2")


def test_a_doubted_client_has_twice_as_long_as_the_others_need():
    lapses = Lapses()
    assert lapses.short_time is None
    lapses.note([], 3.0)
    assert lapses.short_time == 30.0
    lapses.note([], 100.0)
    assert lapses.short_time == 200.0
    lapses.note([], 190.0, trusted=False)
    assert lapses.short_time == 200.0


def test_below_the_quorum_everybody_is_asked_with_the_whole_deadline(tmp_path):
    time = Time()
    link = Slow(tmp_path, time, lambda order, link: link.asked_of(order) < 3)
    link.asked_of = lambda order: sum(
        isinstance(one, Examination) and (one.client, one.stamp.round) == ("1", order.stamp.round)
        for one in link.orders
    )
    training = {"rounds": 3, "batch_size": 16, "optimizer": {"lr": 0.05}, "quorum": 1.0}
    engine = {"device": "cpu", "patience": 200, "deadline": DEADLINE}
    settings = sites.federated(FEDMRL, training=training, engine=engine)
    result = serve(link, tmp_path / "run", settings, time=time)
    assert "missing" not in result.summary["accuracy"]


def test_a_round_waits_longer_and_longer_for_clients_that_are_lost(tmp_path):
    link, time, told = Link(tmp_path), Time(), Told()
    training = {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "quorum": 1.0}
    engine = {"device": "cpu", "patience": 100}

    def lose(order):
        return "it is silent" if is_training(order, "1", 2) and time.seconds < 30 else None

    link.lose = lose
    experiment = sites.federated(FEDMRL, training=training, engine=engine)
    serve(link, tmp_path / "run", experiment, told, time)
    assert time.waits == [
        5.0,
        10.0,
        20.0,
    ]  # not only as often as training.attempts says: patience has time left
    assert sites.log(tmp_path / "run") == sites.serial(FEDMRL, tmp_path / "serial")
    assert any(notice.endswith("trying again in 10 s") for notice in told.notices)


def test_a_round_gives_up_when_patience_is_over(tmp_path):
    link, time = Link(tmp_path), Time()
    link.lose = lambda order: "it is silent" if is_training(order, "1", 2) else None
    training = {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "quorum": 1.0}
    engine = {"device": "cpu", "patience": 40}
    with pytest.raises(RoundFailed, match=r"tried 4 times; the run is kept up to round 1: potluck resume"):
        serve(link, tmp_path / "run", sites.federated(FEDMRL, training=training, engine=engine), time=time)
    assert time.waits == [5.0, 10.0, 20.0]


def test_a_refusal_is_no_lapse_and_is_not_asked_for_again(tmp_path):
    """A site whose contract has no evaluation trains and is never measured; waiting for it would be for nothing."""
    link, time, experiment = Link(tmp_path), Time(), sites.federated(FEDMRL)
    refused = (
        "client 1: step 'evaluate' is asked for, this site agreed to: train; "
        "change its contract if that is meant"
    )
    federation = link.sites[1].federation(welcome(experiment, REHEARSAL)["experiment"], REHEARSAL)
    agreed, _ = propose(federation, "1")
    link.sites[1].agreement = agreed.model_copy(update={"steps": {"train": agreed.steps["train"]}})
    result = serve(link, tmp_path / "run", experiment, time=time)
    assert time.waits == []
    assert link.asked(2) == ["0", "1", "2"]
    assert result.summary["accuracy"]["missing"]["rounds"] == {"1": ["1"], "2": ["1"]}
    lines = [one for one in sites.log(tmp_path / "run") if "missing" in one]
    assert {one["missing"] for one in lines} == {refused}


def test_a_run_in_which_nobody_is_missing_has_no_word_of_it(tmp_path):
    serve(Link(tmp_path), tmp_path / "run", sites.federated(FEDMRL))
    assert "missing" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "missing" not in json.dumps(json.loads((tmp_path / "run" / "summary.json").read_text()))
