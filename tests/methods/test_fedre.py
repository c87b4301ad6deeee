"""FedRE: the mixtures, the labels, the head's training and what crosses, by hand."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import potluck
from potluck.core.client import Client
from potluck.core.model import Model
from potluck.core.rng import Rng
from potluck.core.server import Server
from potluck.core.streams import Source, shuffled_batches
from potluck.core.task import Batch, Task
from potluck.data import from_arrays
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.methods.fedre import FedRE
from potluck.methods.fedre_variants import coarsened, disturbed, draw_weights

MECHANISMS = ["RAP", "VAP", "RSP", "RAR", "VAR", "RSR"]


class Bare(Model):
    """The features are the sample."""

    rep_dim = 2

    def __init__(self, classes=3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(2, classes)

    def features(self, x):
        return x * self.scale


def fedre(**options):
    return FedRE(FedRE.Config(name="fedre", **options))


def alone(method, x, y, classes=3, round_=1, secret=7):
    """One client that is about to send."""
    x, y = torch.tensor(x), torch.tensor(y)
    client = Client(Task("classification", classes, (2,)), Source(x, y))
    client.declare(method.client_state(client.task, Bare(classes)))
    client.rows = {"train": np.arange(len(x))}
    client.classes_held = tuple(sorted(set(y.tolist())))
    client.secret = Rng(secret)
    client.enter(round_, Rng(0), {}, "train")
    return client


# Means (1, 0) of class 0 and (0, 2) of class 2; nothing of class 1.
X = [[0.5, -1.0], [1.5, 1.0], [0.0, 3.0], [0.0, 1.0], [0.0, 2.0]]
Y = [0, 0, 2, 2, 2]


class TestMixture:
    """Tiny checks 1 and 3 of the specification."""

    def test_means_and_labels_are_mixed_with_the_same_weights(self, monkeypatch):
        method = fedre()
        monkeypatch.setattr(method, "unit_weights", lambda client, units: torch.tensor([0.25, 0.75]))
        up = method.upload(alone(method, X, Y))
        torch.testing.assert_close(up["representation"], torch.tensor([0.25, 1.5]))
        torch.testing.assert_close(up["label"], torch.tensor([0.25, 0.0, 0.75]))
        assert up["label"][1] == 0

    @pytest.mark.parametrize(
        ("mechanism", "weights"),
        [(mechanism, "uniform") for mechanism in MECHANISMS]
        + [(mechanism, weights) for mechanism in ("RAR", "RAP") for weights in ("gaussian", "laplace")],
    )
    def test_weights_are_a_mixture_over_the_classes_held(self, mechanism, weights):
        method = fedre(mechanism=mechanism, weights=weights)
        client = alone(method, X, Y)
        w = method.sample_weights(client, torch.tensor(Y))
        assert (w >= 0).all()
        torch.testing.assert_close(w.sum(), torch.tensor(1.0))
        client.counters.clear()
        label = method.upload(client)["label"]
        torch.testing.assert_close(label, torch.stack([w[:2].sum(), torch.tensor(0.0), w[2:].sum()]))

    def test_equal_weights(self):
        samples = fedre(mechanism="VAR")
        up = samples.upload(alone(samples, X, Y))
        torch.testing.assert_close(up["representation"], torch.tensor(X).mean(0))
        torch.testing.assert_close(up["label"], torch.tensor([0.4, 0.0, 0.6]))
        means = fedre(mechanism="VAP")
        up = means.upload(alone(means, X, Y))
        torch.testing.assert_close(up["representation"], torch.tensor([0.5, 1.0]))
        torch.testing.assert_close(up["label"], torch.tensor([0.5, 0.0, 0.5]))

    def test_a_single_unit_is_one_of_them(self):
        """Over rounds every unit is chosen, and its label is one-hot."""
        samples, means = fedre(mechanism="RSR"), fedre(mechanism="RSP")
        for method, units, labels in (
            (samples, torch.tensor(X), Y),
            (means, torch.tensor([[1.0, 0.0], [0.0, 2.0]]), [0, 2]),
        ):
            chosen = set()
            for round_ in range(40):
                up = method.upload(alone(method, X, Y, round_=round_))
                distances = (units - up["representation"]).norm(dim=1)
                unit = int(distances.argmin())
                assert distances[unit] < 1e-6
                torch.testing.assert_close(up["label"], F.one_hot(torch.tensor(labels[unit]), 3).float())
                chosen.add(unit)
            assert chosen == set(range(len(units)))

    def test_with_one_sample_per_class_means_are_samples(self):
        x, y = [[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]], [0, 1, 2]
        sent = [
            method.upload(alone(method, x, y)) for method in (fedre(mechanism="RAP"), fedre(mechanism="RAR"))
        ]
        for name in ("representation", "label"):
            torch.testing.assert_close(sent[0][name], sent[1][name])

    @pytest.mark.parametrize("mechanism", ["RAP", "VAP", "RSP"])
    @pytest.mark.parametrize("round_", [1, 2])
    def test_a_client_with_one_class_sends_its_mean(self, mechanism, round_):
        method = fedre(mechanism=mechanism)
        up = method.upload(alone(method, X[2:], Y[2:], round_=round_))
        torch.testing.assert_close(up["representation"], torch.tensor([0.0, 2.0]))
        torch.testing.assert_close(up["label"], torch.tensor([0.0, 0.0, 1.0]))

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_a_client_with_one_sample_sends_it(self, mechanism):
        method = fedre(mechanism=mechanism)
        up = method.upload(alone(method, X[:1], Y[:1]))
        torch.testing.assert_close(up["representation"], torch.tensor(X[0]))
        assert up["label"].tolist() == [1.0, 0.0, 0.0]

    @pytest.mark.parametrize("mechanism", ["VAP", "RAP"])
    def test_the_order_of_samples_plays_no_part(self, mechanism):
        method = fedre(mechanism=mechanism)
        turned = method.upload(alone(method, X[::-1], Y[::-1]))
        for name, value in method.upload(alone(method, X, Y)).items():
            torch.testing.assert_close(turned[name], value)

    def test_nothing_is_differentiated(self):
        """After the upload no parameter has a gradient, and none could be had from what is sent."""
        method = fedre()
        client = alone(method, X, Y)
        up = method.upload(client)
        assert not any(value.requires_grad for value in up.values())
        assert all(value.grad is None for value in client["model"].module.parameters())
        assert not client["model"].module.training

    def test_random_weights_are_private(self):
        """Another secret gives other weights, another public seed does not."""
        method = fedre()
        one, same, other = (alone(method, X, Y, secret=secret) for secret in (7, 7, 8))
        same.enter(1, Rng(99), {}, "train")
        first = method.upload(one)["label"]
        assert torch.equal(method.upload(same)["label"], first)
        assert not torch.allclose(method.upload(other)["label"], first, atol=1e-3)


@pytest.mark.parametrize(
    ("weights", "moment"), [("uniform", 4 / 3), ("gaussian", math.pi / 2), ("laplace", 2.0)]
)
def test_distributions_by_their_second_moment(weights, moment):
    """E[u²]/E[u]²: 4/3 for U(0,1), π/2 for |N(0,1)|, 2 for |Laplace(0,1)|."""
    w = draw_weights(alone(fedre(), X, Y), 40_000, "RAP", weights) * 40_000
    assert (w > 0).all()
    assert w.mean().item() == pytest.approx(1.0, abs=1e-3)
    assert w.square().mean().item() == pytest.approx(moment, rel=0.03)


class TestKeptWeights:
    @pytest.mark.parametrize("mechanism", ["RAP", "RAR", "RSR"])
    def test_fixed_weights_stay_and_drawn_ones_do_not(self, kit, mechanism):
        for fixed in (False, True):
            game, sent = federation(kit, mechanism=mechanism, fixed=fixed)
            for _ in range(4):
                game.round("a", "b")
            for client in ("a", "b"):
                labels = [message["label"] for message in sent[client]]
                changed = any(not torch.allclose(label, labels[0], atol=1e-4) for label in labels)
                assert changed is not fixed

    def test_they_are_state_and_survive_a_round_away(self, kit):
        game, sent = federation(kit, fixed=True)
        game.round("a", "b")
        kept = game.part("a", "mixing")["weights"]
        game.round("b")
        game.round("a", "b")
        assert torch.equal(game.part("a", "mixing")["weights"], kept)
        assert kept.shape == (3,)
        assert game.part("b", "mixing")["weights"].shape == (2,)
        torch.testing.assert_close(sent["a"][0]["label"], sent["a"][1]["label"])


ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 3, 2, 2, 1, 1, 2])  # a holds 0, 1, 3; b holds 1, 2
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def federation(kit, models=None, name="fedre", training=TRAINING, **options):
    """Two clients of different models; what each sends is noted."""
    models = models or [kit.Shallow, kit.Deep]
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((12, 3)).astype(np.float32)
    game = kit.Federation(
        {"name": name, **options}, models, ROWS, x=x, y=LABELS, training=training, test=range(12)
    )
    sent = {client: [] for client in ROWS}
    inner = game.engine.run

    def run(requests):
        answers = inner(requests)
        for answer in answers:
            sent[answer.client].append(answer.up)
        return answers

    game.engine.run = run
    return game, sent


def server_with(weight, bias, **options):
    method = fedre(**options)
    server = Server(Task("classification", 3, (2,)), {})
    head = nn.Linear(2, 3)
    server.declare({"head": head}, remember=True)
    server["head"].load({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
    server.enter(1, Rng(0), {}, "round")
    return method, server


class TestHead:
    """Tiny check 2 of the specification."""

    x, y = torch.tensor([[0.25, 1.5]]), torch.tensor([[0.25, 0.0, 0.75]])

    def test_soft_cross_entropy(self):
        method, server = server_with([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [0.0, 0.0, 0.0])
        scores = server["head"](self.x)
        torch.testing.assert_close(scores, torch.tensor([[0.25, 1.5, 1.75]]))
        value = method.head_loss(server, Batch(self.x, self.y))
        assert value.item() == pytest.approx(1.069112, abs=2e-5)
        by_class = sum(
            w * F.cross_entropy(scores, torch.tensor([c])) for c, w in enumerate(self.y[0].tolist())
        )
        torch.testing.assert_close(value, by_class)
        (gradient,) = torch.autograd.grad(
            F.cross_entropy(leaf := scores.detach().requires_grad_(), self.y), leaf
        )
        expected = torch.tensor([[-0.138543, 0.389025, -0.250482]])
        torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=0)

    def test_a_head_of_zeros_is_at_the_entropy_of_a_coin(self):
        method, server = server_with([[0.0, 0.0]] * 3, [0.0] * 3)
        assert method.head_loss(server, Batch(self.x, self.y)).item() == pytest.approx(math.log(3), abs=1e-5)

    def test_one_step_moves_the_head_along_the_residual(self):
        """W ← W − η (softmax − ỹ) r̃ᵀ, b ← b − η (softmax − ỹ)."""
        weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        method, server = server_with(weight.tolist(), [0.0] * 3, server_lr=0.1)
        method.train_head(server, self.x, self.y)
        residual = torch.tensor([-0.138543, 0.389025, -0.250482])
        moved = server["head"].state()
        torch.testing.assert_close(moved["bias"], -0.1 * residual, atol=1e-5, rtol=0)
        expected = weight - 0.1 * residual.outer(self.x[0])
        torch.testing.assert_close(moved["weight"], expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    @pytest.mark.parametrize("epochs", [1, 3])
    def test_training_is_plain_sgd_over_shuffled_uploads(self, reduction, epochs):
        draw = Rng(3).generator()
        x = torch.randn(7, 2, generator=draw)
        y = torch.rand(7, 3, generator=draw)
        y = y / y.sum(1, keepdim=True)
        options = {"server_batch": 3, "server_epochs": epochs, "server_loss": reduction, "server_lr": 0.05}
        method, server = server_with([[0.1, 0.2], [0.3, -0.1], [0.0, 0.5]], [0.1, 0.0, -0.1], **options)
        plain = nn.Linear(2, 3)
        plain.load_state_dict(server["head"].state())
        method.train_head(server, x, y)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        order = shuffled_batches(np.arange(7), 3, epochs, "keep", Rng(0).child("uploads"))
        assert len(order) == 3 * epochs
        for rows in order:
            optimizer.zero_grad()
            loss = -(y[rows] * plain(x[rows]).log_softmax(1)).sum(1)
            (loss.sum() if reduction == "sum" else loss.mean()).backward()
            optimizer.step()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(server["head"].state()[name], value)

    def test_schedule_and_clipping_of_the_clients_are_not_the_servers(self, kit):
        changed = TRAINING | {"lr_decay": 0.1, "clip": 1e-3}
        game, _ = federation(kit, training=changed)
        assert (game.server.training.clip, game.server.training.lr_decay) == (None, 1.0)
        assert game.federation.clients.client_training("a").clip == 1e-3


class TestRound:
    def test_the_head_is_trained_on_what_came_up(self, kit):
        game, sent = federation(kit)
        before = nn.Linear(6, 4)
        before.load_state_dict(game.server["head"].state())
        game.round("a", "b")
        messages = [sent[client][0] for client in ("a", "b")]
        x = torch.stack([message["representation"] for message in messages])
        y = torch.stack([message["label"] for message in messages])
        loss = -(y * before(x).log_softmax(1)).sum()
        gradients = torch.autograd.grad(loss, list(before.parameters()))
        after = game.server["head"].state()
        for (name, value), gradient in zip(before.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(after[name], value.detach() - 0.01 * gradient)

    def test_every_round_begins_with_the_newest_head(self, kit):
        """Also the second: what the server sends must be what it trained last."""
        game, _ = federation(kit)
        seen = []
        inner = game.method.receive

        def receive(client, down):
            inner(client, down)
            seen.append({name: value.clone() for name, value in client["model/head"].state().items()})

        game.method.receive = receive
        heads = []
        for _ in range(2):
            heads.append({name: value.clone() for name, value in game.server["head"].wire().items()})
            game.round("a", "b")
        assert len(seen) == 4
        for number, found in enumerate(seen):
            for name, value in heads[number // 2].items():
                assert torch.equal(found[name], value)
        assert not torch.equal(heads[0]["weight"], heads[1]["weight"])

    def test_extractors_differ_and_heads_train_locally(self, kit):
        game, _ = federation(kit, models=kit.Shallow)
        start = game.server["head"].state()
        game.round("a", "b")
        a, b = (game.part(client, "model") for client in ROWS)
        assert not torch.equal(a["fc1.weight"], b["fc1.weight"])
        assert not torch.equal(a["head.weight"], start["weight"])
        assert not torch.equal(a["head.weight"], b["head.weight"])

    def test_the_uploaded_mixture_is_of_the_trained_model_in_evaluation_mode(self, kit):
        game, sent = federation(kit, models=kit.Normed, mechanism="VAR")
        game.round("a", "b")
        for client in ROWS:
            model = game.federation.population.build_model(client)
            model.load_state_dict(
                {name: game.part(client, "model")[name] for name in model.state_dict()}, strict=True
            )
            rows = game.rows[client]
            expected = model.eval().features(torch.tensor(game.x[rows])).mean(0)
            torch.testing.assert_close(sent[client][0]["representation"], expected)
            counts = np.bincount(LABELS[rows], minlength=4) / len(rows)
            torch.testing.assert_close(sent[client][0]["label"], torch.tensor(counts, dtype=torch.float32))

    def test_a_client_that_sits_out_contributes_nothing(self, kit):
        game, _ = federation(kit)
        game.round("a", "b")
        other, _ = federation(kit)
        other.round("b")
        assert not torch.equal(game.server["head"].state()["weight"], other.server["head"].state()["weight"])
        assert [line["client"] for line in other.round("b").ledger.lines] == ["b", "b"]

    def test_a_head_that_grows_without_bound_is_told_by_its_own_rate(self, kit):
        game, _ = federation(kit, server_lr=1e38)
        *_, last = (game.round("a", "b") for _ in range(3))
        assert "not finite; lower training.optimizer.lr or method.server_lr" in last.failures["a"]


class TestMitigations:
    def test_noise_has_the_asked_level(self):
        x = torch.randn(20_000, generator=Rng(1).generator()) * 3
        shift = disturbed(alone(fedre(), X, Y), x, 0.5) - x
        assert shift.std().item() == pytest.approx(0.5 * x.std().item(), rel=0.03)

    def test_noise_is_private_and_leaves_the_label(self):
        plain, noisy = fedre(), fedre(noise=1.0)
        one, other = (noisy.upload(alone(noisy, X, Y, secret=secret)) for secret in (7, 8))
        clean = plain.upload(alone(plain, X, Y))
        assert torch.equal(one["label"], clean["label"])
        assert not torch.allclose(one["representation"], clean["representation"])
        assert not torch.allclose(one["representation"], other["representation"])

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(sum), st.integers(1, 9))
    def test_coarse_labels(self, parts, levels):
        exact = torch.tensor(parts, dtype=torch.float32)
        exact = exact / exact.sum()
        found = coarsened(exact, levels)
        torch.testing.assert_close(found.sum(), torch.tensor(1.0))
        torch.testing.assert_close(found * levels, (found * levels).round())
        assert ((found - exact).abs() < 1 / levels + 1e-5).all()
        assert (found[exact == 0] == 0).all()

    def test_coarse_label_by_hand(self):
        """Three times 0.2, 0.35, 0.45 is 0.6, 1.05, 1.35: one third is left over and goes to the first."""
        found = coarsened(torch.tensor([0.2, 0.35, 0.45]), 3)
        torch.testing.assert_close(found, torch.tensor([1 / 3, 1 / 3, 1 / 3]))
        assert coarsened(torch.tensor([0.2, 0.35, 0.45]), 1).tolist() == [0.0, 0.0, 1.0]

    def test_a_coarse_label_is_sent(self, kit):
        game, sent = federation(kit, levels=2)
        game.round("a", "b")
        for client in ROWS:
            assert set((sent[client][0]["label"] * 2).tolist()) <= {0.0, 1.0, 2.0}


class Wide(Model):
    """512 features."""

    rep_dim = 512

    def __init__(self, task):
        super().__init__()
        self.fc = nn.Linear(task.input[0], 512)
        self.head = nn.Linear(512, task.classes)

    def features(self, x):
        return self.fc(x)


def ten_clients(kit, method, classes=100):
    """Ten clients, 502 classes held in all, d = 512, C = 100: the sizes of the paper's table."""
    held = [50] * 8 + [51, 51]
    y, rows, start = [], {}, 0
    for client, count in enumerate(held):
        y += [(client * 50 + place) % classes for place in range(count)]
        rows[str(client)] = range(start, start + count)
        start += count
    x = np.zeros((len(y), 3), dtype=np.float32)
    game = kit.Federation(method, Wide, rows, x=x, y=np.array(y))
    return game, game.round(*rows).ledger.lines


def crossed(lines, direction, name=None):
    chosen = [line for line in lines if line["direction"] == direction]
    return sum(line["scalars"] if name is None else line["names"][name] for line in chosen)


def test_sizes_of_the_paper(kit):
    """512 + 100 up and 51,300 down a client; 5.12 K and 513.00 K over ten clients without the labels."""
    game, lines = ten_clients(kit, "fedre")
    assert crossed(lines, "up", "representation") == 5_120
    assert crossed(lines, "up") == 10 * 612
    assert crossed(lines, "down") == 513_000
    explained = explain(game.federation)
    assert (explained["up_scalars"], explained["down_scalars"]) == (612, 51_300)
    (step,) = explained["steps"]
    assert [(entry["name"], entry["scalars"]) for entry in step["down"]] == [("head", 51_300)]
    assert step["down"][0]["shape"] == "all of 'model/head': 2 tensors"
    assert explained["server_needs"] == "head"


class TestBadInput:
    def test_heads_of_different_shape(self, kit):
        with pytest.raises(ConfigError) as caught:
            federation(kit, models=[kit.Shallow, kit.Narrow])
        assert str(caught.value) == (
            "fedre: the head of client b (Narrow) is weight 4×4, bias 4, that of client a (Shallow) is weight 4×6, "
            "bias 4; set models.rep_dim to one width for all (models: {pool: […], rep_dim: 4}; in Python "
            "models={'pool': […], 'rep_dim': 4})"
        )

    def test_heads_of_one_width_and_two_forms(self, kit):
        class Unbiased(kit.Shallow):
            def __init__(self, task):
                super().__init__(task)
                self.head = nn.Linear(self.rep_dim, task.classes, bias=False)

        with pytest.raises(ConfigError, match="choose models whose heads have the same layers"):
            federation(kit, models=[kit.Shallow, Unbiased])

    def test_a_head_without_parameters(self, kit):
        class Bald(Model):
            rep_dim = 4

            def __init__(self, task):
                super().__init__()
                self.fc = nn.Linear(task.input[0], 4)
                self.head = nn.Identity()

            def features(self, x):
                return self.fc(x)

        with pytest.raises(ConfigError, match="fedre: the head of client a has no parameters"):
            federation(kit, models=Bald)

    def test_a_class_nobody_holds(self, kit):
        method = {"name": "fedre"}
        y = np.append(LABELS, [4])
        x = np.zeros((13, 3), dtype=np.float32)
        with pytest.raises(ConfigError) as caught:
            kit.Federation(method, kit.Shallow, ROWS, x=x, y=y)
        assert str(caught.value).startswith(
            "fedre: no client holds class 4 (4), so the server's head would only"
        )
        assert "(1 of 5 classes); change the partition, or set method.unheld to accept" in str(caught.value)
        game = kit.Federation(method | {"unheld": "accept"}, kit.Shallow, ROWS, x=x, y=y)
        assert not game.round("a", "b").failures

    def test_a_client_without_samples(self, kit):
        with pytest.raises(ConfigError, match="fedre: client c has no training sample"):
            kit.Federation("fedre", kit.Shallow, ROWS | {"c": []}, y=LABELS)

    @pytest.mark.parametrize(
        ("option", "sentence"),
        [
            ({"noise": -0.1}, "method.noise: must be greater than or equal to 0"),
            ({"levels": 0}, "method.levels: must be greater than or equal to 1"),
            ({"mechanism": "RAN"}, "method.mechanism: must be 'RAP', 'VAP'"),
            ({"weights": "cauchy"}, "method.weights: must be 'uniform', 'gaussian' or 'laplace'"),
            ({"server_lr": 0}, "method.server_lr: must be greater than 0"),
            ({"server_lr": math.inf}, "method.server_lr: must be a finite number"),
            (
                {"mechanism": "VAP", "weights": "laplace"},
                "method: weights does nothing with mechanism: VAP; it is for RAP or RAR",
            ),
            ({"mechanism": "VAR", "fixed": True}, "method: fixed does nothing with mechanism: VAR"),
            ({"server_epoch": 2}, "unknown key 'method.server_epoch'; did you mean 'server_epochs'?"),
        ],
    )
    def test_options(self, option, sentence):
        with pytest.raises(ConfigError) as caught:
            Experiment.make(
                partition={"kind": "iid", "clients": 2}, models="mlp-small", method={"name": "fedre"} | option
            )
        assert str(caught.value).startswith(sentence)


def test_evaluation_before_and_after_training(tmp_path):
    """With the received head, before training (HtFLlib's moment) is also after the aggregation a round earlier."""
    draw = Rng(2).numpy()
    y = np.arange(60) % 3
    x = (draw.normal(size=(60, 4)) + 2 * np.eye(4)[y]).astype(np.float32)
    result = potluck.run(
        data=from_arrays(x, y, classes=3),
        partition={"kind": "iid", "clients": 2},
        models=["mlp-small", "mlp-large"],
        method="fedre",
        training={"rounds": 2, "batch_size": 4, "optimizer": {"lr": 0.1}},
        evaluate={"when": ["before", "after_training", "after_aggregation"]},
        engine={"workers": 1},
        out=tmp_path / "run",
    )
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    found = {(line["round"], line["when"], line["client"]): line["test"] for line in lines}
    assert len(found) == 2 * 3 * 2
    for client in ("0", "1"):
        assert found[2, "before", client] == found[1, "after_aggregation", client]
        assert found[1, "after_training", client] != found[1, "before", client]
        assert found[1, "after_training", client] != found[1, "after_aggregation", client]
