"""InclusiveFL: rounds of three depths in a plain loop, momentum distillation by hand, and where it is FedAvg."""

import numpy as np
import pytest
import torch

from potluck import Experiment
from potluck.core.rng import Rng
from potluck.core.state import Part
from potluck.errors import ConfigError
from potluck.kit.depths import in_their_place
from potluck.runs.advice import advice
from staged_nets import FourBlocks, OneBlock, TwoBlocks

MODELS = {"a": OneBlock, "b": OneBlock, "c": TwoBlocks, "d": FourBlocks}
ROWS = {"a": range(0, 4), "b": range(4, 6), "c": range(6, 11), "d": range(11, 14)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}
BETA = 0.2


def played(kit, method, models=None, training=None, per_client=False, **options):
    x = Rng(3).numpy().standard_normal((14, 1, 8, 8)).astype(np.float32)
    return kit.Federation(
        {"name": method, **options},
        models or list(MODELS.values()),
        ROWS,
        x=x,
        y=np.arange(14) % 4,
        training=training or TRAINING,
        per_client=per_client,
    )


class ByThePaper:
    """The server in NumPy: a copy per depth, and ḡ of the last block of each smaller one."""

    depths = (1, 2, 4)

    def __init__(self, start):
        held = {depth: self.names(depth, start) for depth in self.depths}
        self.copies = {
            depth: {name: start[name].double().numpy() for name in names} for depth, names in held.items()
        }
        self.momentum = {}

    @staticmethod
    def names(depth, start):
        return [name for name in start if not name.startswith("layer1.") or int(name.split(".")[1]) < depth]

    def step(self, uploads):
        """`uploads`: depth → [(samples, weights)] of the round's clients."""
        old = {depth: dict(copy) for depth, copy in self.copies.items()}
        changes = {}
        for depth, sent in uploads.items():
            copy = self.copies[depth]
            changes[depth] = {name: sum(w[name] for _, w in sent) / len(sent) - copy[name] for name in copy}
            for name in copy:
                change = changes[depth][name]
                if (depth, name) in self.momentum:
                    change = BETA * self.momentum[depth, name] + (1 - BETA) * change
                copy[name] = old[depth][name] + change
        self.average({depth: sum(n for n, _ in sent) for depth, sent in uploads.items()})
        for small, large in ((1, 2), (2, 4)):
            for rest in ("conv1.weight", "conv2.weight", "bn1.weight", "bn1.bias"):
                if large in changes:
                    layers = [changes[large][f"layer1.{j}.{rest}"] for j in range(small - 1, large)]
                    self.momentum[small, f"layer1.{small - 1}.{rest}"] = sum(layers) / (large - small + 1)

    def average(self, samples):
        """Over depths; not heads, and not the last block of the smaller ones."""
        shared = {}
        for name in self.copies[4]:
            if not name.startswith("head."):
                holders = [depth for depth in self.depths if name in self.copies[depth]]
                shared[name] = [
                    depth for depth in holders if depth == 4 or not name.startswith(f"layer1.{depth - 1}.")
                ]
        for name, holders in shared.items():
            total = sum(samples.get(depth, 0) for depth in holders)
            if total:
                mean = sum(samples.get(depth, 0) * self.copies[depth][name] for depth in holders) / total
                for depth in holders:
                    self.copies[depth][name] = mean


DEPTH = {"a": 1, "b": 1, "c": 2, "d": 4}


def test_four_rounds_of_three_depths(kit):
    """The blend happens in every round after the first, with all layers of the next size, and waits for it."""
    game = played(kit, "inclusivefl")
    paper = ByThePaper(Part(game.federation.population.build_model("d")).state())
    for cohort in (tuple(ROWS), ("a", "b", "d"), tuple(ROWS), ("a", "c")):
        game.round(*cohort)
        uploads = {}
        for client in cohort:
            weights = {name: value.double().numpy() for name, value in game.part(client, "model").items()}
            uploads.setdefault(DEPTH[client], []).append((len(ROWS[client]), weights))
        paper.step(uploads)
        for client, depth in DEPTH.items():
            down = game.method.downlink(game.server, client)["model"]
            assert down.keys() == paper.copies[depth].keys()
            for name, value in down.items():
                wanted = paper.copies[depth][name]
                np.testing.assert_allclose(value, wanted, atol=2e-6, err_msg=f"{cohort} {client} {name}")


def key(game, client, name):
    return game.method.keys(game.server.cards[client])[name]


def test_the_momentum_is_the_mean_of_all_layers_in_the_place_of_the_last(kit):
    """Layers 2, 3 and 4 of the larger model moved by 1, 2 and 6: ḡ is 3. The last alone would give 2."""
    game = played(kit, "inclusivefl")
    changes = {
        key(game, "d", f"layer1.{layer}.bn1.bias"): torch.full((2,), value)
        for layer, value in ((0, 50.0), (1, 1.0), (2, 2.0), (3, 6.0))
    }
    found = game.method.momentum(changes)
    assert found.keys() == {key(game, "c", "layer1.1.bn1.bias")}
    torch.testing.assert_close(found[key(game, "c", "layer1.1.bn1.bias")], torch.full((2,), 3.0))


def test_the_blend_happens_where_there_is_a_momentum_and_only_there(kit):
    """0.2·10 + 0.8·5 = 6 on top of 1; without a momentum the change is taken whole, not 0.8 of it."""
    game = played(kit, "inclusivefl")
    bias, weight = (key(game, "c", f"layer1.1.bn1.{name}") for name in ("bias", "weight"))
    before = {bias: torch.ones(2), weight: torch.ones(2)}
    changes = {bias: torch.full((2,), 5.0), weight: torch.full((2,), 5.0)}
    found = game.method.distilled(before, changes, {bias: torch.full((2,), 10.0)})
    assert found.keys() == {bias}
    torch.testing.assert_close(found[bias], torch.full((2,), 7.0))


def test_all_sizes_start_from_the_deepest(kit):
    still = {"epochs": 1, "batch_size": 99, "optimizer": {"lr": 1e-12}}
    game = played(kit, "inclusivefl", training=still, per_client=True)
    game.round("a", "d")
    game.round("b", "c")  # a size that comes later starts from what is known of the others
    start = game.initial("d")
    for client in MODELS:
        down = game.method.downlink(game.server, client)["model"]
        for name in game.initial(client):
            torch.testing.assert_close(down[name], start[name], msg=f"{client} {name}")


def test_a_size_that_sits_out_gets_the_layers_it_shares(kit):
    game = played(kit, "inclusivefl")
    game.round(*ROWS)
    before = game.method.downlink(game.server, "c")["model"]
    game.round("d")
    after, deep = (game.method.downlink(game.server, client)["model"] for client in "cd")
    for name in after:
        own = name.startswith(("head.", "layer1.1."))
        assert torch.equal(after[name], (before if own else deep)[name]), name


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_with_one_depth_it_is_fedavg(kit, weights):
    downs = []
    for method in ("inclusivefl", "fedavg"):
        game = played(kit, method, [TwoBlocks] * 4, weights=weights)
        game.round(*ROWS)
        game.round("a", "d")
        downs.append(game.method.downlink(game.server, "b")["model"])
    assert [name for name in downs[0] if not torch.equal(downs[0][name], downs[1][name])] == []


def test_with_everything_shared_and_weights_by_samples_it_is_layer_wise_fedavg(kit):
    open_to_all = {"local_last": "none", "local_head": False, "weights": "samples"}
    ours = played(kit, "inclusivefl", **open_to_all)
    layers = played(kit, "fedavg", share="layers")
    for game in (ours, layers):
        game.round(*ROWS)
        game.round("a", "c", "d")
    for client in ROWS:
        one, other = (game.method.downlink(game.server, client)["model"] for game in (ours, layers))
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=1e-5, msg=f"{client} {name}")


def asked(models, **options):
    values = {"data": "digits", "partition": {"kind": "iid", "clients": 4}, "engine": {"device": "cpu"}}
    return Experiment.make(**values, models=models, method={"name": "inclusivefl", **options}).build()


def small(*names):
    return [{"name": name, "width": 2} for name in names]


def learned(federation, client, name):
    """The names that a tensor of a client learns from."""
    method, cards = federation.method, federation.population.cards
    names = {key: name for card in method.sizes for name, key in method.keys(card).items()}
    taught = method.lessons.get(method.keys(cards[client])[name], ())
    return [names[key] for key in taught]


def test_stages_of_resnets_have_a_last_block_each():
    """ResNet10 has blocks (1, 1, 1, 1), ResNet14 (1, 1, 2, 2), ResNet22 (2, 2, 3, 3)."""
    federation = asked(small("resnet10", "resnet14", "resnet22"), local_last="stacks")
    assert learned(federation, "0", "layer3.0.conv2.weight") == [
        "layer3.0.conv2.weight",
        "layer3.1.conv2.weight",
    ]
    assert learned(federation, "0", "layer3.0.conv1.weight") == ["layer3.0.conv1.weight"]  # other input width
    assert learned(federation, "0", "layer1.0.conv2.weight") == ["layer1.0.conv2.weight"]
    assert learned(federation, "1", "layer4.1.bn1.bias") == ["layer4.1.bn1.bias", "layer4.2.bn1.bias"]
    assert learned(federation, "1", "layer4.0.bn1.bias") == []
    assert learned(federation, "2", "layer4.2.bn1.bias") == []
    shared = set(federation.method.shared.values())
    assert {"conv1.weight", "bn1.running_var", "layer4.0.conv1.weight"} <= shared
    assert not any(name.startswith("head.") for name in shared)
    assert "layer1.0.conv1.weight" not in shared  # the last block of two sizes, so of the third alone


def test_by_default_only_the_last_stage_that_was_cut_has_one():
    federation = asked(small("resnet10", "resnet14", "resnet22"))
    assert learned(federation, "0", "layer4.0.bn1.bias") == ["layer4.0.bn1.bias", "layer4.1.bn1.bias"]
    assert learned(federation, "0", "layer3.0.bn1.bias") == []
    shared = federation.method.shared
    keys = federation.method.keys(federation.population.cards["0"])
    assert {name.split(".")[0] for name, key in keys.items() if key not in shared} == {"layer4", "head"}


def test_the_deepest_resnets_and_a_transformer_work():
    federation = asked(small("resnet101", "resnet152"))
    assert len(learned(federation, "0", "layer3.22.conv2.weight")) == 36 - 23 + 1
    federation = asked([{"name": "vit-b32", "layers": layers} for layers in (1, 2)])
    assert learned(federation, "0", "layers.0.mlp.2.bias") == ["layers.0.mlp.2.bias", "layers.1.mlp.2.bias"]
    assert "positions" in set(federation.method.shared.values())


def test_models_of_another_family_are_refused():
    with pytest.raises(ConfigError, match="inclusivefl needs models of one family cut at different depths; "):
        asked(["mlp-small", "conv-small"])
    with pytest.raises(ConfigError, match=r"has shape \(4, 1, 7, 7\) there: client 1 \(resnet14\)"):
        asked([{"name": "resnet10", "width": 2}, {"name": "resnet14", "width": 4}])


def test_one_depth_is_spoken_of():
    assert "so this is fedavg" in " ".join(advice(asked(small("resnet10"))))
    assert "fedavg" not in " ".join(advice(asked(small("resnet10", "resnet14", "resnet18", "resnet26"))))


def test_a_share_of_layers_that_nobody_keeps_is_refused():
    with pytest.raises(ConfigError, match="beta does nothing with local_last: none; it is for end or stacks"):
        asked("mlp-small", local_last="none", beta=0.5)


def test_what_stands_in_a_layers_place_is_found_among_the_names_that_are_there():
    """The number of a layer is whatever a card says."""
    far = f"layers.{10**400}.w"
    larger = {"layers.10.w": (2,), "layers.2.w": (2,), "layers.3.w": (5,), far: (2,), "layers.0.w": (2,)}
    found = in_their_place(["layers.1.w"], {"layers.1.w": (2,)}, larger)
    assert found == {"layers.1.w": ["layers.2.w", "layers.10.w", far]}
