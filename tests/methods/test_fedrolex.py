"""FedRolex: which channels clients train in which round, and that all means are plain."""

import pytest
import torch

from potluck.core.replies import Replies
from potluck.testing.bench import Bench
from width_nets import net

ROWS = {"a": range(0, 8), "b": range(8, 14)}
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 0.1}}
PLAIN = {"name": "fedrolex", "sbn": False, "scaler": False, "mask": False, "label_split": False, "clip": None}


def window(start, own, channels):
    return [(start + place) % channels for place in range(own)]


def test_the_window_moves_by_one_a_round_and_layers_agree(kit):
    """Two of four channels, four of eight: each layer's inputs are the outputs of the one before."""
    game = kit.Federation(
        PLAIN | {"parent": net(4, norm=True, growth=2)}, net(2, norm=True, growth=2), ROWS, training=TRAINING
    )
    for number in range(1, 7):
        before = {name: value.clone() for name, value in game.server["parent"].state().items()}
        game.round("a", "b")
        first, second = window(number - 1, 2, 4), window(number - 1, 4, 8)
        held = {
            "fc1.weight": (first, range(3)), "fc1.bias": (first,), "fc2.weight": (second, first),
            "fc2.bias": (second,), "head.weight": (range(4), second), "head.bias": (range(4),),
            **{f"norm.{name}": (first,) for name in ("weight", "bias", "running_mean", "running_var")},
        }  # fmt: skip
        after, slice_ = game.server["parent"].state(), game.method.downlink(game.server, "a")["model"]
        for name, axes in held.items():
            places = torch.meshgrid(*(torch.tensor([*axis]) for axis in axes), indexing="ij")
            assert torch.equal(slice_[name], after[name][places]), name
            moved = after[name] != before[name]
            moved[places] = False
            assert not moved.any(), (number, name)
        assert (after["fc2.weight"] != before["fc2.weight"]).any()


def test_every_channel_of_a_parent_that_nobody_holds_is_trained(kit):
    game = kit.Federation(
        PLAIN | {"parent": net(4, norm=True, growth=2)}, net(2, norm=True, growth=2), ROWS, training=TRAINING
    )
    before = {name: value.clone() for name, value in game.server["parent"].state().items()}
    for _ in range(8):
        game.round("a", "b")
    after = game.server["parent"].state()
    assert bool((after["norm.running_mean"] != before["norm.running_mean"]).all())
    assert bool((after["fc1.weight"] != before["fc1.weight"]).any(1).all())


@pytest.mark.parametrize("name", ["fc2.weight", "fc1.bias", "norm.weight", "head.weight", "head.bias"])
def test_the_mean_is_plain_for_matrices_vectors_and_the_classifier(kit, name):
    """The released code weighs all but convolutions by how often an entry was trained before."""
    rows = {**ROWS, "c": range(14, 18)}
    game = kit.Federation(
        PLAIN,
        [net(4, norm=True, growth=2), net(2, norm=True, growth=2), net(2, norm=True, growth=2)],
        rows,
        training=TRAINING,
    )
    for number in (1, 2, 3):  # the first channels were trained more often than others
        game.round("a", "b", "c")
        assert number == game.server.round
    values = {"a": 1.0, "b": 4.0, "c": 10.0}
    contents = {
        client: {
            "model": {key: torch.full(shape, value) for key, shape in game.server.cards[client].names.items()}
        }
        for client, value in values.items()
    }
    made = Replies.of(contents, {"a": 1, "b": 50, "c": 7})
    found = game.method.mean(game.server, Replies(made.messages, game.server.cards))[name]
    assert {round(value, 5) for value in found.flatten().tolist()} <= {1.0, 5.0}
    assert 5.0 in found.flatten().tolist()


def test_drawn_windows_hold_the_same_channels_for_all_of_one_width(kit):
    options = PLAIN | {"parent": net(6, norm=True, growth=2), "window": "random"}
    game = kit.Federation(options, net(2, norm=True, growth=2), ROWS, training=TRAINING)
    seen = set()
    for _ in range(4):
        game.round("a", "b")
        index = [game.method.index(game.server, client) for client in ("a", "b")]
        first, second = (own["fc1.bias"][0].tolist() for own in index)
        assert first == second == index[0]["fc2.weight"][1].tolist()
        seen.add(tuple(first))
    assert len(seen) > 1


def test_statistics_stay_with_their_channels(kit):
    """Those of a width that sits out are kept where its channels are in the parent."""
    game = kit.Federation(
        {"name": "fedrolex"},
        [net(4, norm=True, growth=2), net(2, norm=True, growth=2)],
        ROWS,
        training=TRAINING,
    )
    game.round("a", "b")
    measured = game.method.downlink(game.server, "b")["model"]["norm.running_mean"]
    game.round("a")
    moved = game.method.downlink(game.server, "b")["model"]["norm.running_mean"]
    assert moved[0] == measured[1]  # channels 1 and 2 now, 0 and 1 before


def test_a_parent_no_client_can_hold_on_named_models():
    models = [{"name": "conv-large", "scale": 0.1}, {"name": "conv-large", "scale": 0.2}]
    played = Bench({"name": "fedrolex", "parent": {"name": "conv-large", "scale": 0.5}}, models).play(
        [("0", "1", "2")]
    )
    assert not played.cohorts[0].failures
