"""FedMRL: the fusion by hand, who gets gradient from whom, the mean, the size of the wire."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from potluck.averaging import average
from potluck.client import Client
from potluck.engine.base import Engine
from potluck.methods.fedmrl import FedMRL
from potluck.models import Model
from potluck.replies import Replies
from potluck.rng import Rng
from potluck.streams import Source
from potluck.task import Batch, Task

TASK = Task("classification", 10, (5,))
D1, D2 = 2, 3


class Cut(Model):
    """The features are some columns of the sample, times a trained factor of one."""

    def __init__(self, first, width, zero_head=False):
        super().__init__()
        self.first, self.rep_dim = first, width
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 10)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def features(self, x):
        return x[:, self.first : self.first + self.rep_dim] * self.scale


def tiny_client(zero_head=False):
    """r_g = columns 0–1, r_f = columns 2–4, P with the rows e0+e2, e1+e3, e4."""
    projector = nn.Linear(D1 + D2, D2)
    with torch.no_grad():
        projector.weight.copy_(torch.tensor([[1.0, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1]]))
        projector.bias.zero_()
    x, y = torch.tensor([[1.0, 2, 3, 4, 5]]), torch.tensor([7])
    client = Client(TASK, Source(x, y))
    with Rng(0).as_default():
        model, small = Cut(2, D2, zero_head), Cut(0, D1, zero_head)
    client.declare({"model": model, "small": small, "projector": projector})
    return client, Batch(x, y)


def method(**options):
    return FedMRL(FedMRL.Config(name="fedmrl", d1=D1, **options))


def test_fused_representation_and_loss_by_hand():
    client, batch = tiny_client(zero_head=True)
    fused = method().fuse(client, batch.x)
    assert fused.tolist() == [[4.0, 6.0, 5.0]]
    terms = method().loss(client, batch)
    assert sum(terms.values()).item() == pytest.approx(2 * math.log(10), abs=1e-6)
    assert 2 * math.log(10) == pytest.approx(4.605170, abs=1e-6)


def test_the_small_head_sees_the_first_columns_and_the_large_head_all():
    client, batch = tiny_client()
    fused = torch.tensor([[4.0, 6.0, 5.0]])
    expected = {
        "mix-small": client["small"].head(fused[:, :2]),
        "mix-large": client["model"].head(fused),
        "single-small": client["small"].head(torch.tensor([[1.0, 2.0]])),
        "single-large": client["model"].head(torch.tensor([[3.0, 4.0, 5.0]])),
    }
    assert FedMRL.modes[0] == "mix-large"
    assert set(FedMRL.modes) == set(expected)
    for mode, scores in expected.items():
        assert torch.equal(method().predict(client, batch, mode), scores), mode
    terms = method().loss(client, batch)
    assert torch.equal(terms["small"], TASK.loss(expected["mix-small"], batch.y))
    assert torch.equal(terms["large"], TASK.loss(expected["mix-large"], batch.y))


def gradients(**weights):
    client, batch = tiny_client()
    sum(method(**weights).loss(client, batch).values()).backward()
    return {name: client[name].module for name in ("model", "small", "projector")}


def is_zero(parameter):
    return parameter.grad is None or not parameter.grad.any()


def test_gradient_of_the_small_loss_alone():
    parts = gradients(weight_large=0.0)
    assert is_zero(parts["model"].head.weight)
    assert is_zero(parts["model"].head.bias)
    assert not parts["projector"].weight.grad[D1:].any()
    assert not parts["projector"].bias.grad[D1:].any()
    assert parts["projector"].weight.grad[:D1].any()
    assert not is_zero(parts["model"].scale)
    assert not is_zero(parts["small"].scale)
    assert not is_zero(parts["small"].head.weight)


def test_gradient_of_the_large_loss_alone():
    parts = gradients(weight_small=0.0)
    assert is_zero(parts["small"].head.weight)
    assert is_zero(parts["small"].head.bias)
    assert not is_zero(parts["small"].scale)
    assert not is_zero(parts["model"].scale)
    assert not is_zero(parts["model"].head.weight)
    assert parts["projector"].weight.grad[D1:].any()


def test_both_losses_add_up():
    both, small, large = gradients(), gradients(weight_large=0.0), gradients(weight_small=0.0)
    for part in both:
        for name, parameter in both[part].named_parameters():
            alone = [parts[part].get_parameter(name).grad for parts in (small, large)]
            expected = sum(value for value in alone if value is not None)
            torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_clients_with_1_and_4_of_one_and_two_samples_give_3(order):
    values = {"a": 1.0, "b": 4.0}
    contents = {client: {"small": {"w": torch.full((2, 2), values[client])}} for client in order}
    mean = average(Replies.of(contents, samples={"a": 1, "b": 2}), "small")
    assert torch.equal(mean["w"], torch.full((2, 2), 3.0))


class Listener(Engine):
    """Hears everything that crosses."""

    def __init__(self, engine):
        self.engine, self.down, self.up = engine, [], []

    def run(self, requests):
        outcomes = self.engine.run(requests)
        self.down += [request.down for request in requests]
        self.up += [outcome.up for outcome in outcomes]
        return outcomes

    def examine(self, examinations):
        return self.engine.examine(examinations)

    def settle(self, round_, cohort, accepted):
        self.engine.settle(round_, cohort, accepted)


@pytest.fixture(scope="module")
def official(kit):
    """CNN-1, CNN-2 and CNN-5 clients on 32×32 images, the shared small model a CNN-5 with d1 = 100."""
    x = Rng(0).numpy().random((9, 3, 32, 32), dtype=np.float32)
    rows = {"a": range(0, 3), "b": range(3, 7), "c": range(7, 9)}
    options = {"name": "fedmrl", "d1": 100}
    training = {"batch_size": 4, "optimizer": {"lr": 0.01, "momentum": 0.9}}
    game = kit.Federation(
        options,
        ["cnn1", "cnn2", "cnn5"],
        rows,
        x=x,
        y=np.array([0, 1, 2, 3, 4, 5, 6, 7, 9]),
        training=training,
    )
    before = {client: game.state(client) for client in rows}
    heard = Listener(game.engine)
    cohort = game.round("a", "b", engine=heard)
    return game, before, heard, cohort


def test_465658_scalars_up_and_down_and_no_private_key(official):
    game, _, heard, cohort = official
    assert game.world.task.classes == 10
    lines = cohort.ledger.lines
    assert [(line["direction"], line["scalars"]) for line in lines] == [("down", 465_658)] * 2 + [
        ("up", 465_658)
    ] * 2
    assert all(line["names"] == {"small": 465_658} for line in lines)
    wire = {f"small/{name}" for name, _ in game.method.build_small(game.world.task).named_parameters()}
    assert len(heard.up) == len(heard.down) == 2
    for message in heard.up + heard.down:
        assert set(message) == wire
        assert message.scalars == 465_658


def test_only_what_was_sampled_changes(official):
    game, before, _, _ = official
    assert all(torch.equal(value, before["c"][name]) for name, value in game.state("c").items())
    moved = game.state("a")
    for name in ("model/conv1.weight", "model/head.weight", "projector/weight", "small/head.weight"):
        assert not torch.equal(moved[name], before["a"][name]), name
    assert game.engine.store.peek("c") is None


def test_the_server_holds_the_mean_of_what_came_up(official):
    game, _, heard, _ = official
    a, b = heard.up
    for name, value in game.server["small"].wire().items():
        expected = (3 * a[f"small/{name}"].double() + 4 * b[f"small/{name}"].double()) / 7
        torch.testing.assert_close(value.detach().double(), expected, atol=1e-6, rtol=0)


def test_a_round_is_three_plain_optimisers_with_a_clip_each(kit):
    """The official recipe: clip ω, θ and φ each on their own, then step; fresh momentum every round."""
    rows = {"a": range(0, 7), "b": range(7, 12)}
    training = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}}
    options = {"name": "fedmrl", "d1": 4, "small": kit.Narrow, "clip": 0.05}
    game = kit.Federation(options, kit.Shallow, rows, training=training)
    client = game.world.build_client("a")
    model, projector = client["model"].module, client["projector"].module
    small = client["small"].module
    for number in (1, 2):
        start = {
            name: value.detach().clone() for name, value in game.server["small"].module.state_dict().items()
        }
        small.load_state_dict(start)
        game.round("a", "b")
        parts = [model, small, projector]
        optimisers = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for part in parts
        ]
        for batch in game.steps("a", number):
            x, y = torch.tensor(game.x[batch]), torch.tensor(game.y[batch])
            fused = projector(torch.cat([small.features(x), model.features(x)], 1))
            loss = nn.functional.cross_entropy(small.head(fused[:, :4]), y)
            loss = loss + nn.functional.cross_entropy(model.head(fused), y)
            for part in parts:
                part.zero_grad()
            loss.backward()
            norms = [nn.utils.clip_grad_norm_(part.parameters(), 0.05) for part in parts]
            assert min(norms) > 0.05
            for optimiser in optimisers:
                optimiser.step()
    for name, part in (("model", model), ("projector", projector), ("small", small)):
        for key, value in part.named_parameters():
            np.testing.assert_allclose(
                game.part("a", name)[key], value.detach(), atol=1e-5, err_msg=f"{name}/{key}"
            )
