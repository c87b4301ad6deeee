"""FML: both losses by hand, targets without gradient, a mean of all alike, and FML without mutual learning."""

import math

import numpy as np
import pytest
import torch

from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError, ModelError
from potluck.kit.mutual import learn_from
from potluck.methods.fml import FML

TASK = Task("classification", 3, (2,))
ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 21)}
TRAINING = {"batch_size": 3, "epochs": 2, "optimizer": {"lr": 0.1, "momentum": 0.9}}


def client_with(kit, private, small, samples=2):
    x, y = torch.zeros(samples, 2), torch.zeros(samples, dtype=torch.long)
    client = Client(TASK, Source(x, y))
    client.declare({"model": kit.Scores(*private), "small": kit.Scores(*small)})
    return client, Batch(x, y)


def log_softmax(scores):
    total = math.log(sum(math.exp(one) for one in scores))
    return [one - total for one in scores]


def kl(target, scores):
    """KL(σ(target) ‖ σ(scores)) of one sample, in plain Python."""
    p, q = log_softmax(target), log_softmax(scores)
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


PRIVATE, MEME = (2.0, -1.0, 0.5), (0.0, 1.0, -0.5)


def test_both_losses_by_hand(kit):
    client, batch = client_with(kit, PRIVATE, MEME)
    method = FML(FML.Config(name="fml", alpha=0.25, beta=0.8))
    terms = {name: value.item() for name, value in method.loss(client, batch).items()}
    assert terms == pytest.approx(
        {
            "private": -0.25 * log_softmax(PRIVATE)[0],
            "private_from_meme": 0.75 * kl(MEME, PRIVATE),
            "meme": -0.8 * log_softmax(MEME)[0],
            "meme_from_private": 0.2 * kl(PRIVATE, MEME),
        },
        rel=1e-5,
    )


def test_no_gradient_reaches_a_target(kit):
    """d/do KL(p‖σ(o)) = σ(o) − p. Through an undetached target the other model would be moved as well."""
    client, batch = client_with(kit, PRIVATE, MEME)
    method = FML(FML.Config(name="fml", alpha=0.0, beta=0.0))
    sum(method.loss(client, batch).values()).backward()
    probability = {
        part: np.exp(log_softmax(scores)) for part, scores in (("model", PRIVATE), ("small", MEME))
    }
    for part, other in (("model", "small"), ("small", "model")):
        expected = probability[part] - probability[other]
        np.testing.assert_allclose(client[part].module.scores.grad.numpy(), expected, rtol=1e-5)


def test_the_divergence_is_summed_over_classes_and_averaged_over_samples():
    """The mean over classes, as in HtFLlib, would be a third of this; the sum over samples three times."""
    scores, target = (torch.tensor([one] * 3) for one in (PRIVATE, MEME))
    batch = Batch(torch.zeros(3, 1), torch.zeros(3))
    assert learn_from(scores, target, batch).item() == pytest.approx(kl(MEME, PRIVATE), rel=1e-5)
    weighted = Batch(torch.zeros(3, 1), torch.zeros(3), weight=torch.tensor([1.0, 0.0, 0.0]))
    scores[1:] = 50.0 * torch.arange(3)
    assert learn_from(scores, target, weighted).item() == pytest.approx(kl(MEME, PRIVATE), rel=1e-5)


def test_the_server_takes_the_plain_mean_with_batch_norm_statistics(kit):
    game = kit.Federation({"name": "fml", "small": kit.Normed}, kit.Deep, ROWS, training=TRAINING)
    heard = {}
    inner = game.engine.run

    def run(requests):
        outcomes = inner(requests)
        heard.update({one.client: one.up.group("small") for one in outcomes})
        return outcomes

    game.engine.run = run
    cohort = game.round("a", "b", "c")
    found = game.server["small"].state()
    assert "norm.running_var" in found
    for name, value in found.items():
        expected = np.mean([heard[client][name].double().numpy() for client in ROWS], axis=0)
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5, atol=1e-7)
    size = sum(value.numel() for value in found.values())
    assert {(line["direction"], line["scalars"]) for line in cohort.ledger.lines} == {
        ("up", size),
        ("down", size),
    }


@pytest.mark.parametrize("private", ["Deep", "Normed"])
def test_without_mutual_learning_it_is_local_beside_fedavg_of_the_small_model(kit, private):
    """Conditions: the same first small model, the same batches (no single sample is left over), uniform weights."""
    model = getattr(kit, private)
    rows = {client: part for client, part in ROWS.items() if client != "a"}
    training = TRAINING | {"batch_size": 4, "last_batch": "drop"}
    options = {"name": "fml", "alpha": 1.0, "beta": 1.0, "small": kit.Shallow}
    both = kit.Federation(options, model, rows, training=training)
    local = kit.Federation("local", model, rows, training=training)
    fedavg = kit.Federation({"name": "fedavg", "weights": "uniform"}, kit.Shallow, rows, training=training)
    first = dict(fedavg.initial("b"))
    both.server["small"].load(first)
    for cohort in (("b", "c"), ("c",), ("b", "c")):
        for game in (both, local, fedavg):
            game.round(*cohort)
    for client in rows:
        for name, value in local.part(client, "model").items():
            assert torch.equal(both.part(client, "model")[name], value), name
        for name, value in fedavg.part(client, "model").items():
            assert torch.equal(both.part(client, "small")[name], value), name
    averaged = Message(fedavg.method.downlink(fedavg.server, "b")).group("model")
    for name, value in both.server["small"].state().items():
        assert torch.equal(averaged[name], value), name


def test_both_models_are_in_training_mode_on_the_same_batch(kit):
    game = kit.Federation({"name": "fml", "small": kit.Normed}, kit.Normed, ROWS, training=TRAINING)
    inner, seen = game.method.loss, []

    def loss(client, batch):
        seen.append((client["model"].training, client["small"].training))
        return inner(client, batch)

    game.method.loss = loss
    game.round("c")
    assert seen == [(True, True)] * 6


def test_the_modes_are_the_two_models(kit):
    client, batch = client_with(kit, PRIVATE, MEME)
    assert FML.modes[0] == "model"
    method = FML(FML.Config(name="fml"))
    assert method.predict(client, batch, "model")[0].tolist() == list(PRIVATE)
    assert method.predict(client, batch, "small")[0].tolist() == list(MEME)


def test_the_small_model_may_have_a_rate_of_its_own(kit):
    """One step of plain gradient descent on the labels alone moves it in proportion to the rate."""
    moved = []
    for rate in (None, 0.05):
        options = {"name": "fml", "small": kit.Linear, "beta": 1.0, "small_lr": rate}
        training = {"batch_size": 9, "optimizer": {"lr": 0.1}}
        game = kit.Federation(options, kit.Shallow, ROWS, training=training)
        start = game.server["small"].state()
        game.round("c")
        moved.append({name: value - start[name] for name, value in game.part("c", "small").items()})
    for name, value in moved[0].items():
        torch.testing.assert_close(moved[1][name], value / 2, rtol=1e-4, atol=1e-7)


def test_bad_input_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match="alpha"):
        FML.Config(name="fml", alpha=1.5)
    with pytest.raises(ConfigError, match="name the small model"):
        FML().build_small(TASK)


def test_a_small_model_that_learns_nothing_or_does_not_fit_is_refused_at_the_start(kit):
    class Frozen(kit.Linear):
        def __init__(self, task):
            super().__init__(task)
            self.requires_grad_(False)

    with pytest.raises(ConfigError, match=r"\(Frozen\) has no parameters that are trained.*use local"):
        kit.Federation({"name": "fml", "small": Frozen}, kit.Shallow, ROWS)
    with pytest.raises(ModelError, match=r"method\.small"):
        kit.Federation({"name": "fml", "small": "conv-small"}, kit.Shallow, ROWS)


def test_at_alpha_1_it_says_that_nothing_is_learned_from_others(kit):
    game = kit.Federation({"name": "fml", "alpha": 1.0}, kit.Shallow, ROWS)
    assert "those of local" in " ".join(game.method.advice(game.federation.population))
    game = kit.Federation("fml", kit.Shallow, ROWS)
    assert not [*game.method.advice(game.federation.population)]
