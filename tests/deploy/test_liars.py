"""One liar among honest clients: what it brings, adds or leaves out ends no run and reaches nobody else."""

import contextlib
from dataclasses import replace

import pytest
import sites
import torch
from hostile import note_of, noted
from links import Link, Told, blown_up, is_training, serve
from test_card_matrix import MODELS as MATRIX_MODELS
from test_card_matrix import OPTIONS as MATRIX_OPTIONS
from test_sites import OPTIONS
from torch import nn

from potluck.core.contract import state_of
from potluck.core.message import Message
from potluck.core.state import Report
from potluck.deploy import wire
from potluck.deploy.site import Site
from potluck.engine.norms import norm_ratios, parts_of
from potluck.engine.protocol import Answer, Request
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.errors import RoundFailed, RunError
from potluck.methods.fedavg import FedAvg
from potluck.methods.registry import method_names

ALIKE = {"models": {"pool": "mlp-small", "rep_dim": 16, "init": "per_client"}}


class Normed(nn.Module):
    """A model with buffers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc(self.body(x))


def normed(input, classes):
    return Normed()


def lying(change, step, client="1", rounds=None):
    """A link's `tamper`: what one client sends in a step is changed."""

    def tamper(order, data):
        asked = isinstance(order, Request) and order.client == client and order.steps == (step,)
        answer = wire.unpack_reply(data)
        if not asked or not isinstance(answer, Answer) or (rounds and order.stamp.round not in rounds):
            return data
        return wire.pack_reply(replace(answer, up=Message(change(dict(answer.up)))))

    return tamper


def play(home, method, tamper, model="mlp-small", rounds=2, **others):
    link, told = Link(home, model=model), Told()
    link.tamper = tamper
    result = serve(link, home / "run", sites.federated(method, rounds=rounds, **ALIKE | others), told)
    return link, told, result


def left_out(told):
    return [notice for notice in told.notices if "goes on without" in notice]


# --- SCAFFOLD's variates ---


def with_buffers(up):
    names = [name for name in up if name.startswith("model/") and "running" in name]
    assert names
    return up | {name.replace("model/", "control/"): torch.zeros_like(up[name]) for name in names}


def test_a_variate_of_a_buffer_is_not_taken(tmp_path):
    _, told, _ = play(tmp_path, "scaffold", lying(with_buffers, "train", rounds=[1]), model=normed)
    (out,) = left_out(told)
    assert "round 1 goes on without client 1" in out
    assert "running_mean' is not part of 'control'" in out


def test_a_card_that_calls_a_buffer_a_parameter_reaches_nobody_else(tmp_path):
    lie = lying(with_buffers, "train")

    def tamper(order, data):
        if not isinstance(order, wire.Hello):
            return lie(order, data)
        note = note_of(data)
        if note.get("client") == "1":
            note["extra"]["parameter_names"] = [*note["extra"]["names"], "nowhere"]
        return noted(data, note)

    link, told, _ = play(tmp_path, "scaffold", tamper, model=normed)
    assert all("without client 1" in notice for notice in left_out(told))
    downs = [one.down for one in link.orders if isinstance(one, Request) and one.client != "1"]
    assert downs
    assert not any("running" in name for down in downs for name in down.group("control"))


def test_a_variate_in_part_is_not_taken(tmp_path):
    def one_only(up):
        first, *others = (name for name in up if name.startswith("control/"))
        return {name: value for name, value in up.items() if name not in others} | {
            first: torch.full_like(up[first], 3e38)
        }

    _, told, _ = play(tmp_path, "scaffold", lying(one_only, "train"))
    assert len(left_out(told)) == 2
    assert all("'control/" in notice and "is missing" in notice for notice in left_out(told))
    assert told.ends[-1].accuracy > 0.15


# --- FedDF's cards ---


@pytest.mark.parametrize("kind", ["renamed", "shapes", "fewer"])
def test_a_card_must_have_the_tensors_of_the_architecture_that_the_server_builds(tmp_path, kind):
    change = {
        "renamed": lambda names: {f"{name}x": shape for name, shape in names.items()},
        "shapes": lambda names: {name: [size + 1 for size in shape] for name, shape in names.items()},
        "fewer": lambda names: dict([*names.items()][:1]),
    }[kind]
    liars = ("1", "2") if kind == "renamed" else ("1",)
    told_names = {}

    def tamper(order, data):
        if isinstance(order, wire.Hello):
            note = note_of(data)
            if note.get("client") in liars:
                told_names[note["client"]] = note["extra"]["names"] = change(note["extra"]["names"])
            return noted(data, note)
        if isinstance(order, Request) and order.client in liars:
            up = {
                f"model/{name}": torch.full(shape, 0.01) for name, shape in told_names[order.client].items()
            }
            return wire.pack_reply(Answer(order.client, Message(up), Report(1, {}, {})))
        return data

    training = {"rounds": 1, "batch_size": 16, "optimizer": {"lr": 0.05}, "start_quorum": 0.3}
    method = {"name": "feddf", "steps": 5, "every": 5}
    link, told, _ = play(tmp_path, method, tamper, training=training)
    assert len(told.ends) == 1
    away = [notice for notice in told.notices if "cannot take part" in notice]
    assert [f"client {client} cannot take part" in notice for client, notice in zip(liars, away, strict=True)]
    assert all("other tensors than the architecture" in notice for notice in away)
    assert link.asked(1) == [client for client in sites.IDS if client not in liars]


# --- a downlink that cannot be made ---


def test_a_downlink_that_cannot_be_made_costs_one_client_only(tmp_path, monkeypatch):
    honest = FedAvg.downlink

    def downlink(self, server, client):
        if client == "1" and server.round == 2:
            raise KeyError("what client 1 said of itself")
        return honest(self, server, client)

    monkeypatch.setattr(FedAvg, "downlink", downlink)
    _, told, _ = play(tmp_path, "fedavg", lambda order, data: data, evaluate={"when": ["after_aggregation"]})
    assert [end.round for end in told.ends] == [1, 2]
    (out,) = left_out(told)
    assert "round 2 goes on without client 1, step train: no message could be made for it" in out


# --- the server's half of a method ---


def test_a_fault_in_a_methods_own_code_ends_the_server_in_a_sentence_and_loses_nothing(tmp_path, monkeypatch):
    honest, others = FedAvg.round, {"evaluate": {"when": ["after_aggregation"]}}

    def faulty(self, server, clients):
        honest(self, server, clients)
        if server.round == 2:
            raise KeyError("a name of its own")

    monkeypatch.setattr(FedAvg, "round", faulty)
    with pytest.raises(RunError) as error:
        play(tmp_path, "fedavg", lambda order, data: data, **others)
    assert str(error.value).startswith("round 2: the server's half of fedavg failed at ")
    assert "(KeyError: 'a name of its own')" in str(error.value)
    monkeypatch.setattr(FedAvg, "round", honest)
    play(tmp_path, "fedavg", lambda order, data: data, **others)
    assert sites.log(tmp_path / "run") == sites.serial("fedavg", tmp_path / "serial", **ALIKE | others)


# What the contracts allow, as far from anything honest as can be.
EXTREME = {
    "zeros": torch.zeros_like,
    "largest": lambda value: torch.full_like(value, 3e38) if value.is_floating_point() else value,
}


class Extreme(SerialEngine):
    """The serial engine, with a client that sends other numbers."""

    def run(self, requests):
        return [
            replace(one, up=Message({name: self.change(value) for name, value in one.up.items()}))
            if isinstance(one, Answer) and one.client == "1"
            else one
            for one in super().run(requests)
        ]


@pytest.mark.parametrize(
    "method", ["cofed", "creamfl", "feddf", "fedgh", "fedhenn", "fedmd", "fedproto", "fedre"]
)
def test_no_numbers_that_a_contract_allows_raise_an_error_at_the_server(method):
    options = {"name": method, **OPTIONS.get(method, {})}
    federation = sites.simulated(options, **ALIKE).build()
    for change in EXTREME.values():
        engine = Extreme(federation.clients)
        engine.change = change
        with contextlib.suppress(RoundFailed):
            Rounds(federation, engine).play(1, sites.IDS)


# --- first weights ---


def all_of(size):
    return lambda up: {name: torch.full_like(value, size) for name, value in up.items()}


@pytest.mark.parametrize("size", [3e38, 1e3, 0.0, 1e-30])
def test_first_weights_beyond_all_measure_are_not_taken(tmp_path, size):
    link, told, _ = play(tmp_path, "fedavg", lying(all_of(size), "bring", client="0"))
    assert [end.round for end in told.ends] == [1, 2]
    (out,) = left_out(told)
    assert "round 1 goes on without client 0, step bring" in out
    assert "first weights" in out
    assert [one.client for one in link.orders if isinstance(one, Request) and one.steps == ("bring",)] == [
        "0", "1"]  # fmt: skip


def test_who_gave_first_weights_with_which_nobody_can_train_is_left_out(tmp_path):
    training = {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "max_norm": "none"}
    tamper = lying(all_of(3e38), "bring", client="0")
    link, told, result = play(tmp_path, "fedavg", tamper, training=training)
    asked = [one for one in link.orders if isinstance(one, Request) and one.steps == ("bring",)]
    assert [one.client for one in asked] == ["0", "1"]  # not again in a second try
    assert [end.round for end in told.ends] == [1, 2]
    (said,) = [notice for notice in told.notices if "first weights" in notice]
    assert "round 1 is played again without client 0" in said
    assert result.summary["bad_starts"] == [{"round": 1, "without": "0"}]


def test_who_gives_first_weights_later_is_not_blamed_for_the_update_of_another(tmp_path):
    models = dict(zip("abcd", ["mlp-small"] * 3 + ["conv-small"], strict=True))
    link = Link(tmp_path, away={"d"})
    link.sites = {
        number: Site(client, model, sites.loader(sites.IDS[number % 3]), tmp_path / client)
        for number, (client, model) in enumerate(models.items())
    }
    lie = blown_up(lambda order: is_training(order, "b", 1) and order.purpose == "train")

    def tamper(order, data):
        if is_training(order, "c", 1):
            link.away = set()  # d comes while round 1 is played
        return lie(order, data)

    link.tamper = tamper
    training = {
        "rounds": 2,
        "batch_size": 16,
        "optimizer": {"lr": 0.05},
        "max_norm": "none",
        "start_quorum": 0.75,
    }
    values = {"models": {"pool": models, "rep_dim": 16}, "training": training}
    experiment = sites.federated("fedavg", **values).variant(partition={"sites": (*models,), "classes": 10})
    result = serve(link, tmp_path / "run", experiment)
    assert [(one["round"], one["without"]) for one in result.summary["went_back"]] == [(1, "b")]
    assert "bad_starts" not in result.summary


def test_two_such_donors_are_left_out_one_after_the_other(tmp_path):
    training = {"rounds": 1, "batch_size": 16, "optimizer": {"lr": 0.05}, "max_norm": "none"}
    first, second = (lying(all_of(3e38), "bring", client=client) for client in "01")
    _, told, result = play(
        tmp_path, "fedavg", lambda order, data: second(order, first(order, data)), training=training
    )
    assert [one["without"] for one in result.summary["bad_starts"]] == ["0", "1"]
    assert [end.round for end in told.ends] == [1]


# --- groups that may be sent in part ---


def test_the_tensors_of_a_group_that_may_be_sent_in_part_are_compared_one_by_one():
    contract = {"maps": state_of("maps", "maps", partial=True)}
    whole = Message({"maps": {"a": torch.ones(4), "b": torch.ones(2)}})
    less = Message({"maps": {"a": torch.full((4,), 1e6)}})
    sent = {
        client: [(part, float(message[part.name].abs().max())) for part in parts_of(message, contract)]
        for client, message in {"0": whole, "1": less, "2": whole}.items()
    }
    found = {(client, form[0]): ratio for (client, form), ratio in norm_ratios(sent, {}).items()}
    assert found["1", "maps/a"].most == 1e6


def test_messages_of_low_rank_cross_among_sites(tmp_path):
    _, told, _ = play(tmp_path, {"name": "fedkd"}, lambda order, data: data, rounds=3)
    assert not left_out(told)


@pytest.mark.parametrize("factor", ["s", "u"])
def test_a_liar_cannot_hide_behind_factors(tmp_path, factor):
    """Singular values are compared with the norms of the others' tensors, the other factors have a range."""

    def larger(up):
        return {name: value * 1e6 if name.endswith(f":{factor}") else value for name, value in up.items()}

    _, told, _ = play(tmp_path, {"name": "fedkd"}, lying(larger, "train"))
    assert left_out(told)


def test_a_liar_cannot_hide_behind_a_whole_tensor(tmp_path):
    def whole(up):
        names = [name.removesuffix(":u") for name in up if name.endswith(":u")]
        tensors = {name: 1e6 * up[f"{name}:u"] @ up[f"{name}:v"] for name in names}
        return {name: value for name, value in up.items() if ":" not in name} | tensors

    _, told, _ = play(tmp_path, {"name": "fedkd"}, lying(whole, "train"))
    assert left_out(told)


# --- sizes and counts that are not left open ---


@pytest.mark.parametrize("method", method_names())
def test_every_reply_has_a_largest_size(method):
    """Where a contract leaves a size open, a reply may have 2 GiB before anybody looks at it."""
    pool = dict(zip(sites.IDS, MATRIX_MODELS.get(method, ["mlp-small"] * 3), strict=True))
    models = {"models": {"pool": pool, "rep_dim": None if method == "scalefl" else 16}}
    federation = sites.simulated({"name": method, **MATRIX_OPTIONS.get(method, {})}, **models).build()
    rounds = Rounds(federation, SerialEngine(federation.clients))
    sizes = {step: rounds.largest_reply("0", (step,)) for step in federation.method.steps()}
    assert all(size is not None and size < 1 << 24 for size in sizes.values()), sizes


@pytest.mark.parametrize("beyond", [1.0, 3e38])
def test_nobody_has_seen_more_samples_than_training_shows(tmp_path, beyond):
    """Two liars that count too much would outweigh all others, or make the sum of all counts infinite."""
    seen = {}

    def more(up):
        most = seen["most"]
        assert up["counts"].sum() <= most
        return up | {"counts": torch.full_like(up["counts"], most) + beyond}

    first, second = (lying(more, "train", client=client) for client in "12")
    method = {"name": "fedproto", "online": True, "weights": "count"}
    training = {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "epochs": 2, "last_batch": "wrap"}
    training |= {"per_client": {"1": {"epochs": 3}}, "quorum": 0.3}

    def tamper(order, data):
        if isinstance(order, Request):
            epochs, samples = {"1": 3}.get(order.client, 2), len(sites.part(order.client)["train"][0])
            seen["most"] = epochs * 16 * -(-samples // 16)
        return second(order, first(order, data))

    _, told, _ = play(tmp_path, method, tamper, training=training)
    assert [end.round for end in told.ends] == [1, 2]
    assert len(left_out(told)) == 4
    assert all(
        "tensor 'counts' has other numbers than whole numbers from 0 to" in one for one in left_out(told)
    )


def test_who_trains_longer_may_count_more(tmp_path):
    method = {"name": "fedproto", "online": True, "weights": "count"}
    training = {"rounds": 2, "batch_size": 16, "optimizer": {"lr": 0.05}, "epochs": 2, "last_batch": "wrap"}
    training |= {"per_client": {"1": {"epochs": 3}}}
    _, told, _ = play(tmp_path, method, lambda order, data: data, training=training)
    assert not left_out(told)
