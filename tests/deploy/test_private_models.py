"""What a hostile server can do to the models that stay at a site: no more than training does."""

import copy

import pytest
import torch
from lone_site import ask, greet, joined, make_site, offer, request, small
from test_attempts import contract

from potluck.core import method
from potluck.core.contract import state_of
from potluck.core.message import Message
from potluck.core.method import client_step
from potluck.deploy.resident import MOST_GROWN
from potluck.engine.protocol import Answer, Failure
from potluck.methods.fedavg import FedAvg

BEYOND = 3 * MOST_GROWN


@pytest.fixture
def paired(tmp_path, monkeypatch):
    """A site in a run of a method that averages one model and keeps another; `growing` are enlarged in training."""
    monkeypatch.setattr(method, "_registry", dict(method._registry))

    class Paired(FedAvg):
        name = "paired"
        citation = "none"
        growing = ()

        def client_state(self, task, model):
            return {"model": model, "own": copy.deepcopy(model)}

        @torch.no_grad()
        def fit(self, client):
            for part in ("model", "own"):
                for name, value in client[part].module.named_parameters():
                    value.add_(0.01 if part == "own" else 0.0)
                    value.mul_(100.0 if name.startswith(self.growing) else 1.0)

        @client_step(up={"head": state_of("model/head", "first weights of the head")}, purpose="setup")
        def bring_head(self, client):
            return {"head": client["model/head"].state()}

    return joined(tmp_path, "paired", rounds=4)


def weights(site, factor):
    """A downlink that makes the averaged model this many times as large as it was at first."""
    first = site.resident.live["model"].wire()
    return Message({"model": {name: value * factor for name, value in first.items()}})


def state(site):
    record = site.resident.record
    return record._state(record.history.at.key)


def of_part(state, part):
    return {name: value for name, value in state.items() if name.startswith(f"{part}/")}


def is_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def asked_for_first_weights_twice(site):
    """A server that enlarges the averaged weights, and then asks for first ones."""
    first, large = dict(site.resident.performer.initial), weights(site, BEYOND)
    assert isinstance(ask(site, request(Message())), Answer)
    trained = of_part(state(site), "own")
    assert isinstance(ask(site, request(large, 2, accepted=1, steps=("bring",))), Answer)
    assert isinstance(ask(site, request(Message(), 3, accepted=2, steps=("bring",))), Answer)
    assert is_equal(of_part(state(site), "model"), of_part(first, "model"))
    return trained, of_part(first, "own")


def test_a_private_model_stays_when_the_averaged_one_begins_anew(paired):
    trained, first = asked_for_first_weights_twice(paired)
    assert is_equal(of_part(state(paired), "own"), trained)
    assert not is_equal(trained, first)


def test_a_private_model_that_has_grown_itself_begins_anew_too(paired):
    type(paired.resident.performer.method).growing = ("",)
    _, first = asked_for_first_weights_twice(paired)
    assert is_equal(of_part(state(paired), "own"), first)


def test_first_weights_of_a_layer_tell_nothing_of_the_layers_that_stay(paired):
    """Were the whole model compared, the server would learn from the reply how large the private layers are."""
    head = paired.resident.live["model/head"].state()
    body = [name for name, _ in paired.resident.live["model"].module.named_parameters() if "head" not in name]
    type(paired.resident.performer.method).growing = tuple({name.partition(".")[0] for name in body})
    other = {name: value + 0.5 for name, value in weights(paired, 1.0).group("model").items()}
    assert isinstance(ask(paired, request(Message({"model": other}))), Answer)
    reply = ask(paired, request(Message(), 2, accepted=1, steps=("bring_head",)))
    assert not is_equal(reply.up.group("head"), head)


def test_a_model_that_would_no_longer_be_finite_stays_as_it_was(tmp_path):
    """Nothing of the model leaves in this step, so what leaves does not show it."""
    site = joined(tmp_path, "rhfl")
    numbers = torch.randn(60, 10, generator=torch.Generator().manual_seed(0))
    down = Message(dict.fromkeys(site.resident.federation.method.down_contract("learn"), 1e10 * numbers))
    reply = ask(site, request(down, steps=("learn",)))
    assert reply.reason == "client 0: what was trained is not finite; lower training.optimizer.lr"
    assert site.resident.record.history.at is None
    assert site.resident.record.history.tried == {1: 1}  # it counts as an attempt


def test_a_learning_rate_beyond_all_measure_is_not_kept(tmp_path):
    told = offer("local")
    told["experiment"]["training"]["optimizer"]["lr"] = 1e38
    site = make_site(tmp_path)
    greet(site, told)
    assert "not finite" in ask(site, request(Message())).reason
    assert site.resident.record.history.at is None


def test_an_order_that_repeats_a_step_is_refused_before_any_work(tmp_path):
    """A site counts attempts by how often a step is done; in one order it would be done 32 times for one."""
    site = joined(tmp_path, agreement=contract(tmp_path))
    reply = ask(site, request(small(site), steps=("train",) * 32))
    assert isinstance(reply, Failure)
    assert "does 'train' 32 times, and fedmrl does it once in a round" in reply.reason
    assert isinstance(ask(site, request(small(site))), Answer)
    assert site.resident.record.history.tried == {1: 1}
