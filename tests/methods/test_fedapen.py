"""FedAPEN: both losses by hand, λ by a loop in NumPy, which rows it is learned on, and with which shared model."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from potluck.core.client import Client
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.methods.fedapen import FedAPEN, Mixture

TASK = Task("classification", 3, (2,))
PRIVATE, SHARED = (2.0, -1.0, 0.5), (0.0, 1.0, -0.5)
ROWS = {"a": range(0, 20), "b": range(20, 50), "c": range(50, 51)}
TRAINING = {"batch_size": 8, "epochs": 2, "optimizer": {"lr": 0.1}}


def tiny_client(kit, share):
    x, y = torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)
    client = Client(TASK, Source(x, y))
    mixture = Mixture()
    mixture.share.data.fill_(share)
    client.declare({"model": kit.Scores(*PRIVATE), "small": kit.Scores(*SHARED), "mixture": mixture})
    return client, Batch(x, y)


def method(**options):
    return FedAPEN(FedAPEN.Config(name="fedapen", **options))


def softmax(scores):
    shifted = np.exp(np.asarray(scores) - np.max(scores, axis=-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def kl(target, scores):
    p, q = softmax(target), softmax(scores)
    return float((p * np.log(p / q)).sum())


def mixed(share):
    return [share * one + (1 - share) * other for one, other in zip(PRIVATE, SHARED, strict=True)]


@pytest.mark.parametrize(("variant", "share"), [("fedapen", 0.9), ("equal_training", 0.5)])
def test_both_losses_by_hand(kit, variant, share):
    client, batch = tiny_client(kit, 0.9)
    terms = {name: value.item() for name, value in method(variant=variant).loss(client, batch).items()}
    ensemble = -math.log(softmax(mixed(share))[0])
    assert terms == pytest.approx(
        {
            "private": -math.log(softmax(PRIVATE)[0]) + kl(SHARED, PRIVATE),
            "shared": -math.log(softmax(SHARED)[0]) + kl(PRIVATE, SHARED),
            "private_in_ensemble": ensemble,
            "shared_in_ensemble": ensemble,
        },
        rel=1e-5,
    )


def test_learned_adaptive_trains_by_mutual_learning_alone(kit):
    client, batch = tiny_client(kit, 0.9)
    assert set(method(variant="learned_adaptive").loss(client, batch)) == {"private", "shared"}


def test_each_model_gets_gradient_from_its_own_loss_alone(kit):
    """σ(o_p) − y, σ(o_p) − σ(o_g), and λ·(σ(mixed) − y) for the private one; λ itself gets none."""
    client, batch = tiny_client(kit, 0.9)
    sum(method().loss(client, batch).values()).backward()
    y, own, other, both = np.eye(3)[0], softmax(PRIVATE), softmax(SHARED), softmax(mixed(0.9))
    np.testing.assert_allclose(
        client["model"].module.scores.grad.numpy(), own - y + own - other + 0.9 * (both - y), rtol=1e-4
    )
    np.testing.assert_allclose(
        client["small"].module.scores.grad.numpy(), other - y + other - own + 0.1 * (both - y), rtol=1e-4
    )
    assert client["mixture"].module.share.grad is None


def test_it_predicts_with_the_mixed_scores_and_not_with_mixed_probabilities(kit):
    client, batch = tiny_client(kit, 0.9)
    assert FedAPEN.modes == ("ensemble", "model", "small")
    expected = {"ensemble": mixed(0.9), "model": PRIVATE, "small": SHARED}
    for mode, scores in expected.items():
        np.testing.assert_allclose(method().predict(client, batch, mode)[0].detach(), scores, rtol=1e-6)


def game_of(kit, **options):
    return kit.Federation(
        {"name": "fedapen", "small": kit.Linear, **options}, kit.Linear, ROWS, training=TRAINING
    )


def divided(game, client):
    return game.method.divided(game.federation.clients.build_client(client))


def scores_of(state, x):
    weight, bias = (state[f"head.{name}"].double().numpy() for name in ("weight", "bias"))
    return x.astype(np.float64) @ weight.T + bias


@pytest.mark.parametrize("rate", [1e-3, 0.1, 300.0])
def test_the_share_is_learned_with_the_newest_shared_model_and_clipped_in_every_step(kit, rate):
    """Ten steps by hand: the share of a batch is one, as the held-out rows fit into one."""
    game = game_of(kit, mixture_lr=rate, held_out=0.2)
    game.round("a", "b")
    assert game.state("a")["mixture/share"].item() == 0.5  # nothing to learn with before the first average
    private, shared = game.part("a", "model"), game.server["small"].state()
    own_copy = game.part("a", "small")
    game.round("a")
    held, _ = divided(game, "a")
    assert len(held) == 4

    def learned(shared):
        x, y = game.x[held], np.eye(4)[game.y[held]]
        one, other = scores_of(private, x), scores_of(shared, x)
        share = 0.5
        for _ in range(10):
            slope = ((softmax(share * one + (1 - share) * other) - y) * (one - other)).sum(1).mean()
            share = float(np.clip(share - rate * slope, 0, 1))
        return share

    rounding = min(1e-2, 10 * rate * 1e-5)  # of ten slopes in float32
    assert game.state("a")["mixture/share"].item() == pytest.approx(learned(shared), abs=rounding)
    assert rate > 1 or abs(learned(own_copy) - learned(shared)) > 10 * rounding


def test_a_share_that_was_clipped_comes_back(kit):
    """A share clipped in the loss alone would have no gradient at the border and stay there."""
    game = game_of(kit)
    client = game.federation.clients.build_client("a")
    client.enter(2, game.rng("a", 2), {}, "train")
    client["begun"].value.fill_(1.0)
    client["mixture"].module.share.data.fill_(1.7)
    held, _ = divided(game, "a")
    scores = {part: client[part].module.head for part in ("model", "small")}
    for part, head in scores.items():
        nn.init.zeros_(head.weight)
        right = part == "small"
        head.bias.data.copy_(
            torch.bincount(torch.as_tensor(game.y[held]), minlength=4) * (1.0 if right else -1.0)
        )
    game.method.learn_mixture(client, held)
    assert 0 <= client["mixture"].module.share.item() < 1


def test_held_out_rows_are_the_same_in_every_round_and_nothing_else_is_trained_on_them(kit):
    game = game_of(kit)
    seen = {"loss": set(), "mixture_loss": set()}
    inner_losses = {name: getattr(game.method, name) for name in seen}
    for name, rows in seen.items():

        def watch(client, batch, inner=inner_losses[name], rows=rows, **scalars):
            rows.update(batch.id.tolist() if client.id == "b" else ())
            assert client["mixture"].module.training == (rows is seen["mixture_loss"])
            assert client["model"].training == (rows is seen["loss"])
            return inner(client, batch, **scalars)

        setattr(game.method, name, watch)
    for _ in range(3):
        game.round("a", "b")
    held, others = divided(game, "b")
    assert len(held) == 1  # a twentieth of 30, rounded down
    assert seen == {"loss": set(others.tolist()), "mixture_loss": set(held.tolist())}
    assert set(held.tolist()) | set(others.tolist()) == set(ROWS["b"])


def test_a_client_with_one_row_trains_on_it_and_keeps_the_equal_share(kit):
    game = game_of(kit)
    before = game.part("c", "model")
    for _ in range(2):
        assert not game.round("b", "c").failures
    assert game.state("c")["mixture/share"].item() == 0.5
    assert any(not torch.equal(before[name], value) for name, value in game.part("c", "model").items())


def test_the_share_survives_rounds_without_the_client(kit):
    game = game_of(kit, mixture_lr=1.0)
    game.round("a", "b")
    game.round("a", "b")
    share = game.state("a")["mixture/share"].clone()
    assert share.item() != 0.5
    game.round("b")
    assert torch.equal(game.state("a")["mixture/share"], share)
