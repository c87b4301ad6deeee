"""Liars among clients whose models differ: what one architecture sends must not put honest clients out for good."""

import math
from functools import partial

import pytest
import sites
import torch
from links import EndsAfter, Killed, Link, Told, blown_up, is_training, serve

from potluck.core.contract import state_of, tensor
from potluck.deploy import wire
from potluck.deploy.groups import Groups
from potluck.deploy.site import Site
from potluck.deploy.suspects import find_suspect
from potluck.engine.norms import SentPart
from potluck.engine.protocol import Failure, Request
from potluck.engine.store.checkpoints import Checkpoints
from potluck.engine.yardsticks import Yardsticks
from potluck.errors import RoundFailed
from potluck.experiment.schema import Experiment

IDS = ("0", "1", "2", "3", "4")
PAIR = {"0": "mlp-small", "1": "conv-small", "2": "mlp-small", "3": "conv-small", "4": "mlp-small"}
ALONE = PAIR | {"3": "mlp-small"}


class FiveSites(Link):
    """Five sites with the models named."""

    def __init__(self, home, models):
        super().__init__(home)
        self.make = lambda client: Site(
            client, models[client], partial(sites.part, client, IDS), home / client, simulated=True
        )
        self.sites = {number: self.make(client) for number, client in enumerate(IDS)}


def experiment(method, models, rounds=3, **training):
    values = sites.settings(
        method,
        rounds,
        IDS,
        models={"pool": models, "rep_dim": 16},
        public={"data": "digits", "samples": 40},
        training={"rounds": rounds, "batch_size": 64, "optimizer": {"lr": 0.05}} | training,
    )
    return Experiment.make(partition={"sites": IDS, "classes": 10}, **values)


def dropped(told, client):
    return [one for one in told.notices if f"goes on without client {client}" in one]


def lie(*rounds, client="1", factor=1e38):
    return blown_up(
        lambda order: any(is_training(order, client, one) for one in rounds) and order.purpose == "train",
        factor,
    )


def test_the_first_message_of_one_of_two_is_compared_with_a_new_model(tmp_path):
    link, told = FiveSites(tmp_path, PAIR), Told()
    link.tamper = lie(1, 2, 3)
    serve(link, tmp_path / "run", experiment("fedavg", PAIR), told)
    assert not dropped(told, "3")
    first, *others = dropped(told, "1")
    assert "times that of a new model" in first
    assert len(others) == 2


def test_the_tiny_first_message_of_one_of_two_has_the_other_not_refused(tmp_path):
    link, told = FiveSites(tmp_path, PAIR), Told()
    link.tamper = lie(1, 2, 3, factor=1e-6)
    serve(link, tmp_path / "run", experiment("fedavg", PAIR), told)
    assert not dropped(told, "3")


def test_a_round_after_which_one_architecture_fails_is_taken_back(tmp_path):
    link, told = FiveSites(tmp_path, PAIR), Told()
    link.tamper = lie(1)
    result = serve(link, tmp_path / "run", experiment("fedavg", PAIR, max_norm="none"), told)
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(1, "1")]
    assert result.summary["failures"] == {}


def test_who_is_left_after_an_exclusion_begins_anew(tmp_path):
    link, first, then = FiveSites(tmp_path, PAIR), EndsAfter(2), Told()
    sent, large = [], lie(1)

    def keeps_on(order, data):
        """It does not train at all, and says the same again."""
        if not (isinstance(order, Request) and order.client == "1" and order.steps == ("train",)):
            return data
        sent.append(large(order, data))
        return sent[0]

    link.tamper = keeps_on
    asked = experiment("fedavg", PAIR, 7, max_norm="none")
    with pytest.raises(Killed):
        serve(link, tmp_path / "run", asked, first)
    assert dropped(first, "3")
    serve(link, tmp_path / "run", asked, then, exclude=["1"])
    (anew,) = [one for one in then.notices if "begin anew" in one]
    assert "nobody of 3 can train" in anew
    assert len(dropped(then, "3")) == 1  # the round that showed it


def test_a_round_that_would_spoil_the_state_is_repeated_without_who_stood_out_also_the_last(tmp_path):
    link, told = FiveSites(tmp_path, ALONE), Told()
    link.tamper = lie(1, 3)
    result = serve(link, tmp_path / "run", experiment("fedgh", ALONE, max_norm="none"), told)
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(1, "1"), (3, "1")]
    assert [one for one in told.notices if "would not be finite" in one]
    assert not [one for one in told.notices if "not evaluated" in one]
    saved = Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert saved is not None
    assert all(bool(value.isfinite().all()) for value in saved.server.values())


def test_where_nobody_stood_out_the_rate_is_named_and_nobody_is_left_out(tmp_path):
    link, told = FiveSites(tmp_path, ALONE), Told()
    method = {"name": "fed-et", "steps": 10, "batch": 20, "lr": 1e6}
    with pytest.raises(RoundFailed, match=r"the server's state .* is not finite after it; lower"):
        serve(link, tmp_path / "run", experiment(method, ALONE), told)
    assert not [one for one in told.notices if "played again" in one]


def part(name, tensors, shapes):
    size = sum(math.prod(shape) for shape in shapes)
    return SentPart(name, (name, *zip(tensors, shapes, strict=True)), tuple(tensors), size)


def test_a_large_model_does_not_stand_out_and_a_lie_of_one_alone_with_its_architecture_does():
    contract = {"model": state_of("model", "weights"), "means": tensor("C, d", "means")}
    fresh = {"small": {"w": torch.full((4,), 0.5)}, "giant": {"w": torch.full((4000,), 8.0)}}
    small, giant = part("model", ["model/w"], [(4,)]), part("model", ["model/w"], [(4000,)])
    means = part("means", ["means"], [(10, 4)])
    yardsticks = Yardsticks(lambda client: fresh["giant" if client == "4" else "small"])
    honest = {client: [(small, 0.6), (means, 50.0)] for client in "0123"} | {
        "4": [(giant, 9.0), (means, 60.0)]
    }
    assert find_suspect(yardsticks.sizes(honest, contract)) is None
    lying = honest | {"4": [(giant, 800.0), (means, 60.0)]}
    assert find_suspect(yardsticks.sizes(lying, contract)).client == "4"
    lying = honest | {"4": [(giant, 9.0), (means, 6000.0)]}
    assert find_suspect(yardsticks.sizes(lying, contract)).client == "4"


def test_a_group_begins_anew_only_when_all_of_it_fail():
    class Method:
        def state_keys(self, card):
            return frozenset({f"{card}:w"})

    groups = Groups(Method(), {"0": "a", "1": "b", "2": "b", "3": "b"})

    class Part:
        content = {}

    class Server:
        parts = {"weights": Part()}
        state = {"weights/a:w": 1, "weights/b:w": 2, "model0/w": 3}

        def snapshot(self):
            return self.state

        def restore(self, state):
            self.state = state

    server, bad = Server(), "what would leave is not finite"
    large = "the norm of 'head' is 1e+07 times the median of its like (training.max_norm)"
    groups.note({"1": bad, "2": bad}, ["0"])
    assert groups.begin_anew(server) == []  # 3 was not asked, or is lost: two do not speak for it
    groups.note({"3": "no answer"}, ["0"])
    assert groups.begin_anew(server) == []
    groups.note({"3": bad}, ["0", "2"])
    assert groups.begin_anew(server) == []
    groups.note({"2": large}, ["0"])
    assert groups.begin_anew(server) == ["1", "2", "3"]
    assert server.state == {"weights/a:w": 1, "model0/w": 3}
    assert groups.begin_anew(server) == []


def test_nobody_is_blamed_for_what_one_that_was_left_out_did_in_rounds_that_stay(tmp_path):
    """Who trains on with what a liar left may send large messages too, and be honest."""
    models = dict.fromkeys(IDS, "mlp-small")
    link = FiveSites(tmp_path, models)
    small, large, heir = lie(1, factor=60.0), lie(3, factor=1e30), lie(3, client="2", factor=1e25)
    link.tamper = lambda order, data: heir(order, large(order, small(order, data)))
    asked = experiment("fedavg", models, 4, max_norm="none")
    for choice in ({}, {"exclude": ["1"]}):
        with pytest.raises(RoundFailed) as error:
            serve(link, tmp_path / "run", asked, **choice)
        sentence = str(error.value)
        assert "also after round 3 was played again without client 1" in sentence
        assert "client 1 stood out in round 1 too" in sentence
        assert sentence.endswith("start a new run without client 1 (another --out, with --exclude 1)")


# --- one that is alone with its architecture ---


def says_not_finite_after_lying(*liars):
    """In one round weights a million times too large, in the next one "not finite", and so on."""
    sent = {}
    large = {client: lie(*range(1, 9), client=client, factor=1e6) for client in liars}

    def tamper(order, data):
        asked = isinstance(order, Request) and order.client in liars and order.purpose == "train"
        if not asked:
            return data
        if sent.get(order.client) == order.stamp.round - 1:
            return wire.pack_reply(Failure(order.client, "the loss is not finite"))
        sent[order.client] = order.stamp.round
        return large[order.client](order, data)

    return tamper


@pytest.mark.parametrize("max_norm", ["auto", "none"])
@pytest.mark.parametrize("liars", ["0", "01"])
def test_one_alone_with_its_architecture_does_not_have_others_go_back(tmp_path, liars, max_norm):
    models = dict.fromkeys(IDS, "mlp-small") | {"0": "conv-small"} | {"1": "conv-large"}
    link, told = FiveSites(tmp_path, models), Told()
    link.tamper = says_not_finite_after_lying(*liars)
    asked = experiment("fedavg", models, 6, max_norm=max_norm, quorum=0.5)
    result = serve(link, tmp_path / "run", asked, told)
    assert [end.round for end in told.ends] == [*range(1, 7)]
    assert "went_back" not in result.summary
    assert not [one for client in "234" for one in dropped(told, client)]


def test_two_liars_of_one_architecture_do_not_end_the_run_of_a_majority_that_finished_its_round(tmp_path):
    link, told = FiveSites(tmp_path, PAIR), Told()
    link.tamper = says_not_finite_after_lying("1", "3")
    serve(link, tmp_path / "run", experiment("fedavg", PAIR, 6, max_norm="none", quorum=0.5), told)
    assert told.ends[-1].round == 6
    assert not [one for client in "024" for one in dropped(told, client)]


def test_a_site_that_diverges_alone_has_nobody_go_back(tmp_path):
    """Nobody lies: the rate is far too high, and one site alone has the model that the experiment names."""
    named, brought = dict.fromkeys(IDS, "conv-small"), dict.fromkeys(IDS, "mlp-small") | {"4": "conv-small"}
    link, told = FiveSites(tmp_path, brought), Told()
    asked = experiment("fedavg", named, 6, epochs=2, optimizer={"lr": 1000.0})
    result = serve(link, tmp_path / "run", asked, told)
    assert [end.round for end in told.ends] == [*range(1, 7)]
    assert "went_back" not in result.summary


# --- weights against those of a new model ---


@pytest.mark.parametrize("method", ["fedavg", "feddf", "fed-et"])
def test_weights_that_one_client_alone_sends_are_compared_with_a_new_model(tmp_path, method):
    """Its honest twin joins later, and would train on with what the liar sent."""
    link, told = FiveSites(tmp_path, PAIR), Told()
    link.away = {"3"}
    large = lie(1, factor=1e3)

    def tamper(order, data):
        if isinstance(order, Request) and order.purpose == "train":
            link.away = set()
        return large(order, data)

    link.tamper = tamper
    options = {"name": method, **({} if method == "fedavg" else {"steps": 4, "batch": 20})}
    serve(link, tmp_path / "run", experiment(options, PAIR, 4, quorum=0.5, start_quorum=0.6), told)
    assert [end.round for end in told.ends] == [1, 2, 3, 4]
    (out,) = dropped(told, "1")
    assert "times that of a new model, and nobody else sent the like" in out
    assert not dropped(told, "3")
    assert not [one for one in told.notices if "played again" in one]


def test_who_is_refused_over_a_new_model_begins_anew(tmp_path):
    """What one lie within the bound left behind would have it refused for ever, its honest heir as well."""
    link, told = FiveSites(tmp_path, ALONE), Told()
    link.tamper = lie(1, factor=90.0)
    method = {"name": "fed-et", "steps": 4, "batch": 20}
    serve(link, tmp_path / "run", experiment(method, ALONE, 5, optimizer={"lr": 0.5}), told)
    (out,) = dropped(told, "1")
    assert "times that of a new model" in out
    assert [one for one in told.notices if "nobody of 1 can train" in one]


def test_running_statistics_are_not_compared_with_those_of_a_new_model():
    """Samples that nobody has scaled make them thousands of times as large, and their client is honest."""
    contract = {"model": state_of("model", "weights")}
    fresh = {"w": torch.full((4,), 0.5), "norm.running_var": torch.ones(4)}
    yardsticks = Yardsticks(lambda client: fresh)
    sent = part("model", ["model/w", "model/norm.running_var"], [(4,), (4,)])
    honest = {"model/w": 2.0, "model/norm.running_var": 1e6}  # norms, which are twice the root mean square
    assert yardsticks.times_new("0", sent, honest, contract) == 2.0
    assert yardsticks.times_new("0", sent, honest | {"model/w": 1e6}, contract) == 1e6
    scale = part("model/w", ["model/w"], [(4,)])  # a tensor that begins next to zero
    small = Yardsticks(lambda client: {"w": torch.full((4,), 1e-6)})
    assert small.times_new("0", scale, {"model/w": 2.0}, contract) == 1.0
    means = part("means", ["means"], [(10, 4)])
    assert yardsticks.times_new("0", means, {"means": 1e9}, {"means": tensor("C, d", "means")}) is None


def test_models_that_the_experiment_does_not_name_are_measured_by_what_they_were_first():
    contract = {"model": state_of("model", "weights")}
    named, own = part("model", ["model/w"], [(4,)]), part("model", ["model/v"], [(9,)])
    yardsticks = Yardsticks(lambda client: {"w": torch.full((4,), 0.5)})

    def sizes(factor):
        sent = {client: [(own, 0.07 * factor)] for client in "012"} | {
            client: [(named, 0.6 * factor)] for client in "34"
        }
        return yardsticks.sizes(sent, contract)

    assert find_suspect(sizes(1.0)) is None
    assert find_suspect(sizes(1e5)) is None  # all have diverged
    assert sizes(1e5)["0"] == pytest.approx(1e5)
    late = yardsticks.sizes({"0": [(own, 7e3)], "late": [(own, 7e3)]}, contract)
    assert late["0"] == late["late"]  # whose first message came when all had diverged
    liar = Yardsticks(lambda client: {})
    assert liar.sizes({"0": [(own, 1e6)]}, contract)["0"] == 1e6  # its own first word is no measure above 1


def test_a_form_is_known_by_any_client_whose_named_model_has_it():
    contract = {"model": state_of("model", "weights")}
    sent = part("model", ["model/w"], [(4,)])
    fresh = {"own": {"v": torch.ones(9)}, "named": {"w": torch.full((4,), 0.5)}}
    yardsticks = Yardsticks(lambda client: fresh[client])
    yardsticks.sizes({"own": [(sent, 0.5)]}, contract)
    assert yardsticks.sizes({"own": [(sent, 5.0)], "named": [(sent, 5.0)]}, contract) == {
        "own": 10.0,
        "named": 10.0,
    }
