"""FedL2G: the guided loss, the gradient of the quiz by finite differences, and the server's step by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.model import Model
from potluck.core.replies import Replies
from potluck.core.task import Batch
from potluck.errors import ConfigError

ROWS = {"a": range(0, 10), "b": range(10, 15)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 0, 1, 2, 2, 1, 1, 2, 3])  # a: 0 1 2; b: 1 2; nobody: 3
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def federation(kit, models=None, rows=ROWS, training=TRAINING, **options):
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((16, 3)).astype(np.float32)
    options = {"name": "fedl2g", "warm_up": 0} | options
    models = models or [kit.Shallow, kit.Deep][: len(rows)]
    return kit.Federation(options, models, rows, x=x, y=LABELS, training=training)


def entered(game, name="a", number=1):
    client = game.federation.clients.build_client(name)
    game.federation.clients.enter(client, number, {})
    client["guide"].load({"vectors": game.server["vectors"].value})
    return client


@pytest.mark.parametrize("space", ["logit", "feature"])
def test_loss_by_hand(kit, space):
    game = federation(kit, space=space)
    client = entered(game)
    vectors = game.server["vectors"].value
    batch = Batch(torch.tensor(game.x[:3]), torch.tensor([1, 0, 3]))
    terms = game.method.loss(client, batch)
    z = client["model"].features(batch.x)
    scores = client["model"].head(z)
    guided = scores if space == "logit" else z
    gaps = [((o - vectors[y]) ** 2).sum().item() / len(o) for o, y in zip(guided, batch.y, strict=True)]
    assert terms["guidance"].item() == pytest.approx(sum(gaps) / 3, rel=1e-5)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(scores, batch.y))


def quiz_after_a_step(game, client, vectors, study, quiz, rate):
    """The quiz loss of a fresh copy of the model after one plain step of SGD with these vectors."""
    model = game.federation.population.build_model(client).double()
    model.load_state_dict({name: value.double() for name, value in game.part(client, "model").items()})
    x, y = torch.tensor(game.x[study]).double(), torch.tensor(game.y[study])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    z = model.features(x)
    guided = z if vectors.shape[1] == z.shape[1] else model.head(z)
    (F.cross_entropy(model.head(z), y) + F.mse_loss(guided, vectors[y])).backward()
    optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(torch.tensor(game.x[quiz]).double()), torch.tensor(game.y[quiz])).item()


@pytest.mark.parametrize("space", ["logit", "feature"])
def test_the_gradient_is_that_of_the_quiz_after_one_step(kit, space):
    """Each number of V a little up and down, the step and the quiz played again."""
    game = federation(kit, space=space, quiz=2, warm_up=9, training=TRAINING | {"lr_decay": 0.5})
    client = entered(game, number=2)
    before = {name: value.clone() for name, value in client["model"].tensors().items()}
    up = game.method.train(client)
    assert all(torch.equal(value, before[name]) for name, value in client["model"].tensors().items())
    rows, quiz = game.method.held_out(client)
    study = client.rng.child("study batch").numpy().permutation(rows)[:3]
    vectors = game.server["vectors"].value.double()
    for row, label in enumerate(up["classes"].tolist()):
        assert up["counts"][row] == (game.y[study] == label).sum()
        for column in range(vectors.shape[1]):
            ends = []
            for sign in (1, -1):
                moved = vectors.clone()
                moved[label, column] += sign * 1e-4
                ends.append(quiz_after_a_step(game, "a", moved, study, quiz, rate=0.2 * 0.5))
            slope = (ends[0] - ends[1]) / 2e-4
            assert up["gradients"][row, column].item() == pytest.approx(slope, abs=1e-5, rel=1e-3)
    assert up["gradients"].abs().max() > 1e-4


def test_two_rounds_against_a_plain_loop(kit):
    game = federation(kit, warm_up=1, server_lr=0.5)
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    start = game.server["vectors"].value.clone()
    game.round(*ROWS)
    for client, model in models.items():  # the warm-up trains no model
        assert all(
            torch.equal(game.part(client, "model")[name], value) for name, value in model.named_parameters()
        )
    vectors = game.server["vectors"].value.clone()
    assert not torch.equal(vectors, start)
    assert torch.equal(vectors[3], start[3])  # nobody holds class 3
    game.round(*ROWS)
    for name, model in models.items():
        client = entered(game, name, 2)
        rows, _ = game.method.held_out(client)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for epoch in range(2):
            order = client.rng.child("study").child("epoch", epoch).numpy().permutation(rows)
            for batch in (order[begin : begin + 3] for begin in range(0, len(order), 3)):
                if len(batch) == 1:
                    continue
                x, y = torch.tensor(game.x[batch]), torch.tensor(game.y[batch])
                scores = model(x)
                optimizer.zero_grad()
                (F.cross_entropy(scores, y) + F.mse_loss(scores, vectors[y])).backward()
                optimizer.step()
        for key, value in model.named_parameters():
            torch.testing.assert_close(game.part(name, "model")[key], value.detach(), atol=1e-5, rtol=0)


def test_the_quiz_is_never_trained_on_and_stays_the_same(kit, monkeypatch):
    game, seen = federation(kit), []
    original = game.method.loss
    monkeypatch.setattr(
        game.method, "loss", lambda client, batch: seen.append(batch.id) or original(client, batch)
    )
    client = entered(game)
    quiz = set(game.method.held_out(client)[1].tolist())
    for number in (1, 2, 3):
        game.federation.clients.enter(client, number, {})
        assert set(game.method.held_out(client)[1].tolist()) == quiz
        game.method.train(client)
    assert len(quiz) == 3
    assert set(torch.cat(seen).tolist()) == set(range(10)) - quiz


@pytest.mark.parametrize(("samples", "held"), [(0, 0), (1, 0), (2, 1), (5, 2), (6, 3), (10, 3)])
def test_at_most_half_of_the_samples_are_held_out(kit, samples, held):
    game = federation(kit, rows={"a": range(samples), "b": range(10, 15)}, models=[kit.Normed, kit.Normed])
    client = entered(game)
    rows, quiz = game.method.held_out(client)
    assert (len(rows), len(quiz)) == (samples - held, held)
    up = game.method.train(client)
    assert bool(up["counts"].sum() > 0) == bool(held)
    assert up["gradients"].isfinite().all()
    assert not game.round(*(("a", "b") if samples else ("b",))).failures


def test_batch_norm_keeps_its_statistics_in_the_study(kit):
    game = federation(kit, models=[kit.Normed, kit.Normed], warm_up=1)
    client = entered(game)
    before = {name: value.clone() for name, value in client["model"].tensors().items()}
    game.method.train(client)
    assert all(torch.equal(value, before[name]) for name, value in client["model"].tensors().items())
    assert not client["model"].norm.training


class Attentive(Model):
    """Attention and a recurrent layer over the numbers of a sample."""

    def __init__(self, task):
        super().__init__()
        self.rep_dim = 4
        self.spread = nn.Linear(1, 4)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.memory = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, task.classes)

    def features(self, x):
        return self.memory(self.attention(self.spread(x.unsqueeze(2))))[0][:, -1]


def test_attention_and_recurrent_layers_have_a_second_derivative(kit):
    game = federation(kit, models=[Attentive, Attentive], warm_up=1)
    assert not game.round(*ROWS).failures
    up = game.method.train(entered(game))
    assert up["gradients"].abs().max() > 0


def test_what_crosses(kit):
    lines = federation(kit).round(*ROWS).ledger.lines
    sizes = {(line["client"], line["direction"]): line["names"] for line in lines if line["names"]}
    assert sizes["a", "down"] == {"vectors": 4 * 4}
    assert sizes["a", "up"] == {"gradients": 3 * 4, "classes": 3, "counts": 3}


def reply(rows, classes, counts):
    return {"gradients": torch.tensor(rows), "classes": torch.tensor(classes), "counts": torch.tensor(counts)}


def improved(kit, *replies, **options):
    game = federation(kit, server_lr=0.5, **options)
    game.server["vectors"].value.zero_()
    named = dict(zip("abc", replies, strict=False))
    game.method.improve(game.server, Replies.of(named, samples=dict.fromkeys(named, 1)))
    return game.server["vectors"].value


def test_the_mean_is_over_the_senders_of_a_class(kit):
    one = reply([[2.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]], [0, 1], [1.0, 2.0])
    two = reply([[6.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]], [1, 2], [1.0, 0.0])  # nothing of class 2
    found = improved(kit, one, two)
    assert found[:, 0].tolist() == pytest.approx([-1.0, -2.5, 0.0, 0.0])
    assert not found[:, 1:].any()


def test_the_step_is_clipped_as_a_whole(kit):
    found = improved(kit, reply([[30.0, 0, 0, 0], [40.0, 0, 0, 0]], [0, 1], [1.0, 1.0]), clip=5.0)
    assert found[:, 0].tolist() == pytest.approx([-0.5 * 3, -0.5 * 4, 0.0, 0.0])


@pytest.mark.parametrize(
    "lies",
    [
        [reply([[3e38] * 4], [0], [1.0])] * 2,
        [reply([[3e38, -3e38, 1.0, 0.0]], [0], [1.0])],
        [reply([[1.0] * 4], [0], [0.0])],
    ],
)
def test_no_upload_spoils_the_vectors(kit, lies):
    found = improved(kit, *lies)
    assert found.isfinite().all()
    assert found.norm() <= 0.5 * 100 * 1.001


def test_features_must_have_one_width(kit):
    with pytest.raises(ConfigError, match=r"one representation width, .* has 4.*take method.space: logit"):
        federation(kit, models=[kit.Shallow, kit.Narrow], space="feature")
    assert not federation(kit, models=[kit.Shallow, kit.Narrow]).round(*ROWS).failures


def test_the_warm_up_is_said(kit):
    game = federation(kit, warm_up=7)
    assert "in the first 7 rounds" in " ".join(game.method.advice(game.federation.population))
    assert not [*federation(kit).method.advice(game.federation.population)]
