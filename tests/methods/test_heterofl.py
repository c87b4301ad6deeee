"""HeteroFL against loops over single entries and plain PyTorch: slices, mask, scaler, static batch norm."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.task import Batch
from potluck.errors import ConfigError
from potluck.testing.bench import Bench
from width_nets import net

ROWS = {"a": range(0, 8), "b": range(8, 14), "c": range(14, 19)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.1}}
PLAIN = {"scaler": False, "sbn": False, "mask": False, "label_split": False, "clip": None}


WIDE, NARROW = net(6), net(3)


def play(kit, options, models, rows=ROWS, rounds=0, **settings):
    game = kit.Federation(
        {"name": "heterofl", **options}, models, rows, training=settings.pop("training", TRAINING), **settings
    )
    for _ in range(rounds):
        game.round(*rows)
    return game


def parent(game):
    return {name: value.clone() for name, value in game.server["parent"].state().items()}


def classes_of(game, client):
    return sorted({int(label) for label in game.y[game.rows[client]]})


# --- one round, from the first to the last number ---------------------------------------------------------


def by_hand(game, client, start, number, width, options):
    """A client's slice after one round of a plain loop."""
    sizes = {
        "fc1.weight": (width, 3),
        "fc1.bias": (width,),
        "fc2.weight": (width, width),
        "fc2.bias": (width,),
    }
    own = {name: value[tuple(slice(size) for size in sizes.get(name, (4, width)[: value.dim()]))].clone()
           for name, value in start.items()}  # fmt: skip
    for value in own.values():
        value.requires_grad_()
    held = torch.zeros(4)
    held[classes_of(game, client)] = 1
    rate = width / 6 if options["scaler"] else 1
    for rows in game.steps(client, number):
        x, y = torch.tensor(game.x[rows]), torch.tensor(game.y[rows])
        hidden = F.relu((x @ own["fc1.weight"].T + own["fc1.bias"]) / rate)
        hidden = F.relu((hidden @ own["fc2.weight"].T + own["fc2.bias"]) / rate)
        scores = hidden @ own["head.weight"].T + own["head.bias"]
        scores = scores * held if options["mask"] else scores
        loss = (scores.exp().sum(1).log() - scores[torch.arange(len(y)), y]).mean()
        gradients = torch.autograd.grad(loss, [*own.values()])
        norm = math.sqrt(sum(float(value.square().sum()) for value in gradients))
        share = min(1.0, options["clip"] / (norm + 1e-6)) if options["clip"] else 1.0
        with torch.no_grad():
            for value, gradient in zip(own.values(), gradients, strict=True):
                value -= 0.1 * share * gradient
    return {name: value.detach() for name, value in own.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"scaler": True, "mask": True, "label_split": True, "clip": 0.2, "weights": "uniform"},
        {"scaler": False, "mask": False, "label_split": False, "clip": None, "weights": "samples"},
    ],
    ids=["published", "plain"],
)
def test_two_rounds_against_a_loop_over_entries(kit, options, in_double_precision):
    y = np.array([0, 1] * 4 + [1, 2] * 3 + [0, 0, 1, 2, 3])
    models, widths = [WIDE, NARROW, NARROW], {"a": 6, "b": 3, "c": 3}
    game = play(kit, {"sbn": False} | options, models, y=y)
    for number in (1, 2):
        start = parent(game)
        game.round(*ROWS)
        pieces = {
            client: by_hand(game, client, start, number, width, options) for client, width in widths.items()
        }
        pieces = {
            client: {name: value.numpy() for name, value in piece.items()} for client, piece in pieces.items()
        }
        start = {name: value.numpy() for name, value in start.items()}
        for name, found in ((name, value.numpy()) for name, value in parent(game).items()):
            for place in np.ndindex(*found.shape):
                total = weight = 0.0
                for client, piece in pieces.items():
                    row = place[0] if name.startswith("head") and options["label_split"] else None
                    inside = all(at < size for at, size in zip(place, piece[name].shape, strict=True))
                    if inside and (row is None or row in classes_of(game, client)):
                        share = len(ROWS[client]) if options["weights"] == "samples" else 1
                        total, weight = total + share * float(piece[name][place]), weight + share
                expected = total / weight if weight else float(start[name][place])
                assert float(found[place]) == pytest.approx(expected, abs=1e-9), (name, place)


# --- the parts --------------------------------------------------------------------------------------------


def test_logits_of_other_classes_are_zero_not_minus_infinity(kit):
    game = play(kit, {}, kit.Linear, y=np.array([0, 2] * 9 + [3]))
    client = game.federation.clients.build_client("a")
    game.method.receive(client, Message(game.method.downlink(game.server, "a")))
    client["model"].load({"head.weight": torch.zeros(4, 3), "head.bias": torch.tensor([2.0, 1.0, -1.0, 5.0])})
    batch = Batch(torch.zeros(1, 3), torch.tensor([0]))
    expected = math.log(math.e**2 + 1 + math.e**-1 + 1) - 2
    assert game.method.loss(client, batch).item() == pytest.approx(expected, rel=1e-6)
    assert game.method.predict(client, batch, "masked").tolist() == [[2.0, 0.0, -1.0, 0.0]]
    assert game.method.predict(client, batch, "model").tolist() == [[2.0, 1.0, -1.0, 5.0]]


def test_entries_and_rows_that_nobody_held_keep_their_value(kit):
    """Both clients are narrow and have classes 0 and 1."""
    game = play(
        kit, {"parent": WIDE}, NARROW, {"a": range(4), "b": range(4, 9)}, y=np.array([0, 1] * 4 + [0])
    )
    before = parent(game)
    game.round("a", "b")
    after = parent(game)
    for name, inside in (("fc2.weight", (3, 3)), ("fc1.bias", (3,)), ("head.weight", (2, 3))):
        moved = after[name] != before[name]
        block = tuple(slice(size) for size in inside)
        assert moved[block].any(), name
        moved[block] = False
        assert not moved.any(), name
    assert torch.equal(after["head.bias"][2:], before["head.bias"][2:])


def test_a_row_is_averaged_over_the_clients_that_have_its_class(kit):
    game = play(kit, {}, [WIDE, NARROW, NARROW])
    ones = {name: torch.ones(shape) for name, shape in game.federation.population.names("a").items()}
    small = {name: torch.ones(shape) for name, shape in game.federation.population.names("b").items()}
    sent = {"a": (ones, 1.0, [0, 1]), "b": (small, 3.0, [1, 2]), "c": (small, 5.0, [])}
    contents = {
        client: {
            "model": {name: factor * value for name, value in held.items()},
            "classes": torch.tensor(own, dtype=torch.long),
        }
        for client, (held, factor, own) in sent.items()
    }
    made = Replies.of(contents, dict.fromkeys(contents, 1))
    before = parent(game)
    found = game.method.mean(game.server, Replies(made.messages, game.server.cards))
    assert found["head.weight"][0].tolist() == [1.0] * 6
    assert found["head.weight"][1].tolist() == [2.0] * 3 + [1.0] * 3
    assert found["head.weight"][2].tolist() == [3.0] * 3 + before["head.weight"][2, 3:].tolist()
    assert torch.equal(found["head.bias"][3], before["head.bias"][3])
    assert found["fc1.weight"].tolist() == [[3.0] * 3] * 3 + [[1.0] * 3] * 3  # hidden layers: everyone


def test_norms_are_cut_with_their_channels(kit):
    game = play(kit, PLAIN, [net(6, norm=True), net(3, norm=True), net(3, norm=True)], rounds=1)
    whole, slice_ = game.server["parent"].state(), game.method.downlink(game.server, "b")["model"]
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(slice_[f"norm.{name}"], whole[f"norm.{name}"][:3]), name
    assert not torch.equal(
        whole["norm.running_mean"][3:], torch.zeros(3)
    )  # only the wide one has moved these


# --- static batch norm ------------------------------------------------------------------------------------


def normed_inputs(game, client, slice_):
    rows = game.rows[client]
    return (
        game.x[rows].astype(np.float64) @ slice_["fc1.weight"].double().numpy().T + slice_["fc1.bias"].numpy()
    )


def test_statistics_are_those_of_all_samples_of_a_width(kit):
    game = play(kit, {}, [net(6, norm=True), net(3, norm=True), net(3, norm=True)], rounds=2)
    for clients in (("a",), ("b", "c")):
        slice_ = game.method.downlink(game.server, clients[0])["model"]
        inputs = np.concatenate([normed_inputs(game, client, slice_) for client in clients])
        np.testing.assert_allclose(slice_["norm.running_mean"], inputs.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(slice_["norm.running_var"], inputs.var(0), rtol=1e-4, atol=1e-5)


def test_a_width_that_was_never_measured_borrows(kit):
    game = play(kit, {}, [net(6, norm=True), net(3, norm=True), net(3, norm=True)])
    game.round("a")
    wide, narrow = (game.method.downlink(game.server, client)["model"] for client in ("a", "b"))
    assert wide["norm.running_mean"].any()
    assert torch.equal(narrow["norm.running_mean"], wide["norm.running_mean"][:3])
    game.round("b")
    wide, narrow = (game.method.downlink(game.server, client)["model"] for client in ("a", "b"))
    assert not torch.equal(narrow["norm.running_mean"], wide["norm.running_mean"][:3])


def test_training_keeps_no_running_statistics_and_sends_none(kit):
    game = play(kit, {}, net(3, norm=True), {"a": range(8)})
    client = game.federation.clients.build_client("a")
    mean = client["model"].norm.running_mean.clone()
    client.enter(1, game.rng("a", 1), {}, "train")
    sent = Message(game.method.train(client))
    assert torch.equal(client["model"].norm.running_mean, mean)
    assert int(client["model"].norm.num_batches_tracked) == 0
    assert not any("running" in name for name in sent)


def test_one_pass_or_several_give_the_same_statistics(kit, monkeypatch):
    """Of the first norm, whose inputs do not depend on how the pass is cut."""
    game = play(kit, {}, net(3, norm=True), {"a": range(8)}, rounds=1)
    whole = game.part("a", "statistics")
    monkeypatch.setattr("potluck.kit.static_norm.BATCH", 3)
    cut = play(kit, {}, net(3, norm=True), {"a": range(8)}, rounds=1).part("a", "statistics")
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value)


def test_replies_without_or_with_absurd_statistics_do_not_stop_a_round(kit):
    game = play(kit, {}, net(3, norm=True))
    huge = {"norm.running_mean": torch.tensor([3e38, 0, 0]), "norm.running_var": torch.full((3,), 3e38)}
    mild = {"norm.running_mean": torch.zeros(3), "norm.running_var": torch.ones(3)}
    contents = {"a": {}, "b": {"statistics": huge}, "c": {"statistics": mild}}
    made = Replies.of(contents, dict.fromkeys(contents, 1))
    game.method.keep(game.server, Replies(made.messages, game.server.cards))
    slice_ = game.method.downlink(game.server, "a")["model"]
    assert all(bool(value.isfinite().all()) for value in slice_.values())


# --- equivalence, models, refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_at_one_width_it_is_fedavg(kit, method, weights):
    """Without static batch norm, mask, label split and clip, from the same weights; the scaler is idle."""
    model = net(5, norm=True)
    plain = kit.Federation({"name": "fedavg", "weights": weights}, model, ROWS, training=TRAINING)
    options = PLAIN | {"name": method, "weights": weights, "scaler": True}
    sliced = kit.Federation(options, model, ROWS, training=TRAINING)
    sliced.server["parent"].load(game_start(plain))
    for game in (plain, sliced):
        game.round("a", "b", "c")
        game.round("a", "c")
    ours, theirs = (game.method.downlink(game.server, "b")["model"] for game in (sliced, plain))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def game_start(game):
    return {
        name: value.clone()
        for name, value in game.federation.clients.build_client("a")["model"].wire().items()
    }


DEEP = [{"name": "resnet152", "width": 2}, {"name": "resnet152", "width": 1}]
VIT = [{"name": "vit-b16", "scale": 0.03}, {"name": "vit-b16", "scale": 0.015}]
PLAYED = [("heterofl", DEEP), ("heterofl", VIT), ("fedrolex", VIT)]


@pytest.mark.parametrize(("method", "models"), PLAYED, ids=["deep", "vit", "rolling vit"])
def test_deep_residual_networks_and_transformers_play_a_round(method, models):
    training = {"epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.01}}
    played = Bench(method, models, training=training).play([("0", "1")])
    assert not played.cohorts[0].failures
    state = played.rounds.server.snapshot()
    assert all(bool(value.isfinite().all()) for value in state.values())


def refused(models, method="heterofl"):
    with pytest.raises(ConfigError) as error:
        Bench(method, models).build()
    return str(error.value)


def test_unrelated_models_are_refused_by_name_with_a_way_out():
    sentence = refused(["conv-large", "mlp-small"])
    assert sentence.startswith(
        "heterofl: client 1 (mlp-small) has a tensor 'fc1.weight', unlike the parent; give"
    )
    assert sentence.endswith("such as fedproto, or fedavg with share: groups")
    assert sentence.count("client ") == 1


def test_a_parent_narrower_than_a_client_is_refused():
    narrow = {"name": "heterofl", "parent": {"name": "mlp-small", "scale": 0.5}}
    assert (
        "client 0 (mlp-small) has 'fc1.weight' of shape (128, 64), and the parent's is (64, 64)"
        in refused("mlp-small", narrow)
    )


class Attending(nn.Module):
    """An attention layer that says nothing of its heads."""

    def __init__(self, width):
        super().__init__()
        self.into = nn.Linear(64, width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.into(x.flatten(1))[:, None]
        return self.head(self.attend(x, x, x)[0][:, 0])


def test_layers_that_cannot_be_compared_are_refused_unless_the_model_says_its_blocks():
    models = [functools.partial(Attending, 8), functools.partial(Attending, 4)]
    assert "has a layer across channels (MultiheadAttention)" in refused(models)


def test_pooled_features_are_refused():
    pool = {"pool": ["resnet10", {"name": "resnet10", "width": 32}], "rep_dim": 64, "adapter": "pool"}
    assert "computes something else than the parent with all other channels at zero" in refused(pool)


def test_running_statistics_of_scaled_outputs_are_refused():
    widths = [{"name": "conv-large", "scale": 0.2}, {"name": "conv-large", "scale": 0.1}]
    sentence = refused(widths, {"name": "heterofl", "sbn": False})
    assert sentence.startswith("heterofl: client 1 (conv-large(scale=0.1)) has batch norm")
    assert sentence.endswith("set method.scaler to false or method.sbn to true")
    Bench({"name": "heterofl", "sbn": False, "scaler": False}, widths).build()


def test_an_idle_option_is_refused():
    with pytest.raises(ConfigError, match="buffers does nothing with sbn: true"):
        Bench({"name": "heterofl", "buffers": "local"}, "mlp-small").build()


def test_what_the_server_is_told_follows_the_options(kit):
    published, silent = play(kit, {}, NARROW), play(kit, {"label_split": False, "mask": False}, NARROW)
    assert published.method.stays == ("data",)
    assert {*published.method.up_contract("train")} == {"model", "classes"}
    assert silent.method.stays == ("data", "labels")
    assert {*silent.method.up_contract("train")} == {"model"}
    assert (published.method.modes, silent.method.modes) == (("masked", "model"), ("model",))
