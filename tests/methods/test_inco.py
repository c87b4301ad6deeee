"""InCo Aggregation: the mix of one kernel by hand, whole rounds in a plain loop, and where it is FedAvg."""

import numpy as np
import pytest
import torch

from potluck import Experiment
from potluck.core.card import Card
from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.methods.inco import InCo
from potluck.models.build import build
from potluck.runs.advice import advice
from staged_nets import FourBlocks, OneBlock, TwoBlocks

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}
IMAGE = Task("classification", 4, (1, 8, 8))


def inco(**options):
    return InCo(InCo.Config(name="inco", **options))


def kernel(*values):
    return torch.tensor(values).view(1, 1, 1, -1)


@pytest.mark.parametrize(
    ("options", "shallow", "expected"),
    [
        # g_ℓ = (3, 4), norm 5. g_s = (0, −2): θ = 8/4 = 2, ((0.6, 0.8) + 2·(0, −1))·3.5
        ({"update_max": 9.0}, (0.0, -2.0), (2.1, -4.2)),
        ({}, (0.0, -2.0), (0.1, -0.1)),  # every change is cut at ±0.1
        # g_s = (0, 0.1): θ = 40, cut at 5: ((0.6, 0.8) + 5·(0, 1))·2.55
        ({"update_max": 99.0}, (0.0, 0.1), (1.53, 14.79)),
        ({"update_max": 99.0, "theta_max": 1.0}, (0.0, 0.1), (1.53, 4.59)),
        # negative products alone: θ = 2 as above, and 0 where both agree
        ({"update_max": 9.0, "sign": "negative"}, (0.0, -2.0), (2.1, -4.2)),
        ({"update_max": 9.0, "sign": "negative"}, (0.0, 2.0), (2.1, 2.8)),
        ({"update_max": 9.0}, (0.0, 2.0), (2.1, 9.0)),
        # a shallow layer that did not move halves the change
        ({"update_max": 9.0}, (0.0, 0.0), (1.5, 2.0)),
    ],
)
def test_the_mix_of_one_kernel(options, shallow, expected):
    mixed = inco(**options).mix(kernel(3.0, 4.0), kernel(*shallow))
    torch.testing.assert_close(mixed, kernel(*expected), rtol=1e-5, atol=1e-5)


def test_a_vector_is_mixed_as_one():
    mixed = inco(update_max=9.0).mix(torch.tensor([3.0, 4.0]), torch.tensor([0.0, -2.0]))
    torch.testing.assert_close(mixed, torch.tensor([2.1, -4.2]))


def test_kernels_are_mixed_one_by_one():
    deep, shallow = torch.randn(2, 3, 2, 3, 3, generator=Rng(1).generator())
    whole = inco().mix(deep, shallow)
    for row in range(3):
        for column in range(2):
            one, other = (layer[row : row + 1, column : column + 1] for layer in (deep, shallow))
            torch.testing.assert_close(whole[row, column], inco().mix(one, other)[0, 0])


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e15, -1e15, 1e30])
def test_extreme_changes_stay_within_the_bound(value):
    mixed = inco().mix(torch.full((2, 2, 3, 3), value), torch.full((2, 2, 3, 3), -value))
    assert mixed.abs().max() <= torch.tensor(0.1)


def by_the_paper(before, uploads, rate=1.0):
    """A round of the server in NumPy: means over holders, kernel by kernel mixed with `layer1.0.conv2`."""
    change = {}
    for name, old in before.items():
        held = [np.float64(upload[name]) for upload in uploads if name in upload]
        change[name] = rate * (sum(held) / len(held) - old.double().numpy())
    mixed = dict(change)
    for name in change:
        if name.startswith("layer1.") and ".conv" in name and not name.startswith("layer1.0."):
            partner, result = change["layer1.0.conv2.weight"], np.zeros_like(change[name])
            for place in np.ndindex(*change[name].shape[:2]):
                g, s = change[name][place].ravel(), partner[place].ravel()
                theta = min(abs(s @ g) / (s @ s + 1e-7), 5)
                size, other = np.sqrt(g @ g), np.sqrt(s @ s)
                new = (g / (size + 1e-7) + theta * s / (other + 1e-7)) * (size + other) / 2
                result[place] = np.clip(new, -0.1, 0.1).reshape(3, 3)
            mixed[name] = result
    return {name: before[name].double().numpy() + mixed[name] for name in before}


def images(count=14):
    return Rng(3).numpy().standard_normal((count, 1, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_two_rounds_of_three_depths(kit, rate):
    models = [OneBlock, TwoBlocks, FourBlocks]
    options = {"name": "inco", "server_lr": rate}
    game = kit.Federation(options, models, ROWS, x=images(), y=np.arange(14) % 4, training=TRAINING)
    before = Part(game.federation.population.build_model("c")).state()
    for _ in range(2):
        game.round("a", "b", "c")
        uploads = [game.part(client, "model") for client in ROWS]
        wanted = by_the_paper(before, uploads, rate)
        before = game.method.downlink(game.server, "c")["model"]
        assert before.keys() == wanted.keys()
        for name, value in before.items():
            np.testing.assert_allclose(value, wanted[name], atol=1e-6, err_msg=name)
    assert all(value.min() >= 0 for name, value in before.items() if name.endswith("running_var"))


def test_what_nobody_of_the_cohort_holds_stays(kit):
    models = [OneBlock, TwoBlocks, FourBlocks]
    game = kit.Federation("inco", models, ROWS, x=images(), y=np.arange(14) % 4, training=TRAINING)
    game.round("a", "b", "c")
    before = game.method.downlink(game.server, "c")["model"]
    game.round("a", "b")
    after = game.method.downlink(game.server, "c")["model"]
    same = {name.split(".conv")[0] for name in after if torch.equal(before[name], after[name])}
    assert {"layer1.2", "layer1.3"} <= same
    assert not {"layer1.0", "layer1.1", "conv1"} & same


def test_with_one_block_a_stage_it_is_layer_wise_fedavg(kit):
    layers = {"name": "fedavg", "share": "layers", "weights": "uniform"}
    downs = []
    for options in ("inco", layers):
        game = kit.Federation(options, OneBlock, ROWS, x=images(), y=np.arange(14) % 4, training=TRAINING)
        game.round("a", "b", "c")
        game.round("a", "c")
        downs.append(game.method.downlink(game.server, "b")["model"])
    assert [name for name in downs[0] if not torch.equal(downs[0][name], downs[1][name])] == []


def card(client, model, **options):
    names = {name: tuple(value.shape) for name, value in Part(build(model, IMAGE, **options)).wire().items()}
    return Card(client, 3, IMAGE, {"names": names})


def pairs(model, **options):
    """The partners of a model's tensors, without the shapes in their keys."""
    found = inco().partners([card("a", model, **options)])
    return {key.split(":")[0]: partner.split(":")[0] for key, partner in found.items()}


def test_every_convolution_behind_a_first_block_of_a_resnet26_has_a_partner():
    found = pairs("resnet26", width=2)
    wanted = {
        f"layer{stage}.{block}.conv{conv}.weight": f"layer{stage}.0.conv2.weight"
        for stage in (1, 2, 3, 4)
        for block in (1, 2)
        for conv in (1, 2)
    }
    assert found == wanted


def test_of_bottlenecks_the_convolutions_of_the_same_shape_have_one():
    found = pairs("resnet152", width=2)
    assert len(found) == 2 + 7 + 35 + 2
    assert all(key.endswith("conv2.weight") for key in found)
    assert found["layer3.35.conv2.weight"] == "layer3.0.conv2.weight"


def test_a_transformer_has_its_second_norms_mixed_at_every_depth():
    assert pairs("vit-b32", layers=2) == {
        f"layers.{block}.norm2.weight": f"layers.{block}.norm1.weight" for block in (0, 1)
    }


def test_a_mean_of_a_partner_that_did_not_come_is_not_missed():
    """A client that holds back tensors is refused earlier; the script must not depend on it."""
    method = inco()
    replies = Replies({"a": Message({"model": {"layer1.1.conv1.weight": torch.ones(1, 1, 3, 3)}})}, {})
    names = {"layer1.1.conv1.weight": (1, 1, 3, 3), "layer1.0.conv2.weight": (1, 1, 3, 3)}
    cards = {"a": Card("a", 1, IMAGE, {"names": names})}
    means = method.mean(Replies(replies.messages, cards), "model", "uniform")
    before = {key: torch.zeros_like(value) for key, value in means.items()}
    after = method.moved(before, means, method.partners(cards.values()))
    assert torch.equal(after["layer1.1.conv1.weight:1x1x3x3"], torch.ones(1, 1, 3, 3))


def asked(models):
    values = {"data": "digits", "partition": {"kind": "iid", "clients": 4}, "engine": {"device": "cpu"}}
    return Experiment.make(**values, models=models, method="inco").build()


def test_models_without_stages_are_refused():
    with pytest.raises(
        ConfigError, match=r"client 1 \(mlp-small\) has neither; use fedavg with share: layers"
    ):
        asked([{"name": "resnet14", "width": 2}, "mlp-small"])


def test_where_nothing_is_mixed_it_is_said():
    said = " ".join(advice(asked([{"name": "resnet10", "width": 2}])))
    assert "no client has a layer behind the first block" in said
    said = " ".join(advice(asked([{"name": name, "width": 2} for name in ("resnet10", "resnet14")])))
    assert "behind the first block" not in said
