"""FedTGP: the margin, the server's training and the equality with FedProto."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.streams import shuffled_batches
from potluck.core.task import Batch
from potluck.errors import ConfigError
from potluck.methods.fedtgp import margin

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 2, 3])  # a: 0 1 2; b: 1 2; the last sample is nobody's
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def federation(kit, method="fedtgp", models=None, **options):
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((13, 3)).astype(np.float32)
    return kit.Federation(
        {"name": method, **options},
        models or [kit.Shallow, kit.Deep],
        ROWS,
        x=x,
        y=LABELS,
        training=TRAINING,
        test=range(12),
    )


def own_means(game, client):
    """The mean representation of each class of a client, with its model as it stands."""
    model = game.federation.population.build_model(client)
    model.load_state_dict(game.part(client, "model"))
    with torch.no_grad():
        z = model.eval().features(torch.tensor(game.x[game.rows[client]]))
    y = game.y[game.rows[client]]
    return {label: z[y == label].mean(0) for label in sorted(set(y.tolist()))}


def plain_margin(means, cap):
    """δ, class by class."""
    if len(means) < 2:
        return cap
    gaps = [
        min(math.dist(one, other) for name, other in means.items() if name != label)
        for label, one in means.items()
    ]
    return min(max(gaps), cap)  # classes without a mean get the least gap, which is never the largest


@pytest.mark.parametrize(
    ("vectors", "cap", "expected"),
    [
        ({0: [0.0, 0.0], 1: [0.0, 3.0], 2: [4.0, 0.0]}, 100.0, 4.0),
        ({0: [0.0, 0.0], 1: [0.0, 3.0], 2: [4.0, 0.0]}, 3.5, 3.5),
        ({0: [0.0, 0.0], 3: [300.0, 400.0]}, 100.0, 100.0),
        ({1: [5.0, 5.0]}, 100.0, 100.0),
        ({0: [1.0, 1.0], 1: [1.0, 1.0]}, 100.0, 0.0),
        ({0: [0.0, 0.0], 1: [0.0, 3.0]}, 0.0, 0.0),
    ],
)
def test_margin_by_hand(vectors, cap, expected):
    means, held = torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool)
    for label, vector in vectors.items():
        means[label], held[label] = torch.tensor(vector), True
    assert margin(means, held, cap).item() == pytest.approx(expected) == plain_margin(vectors, cap)


def test_a_margin_is_finite_whatever_was_sent():
    means = torch.tensor([[torch.inf, 0.0], [torch.inf, 0.0], [3e38, 0.0]])
    assert margin(means, torch.ones(3, dtype=torch.bool), 7.0).item() == 7.0


@pytest.mark.parametrize("cap", [100.0, 0.1, 0.0])
def test_the_server_against_a_plain_loop(kit, cap):
    game = federation(kit, server_epochs=4, server_batch=2, server_lr=0.5, margin_cap=cap)
    start = {name: value.clone() for name, value in game.server["generator"].tensors().items()}
    game.round(*ROWS)
    means = {client: own_means(game, client) for client in ROWS}
    pairs = [(mean, label) for client in ROWS for label, mean in means[client].items()]
    held = {label: [own[label] for own in means.values() if label in own] for label in (0, 1, 2)}
    delta = plain_margin({label: torch.stack(found).mean(0).tolist() for label, found in held.items()}, cap)

    embedding, first, last = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    for prefix, layer in (("embedding", embedding), ("middle", first), ("last", last)):
        layer.load_state_dict(
            {key.partition(".")[2]: value for key, value in start.items() if key.startswith(f"{prefix}.")}
        )
    parameters = [*embedding.parameters(), *first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    rng = game.federation.server_rng(1).child("prototypes")
    for rows in shuffled_batches(np.arange(len(pairs)), 2, 4, "keep", rng):
        made, losses = last(first(embedding(torch.arange(4))).relu()), []
        for row in rows:
            vector, label = pairs[row]
            away = torch.stack(
                [(vector - one).norm() + (delta if j == label else 0) for j, one in enumerate(made)]
            )
            losses.append(away[label] + (-away).logsumexp(0))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    expected = last(first(embedding.weight).relu()).detach()
    torch.testing.assert_close(game.server["prototypes"]["prototypes"], expected, atol=1e-5, rtol=1e-4)


def test_a_larger_margin_is_a_larger_loss(kit):
    """δ is added to the distance of the true class; added to the others, it would lower the loss."""
    game = federation(kit)
    batch = Batch(torch.zeros(1, 6), torch.tensor([2]))
    losses = [
        game.method.separation(game.server, batch, torch.tensor(delta)).item() for delta in (0.0, 1.0, 50.0)
    ]
    assert losses == sorted(losses)
    assert losses[2] > 40


def test_a_prototype_on_the_spot_gives_a_finite_gradient(kit):
    """The root of a difference of squares would be of zero, or of less than zero by rounding."""
    game = federation(kit)
    made = game.server["generator"]()
    batch = Batch(made[:2].detach(), torch.tensor([0, 1]))
    loss = game.method.separation(game.server, batch, torch.tensor(1.0))
    gradients = torch.autograd.grad(loss, [*game.server["generator"].module.parameters()])
    assert loss.isfinite()
    assert all(one.isfinite().all() for one in gradients)


def test_all_classes_come_down_and_can_be_chosen(kit):
    game = federation(kit, server_epochs=2)
    first = game.round(*ROWS).ledger.lines
    assert [line for line in first if line["direction"] == "down" and line["names"]] == []
    sizes = {(line["client"], line["direction"]): line["names"] for line in game.round(*ROWS).ledger.lines}
    assert sizes["a", "down"] == {"prototypes": 4 * 6}
    assert sizes["b", "up"] == {"prototypes": 2 * 6, "classes": 2, "counts": 2}
    client = game.federation.clients.build_client("a")
    prototypes = torch.zeros(4, 6)
    prototypes[3] = client["model"].features(torch.tensor(game.x[:1]))[0].detach()
    prototypes[:3] = prototypes[3] + 1
    game.method.receive(client, Message({"prototypes": prototypes}))
    scores = game.method.predict(client, Batch(torch.tensor(game.x[:1]), torch.tensor([0])), "prototype")
    assert scores.argmax().item() == 3


def test_without_training_it_is_fedproto(kit):
    """The condition: server_epochs 0 (no margin either), FedProto's uniform weights, the same λ and distance."""
    ours, theirs = federation(kit, server_epochs=0, weight=0.7), federation(kit, "fedproto", weight=0.7)
    for cohort in (("a", "b"), ("b",), ("a", "b"), ("a",)):
        ours.round(*cohort)
        theirs.round(*cohort)
    for name, value in theirs.server["prototypes"].tensors().items():
        assert torch.equal(ours.server["prototypes"][name], value)
    for client in ROWS:
        assert all(
            torch.equal(value, ours.state(client)[name]) for name, value in theirs.state(client).items()
        )
        assert ours.measure(client, "prototype") == theirs.measure(client, "prototype")


def test_with_training_it_is_not(kit):
    ours, theirs = federation(kit, server_epochs=1), federation(kit, "fedproto", weight=10.0)
    for game in (ours, theirs):
        game.round(*ROWS)
    means = theirs.server["prototypes"]["prototypes"]
    assert not torch.allclose(ours.server["prototypes"]["prototypes"][:3], means)


def reply(rows, classes, counts):
    return {
        "prototypes": torch.tensor(rows),
        "classes": torch.tensor(classes),
        "counts": torch.tensor(counts),
    }


@pytest.mark.parametrize(
    "lie",
    [
        reply([[3e38] * 6, [-3e38] * 6], [0, 1], [1.0, 1.0]),
        reply([[1.0] * 6, [2.0] * 6], [0, 1], [0.0, 0.0]),
        reply([[1.0] * 6, [2.0] * 6], [0, 1], [0.0, 1.0]),
    ],
)
def test_no_upload_spoils_the_prototypes(kit, lie):
    game = federation(kit, server_epochs=2)
    both = Replies.of({"a": lie, "b": lie}, samples={"a": 1, "b": 1})
    game.method.round(game.server, type("Clients", (), {"ask": lambda self, step: both})())
    assert all(value.isfinite().all() for value in game.server["generator"].tensors().values())


def test_widths_must_agree(kit):
    with pytest.raises(
        ConfigError, match=r"a prototype needs one representation width, but client b.*or use fd"
    ):
        federation(kit, models=[kit.Shallow, kit.Narrow])
