"""FedProto: prototypes, the loss and nearest-prototype prediction by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.client import Client
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.methods.fedproto import FedProto

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 2])  # a: 0 0 1 1 1 0 2; b: 2 2 1 1 2; nobody: 3
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def play(kit, rounds=1, cohort=("a", "b"), models=None, training=TRAINING, **options):
    labels = np.append(LABELS, [3])  # a thirteenth sample that nobody has: there are four classes
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((13, 3)).astype(np.float32)
    method = {"name": "fedproto", **options}
    game = kit.Federation(
        method, models or [kit.Shallow, kit.Deep], ROWS, x=x, y=labels, training=training, test=range(12)
    )
    for _ in range(rounds):
        game.round(*cohort)
    return game


def own_means(game, client):
    """The mean representation of each class of a client, with its model as it stands, one sample at a time."""
    model = game.federation.population.build_model(client)
    model.load_state_dict(game.part(client, "model"))
    model.eval()
    found = {}
    for row in game.rows[client]:
        with torch.no_grad():
            found.setdefault(int(game.y[row]), []).append(
                model.features(torch.tensor(game.x[row : row + 1]))[0]
            )
    return {label: (torch.stack(vectors).mean(0), len(vectors)) for label, vectors in found.items()}


@pytest.mark.parametrize("weights", ["uniform", "count"])
def test_prototypes_are_means_over_holders(kit, weights):
    game = play(kit, weights=weights)
    held = game.server["prototypes"].tensors()
    assert held["classes"].tolist() == [0, 1, 2]
    means = {client: own_means(game, client) for client in ROWS}
    for label, row in zip((0, 1, 2), held["prototypes"], strict=True):
        pairs = [means[client][label] for client in ROWS if label in means[client]]
        shares = [count if weights == "count" else 1 for _, count in pairs]
        expected = sum(s * mean for s, (mean, _) in zip(shares, pairs, strict=True)) / sum(shares)
        torch.testing.assert_close(row, expected)


def test_uniform_and_count_differ_where_holders_do(kit):
    uniform = play(kit, weights="uniform").server["prototypes"]["prototypes"]
    count = play(kit, weights="count").server["prototypes"]["prototypes"]
    torch.testing.assert_close(uniform[0], count[0])  # one holder
    assert not torch.allclose(uniform[1], count[1])  # three samples against two
    assert not torch.allclose(uniform[2], count[2])  # one against three


def test_what_crosses(kit):
    game = play(kit)
    lines = game.round("a", "b").ledger.lines
    sizes = {(line["client"], line["direction"]): line["names"] for line in lines}
    assert sizes["a", "up"] == {"prototypes": 3 * 6, "classes": 3, "counts": 3}
    assert sizes["b", "up"] == {"prototypes": 2 * 6, "classes": 2, "counts": 2}
    assert sizes["a", "down"] == sizes["b", "down"] == {"prototypes": 3 * 6, "classes": 3}


def test_a_class_nobody_sent_this_time_keeps_its_prototype(kit):
    game = play(kit)
    before = game.server["prototypes"]["prototypes"].clone()
    game.round("b")
    after = game.server["prototypes"].tensors()
    assert after["classes"].tolist() == [0, 1, 2]
    assert torch.equal(after["prototypes"][0], before[0])
    fresh = own_means(game, "b")
    torch.testing.assert_close(after["prototypes"][1], fresh[1][0])
    torch.testing.assert_close(after["prototypes"][2], fresh[2][0])


def test_heads_stay_at_home(kit):
    game = play(kit, rounds=2, models=kit.Shallow)
    a, b = (game.part(client, "model")["head.weight"] for client in ROWS)
    assert not torch.equal(a, b)


class Fixed(torch.nn.Module):
    """Features are the sample itself; the head is the identity."""

    rep_dim = 2

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))

    def features(self, x):
        return x


def tiny(known, prototypes, **options):
    method = FedProto(FedProto.Config(name="fedproto", **options))
    x, y = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 2])
    client = Client(Task("classification", 3, (2,)), Source(x, y))
    client.declare(
        {
            "model": Fixed(),
            "prototypes": torch.tensor(prototypes),
            "known": torch.tensor(known, dtype=torch.float),
        }
    )
    return method, client, Batch(x, y)


PROTOTYPES = [[0.0, 0.0], [1.0, 1.0], [5.0, 5.0]]


@pytest.mark.parametrize(
    ("distance", "known", "expected"),
    [
        (
            "l2",
            [1, 1, 0],
            (5.0 + 5.0) / 2,
        ),  # |(1,2)−(0,0)|² = 5, |(3,0)−(1,1)|² = 5; the third does not count
        ("mse", [1, 1, 0], (2.5 + 2.5) / 2),
        ("l2", [0, 0, 1], 25.0 + 16.0),
        ("mse", [0, 0, 1], 20.5),
        ("l2", [1, 1, 1], (5.0 + 5.0 + 41.0) / 3),
        ("l2", [0, 0, 0], 0.0),
        ("mse", [0, 0, 0], 0.0),
    ],
)
def test_loss_by_hand(distance, known, expected):
    method, client, batch = tiny(known, PROTOTYPES, distance=distance, weight=0.5)
    terms = method.loss(client, batch)
    assert terms["prototype"].item() == pytest.approx(0.5 * expected)
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 0.0, 3.0], [0.0, 1.0, 1.0]])
    torch.testing.assert_close(terms["ce"], F.cross_entropy(logits, batch.y))


def test_a_sample_that_counts_nothing_is_left_out_of_both_terms():
    method, client, batch = tiny([1, 1, 1], PROTOTYPES, distance="l2")
    weighted = Batch(batch.x, batch.y, weight=torch.tensor([1.0, 0.0, 1.0]))
    only = Batch(batch.x[[0, 2]], batch.y[[0, 2]])
    for name, value in method.loss(client, weighted).items():
        torch.testing.assert_close(value, method.loss(client, only)[name])


def test_nearest_known_prototype_wins():
    method, client, batch = tiny([1, 1, 0], [[0.0, 0.0], [3.0, 1.0], [1.0, 2.0]])
    scores = method.predict(client, batch, "prototype")
    # the third prototype lies on the first sample, but is not known
    assert scores.argmax(1).tolist() == [0, 1, 0]
    torch.testing.assert_close(scores[0, :2], -torch.tensor([5.0**0.5, 5.0**0.5]))
    assert scores.isfinite().all()
    assert F.cross_entropy(scores, torch.tensor([2, 2, 2]), reduction="sum").isfinite()
    assert torch.equal(method.predict(client, batch, "head"), client["model"].head(batch.x))


def test_all_known():
    method, client, batch = tiny([1, 1, 1], [[0.0, 0.0], [3.0, 1.0], [1.0, 2.0]])
    assert method.predict(client, batch, "prototype").argmax(1).tolist() == [2, 1, 0]


def test_before_the_first_round_the_head_answers():
    method, client, batch = tiny([0, 0, 0], PROTOTYPES)
    assert torch.equal(method.predict(client, batch, "prototype"), method.predict(client, batch, "head"))


def test_accuracy_through_the_engine(kit):
    game = play(kit, rounds=3)
    model = game.federation.population.build_model("a")
    model.load_state_dict(game.part("a", "model"))
    held = game.server["prototypes"].tensors()
    with torch.no_grad():
        z = model.eval().features(torch.tensor(game.x[:12]))
    nearest = held["classes"][(z[:, None] - held["prototypes"]).norm(dim=2).argmin(1)]
    assert game.measure("a", "prototype")["correct"] == (nearest == torch.tensor(game.y[:12])).sum()
    with torch.no_grad():
        answers = model.head(z).argmax(1)
    assert game.measure("a", "head")["correct"] == (answers == torch.tensor(game.y[:12])).sum()


@pytest.mark.parametrize("distance", ["mse", "l2"])
def test_two_rounds_against_a_plain_loop(kit, distance):
    game = play(kit, rounds=0, distance=distance, weight=0.3)
    model = game.federation.population.build_model("a")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in (1, 2):
        held = {key: value.clone() for key, value in game.server["prototypes"].tensors().items()}
        game.round("a", "b")
        for rows in game.steps("a", number):
            x, y = torch.tensor(game.x[rows]), torch.tensor(game.y[rows])
            z = model.features(x)
            loss = F.cross_entropy(model.head(z), y)
            if held:  # a's classes all have prototypes from round 1 on
                gap = (z - held["prototypes"][y]).square()
                loss = loss + 0.3 * (gap.mean() if distance == "mse" else gap.sum(1).mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(game.part("a", "model")[name], value.detach(), atol=1e-5, rtol=0)


def test_online_prototypes_come_from_the_features_seen_while_training(kit):
    game = play(kit, online=True, cohort=("a",), training=TRAINING | {"epochs": 2})
    model, seen = game.federation.population.build_model("a"), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for rows in game.steps("a", 1):
        z = model.features(torch.tensor(game.x[rows]))
        for label, vector in zip(game.y[rows].tolist(), z.detach(), strict=True):
            seen.setdefault(label, []).append(vector)
        optimizer.zero_grad()
        F.cross_entropy(model.head(z), torch.tensor(game.y[rows])).backward()
        optimizer.step()
    held = game.server["prototypes"].tensors()
    for label, row in zip(held["classes"].tolist(), held["prototypes"], strict=True):
        torch.testing.assert_close(row, torch.stack(seen[label]).mean(0), atol=1e-5, rtol=0)


def test_a_class_dropped_from_training_is_no_zero_prototype(kit):
    """With `drop` client a trains on four of its seven samples; a class it did not see there does not count."""
    training = TRAINING | {"epochs": 1, "batch_size": 4, "last_batch": "drop"}
    for number in range(1, 30):
        game = play(kit, rounds=0, online=True, training=training)
        game.number = number - 1
        if set(game.y[np.concatenate(game.steps("a", number))]) == {0, 1}:
            break
    else:
        pytest.fail("no order of batches leaves class 2 out")
    game.round("a", "b")
    held = dict(
        zip(*(game.server["prototypes"][name].tolist() for name in ("classes", "prototypes")), strict=True)
    )
    alone = play(kit, rounds=0, online=True, training=training)
    alone.number = number - 1
    alone.round("b")
    assert held[2] == pytest.approx(alone.server["prototypes"]["prototypes"][-1].tolist(), abs=1e-6)


def test_widths_must_agree(kit):
    with pytest.raises(
        ConfigError, match=r"one representation width, but client b .* has 4, client a .* has 6"
    ):
        play(kit, models=[kit.Shallow, kit.Narrow])


def test_a_client_without_samples_does_not_break_the_round(kit):
    rows = {"a": range(0, 7), "b": []}
    game = kit.Federation("fedproto", kit.Shallow, rows, training=TRAINING)
    cohort = game.round("a", "b")
    assert cohort.failures == {}
