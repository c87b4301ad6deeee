"""CoFED: votes, counting, lists and weights by hand; a round against a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.card import Card
from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.streams import shuffled_batches
from potluck.data import from_arrays
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.testing.bench import Played

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 2, 3])  # a holds 0, 1, 2; b holds 1, 2; nobody 3
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
X = np.random.Generator(np.random.PCG64(3)).standard_normal((13, 3)).astype(np.float32)


def federation(kit, **options):
    method = {"name": "cofed", "batch": 4, **options}
    return kit.Federation(
        method, [kit.Shallow, kit.Deep], ROWS, x=X, y=LABELS, training=TRAINING, public=PUBLIC
    )


def counted(method, votes, held, samples=None):
    """What the server makes of votes."""
    replies = Replies.of(
        {client: {"votes": torch.tensor(one)} for client, one in votes.items()},
        samples or dict.fromkeys(votes, 1),
    )
    cards = {
        client: Card(client, card.samples, card.task, {"classes_held": held[client]})
        for client, card in replies.cards.items()
    }
    method.labels = {client: [0, 1, 2] for client in votes}
    return method.count(Replies(replies.messages, cards)).tolist()


@pytest.fixture
def method(kit):
    found = federation(kit).method
    found.numbers = {"x": 0, "y": 1, "z": 2}
    return found


def test_a_share_of_the_holders_above_three_tenths_agrees(method):
    """Ten hold class 0: three votes are exactly 0.3 and too few, four are enough."""
    voters = [str(number) for number in range(10)]
    votes = {one: [0 if int(one) < 3 else 3, 0 if int(one) < 4 else 3] for one in voters}
    assert counted(method, votes, dict.fromkeys(voters, (0,))) == [[False, True], [False] * 2, [False] * 2]


def test_only_holders_count(method):
    """Class 1 has one holder, and its single vote is all of them; class 2 has none."""
    votes = {"a": [1, 0, 3], "b": [3, 0, 0], "c": [0, 3, 3], "d": [3, 3, 3]}
    held = {"a": (0, 1), "b": (0,), "c": (0,), "d": (0,)}
    found = counted(method, votes, held)
    assert found == [[False, True, False], [True, False, False], [False] * 3]  # 1/4, 2/4, 1/4 of class 0


def test_votes_may_be_weighted_with_samples(method):
    votes, held = {"a": [0], "b": [3], "c": [3], "d": [3]}, dict.fromkeys("abcd", (0,))
    samples = {"a": 2, "b": 1, "c": 1, "d": 1}
    assert counted(method, votes, held, samples)[0] == [False]
    method.config = method.Config(weights="samples")
    assert counted(method, votes, held, samples)[0] == [True]  # 2 of 5


def test_votes_need_a_margin_and_a_class_one_holds(kit):
    game = federation(kit)
    client = game.federation.clients.build_client("b")
    logits = torch.tensor([
        [0.0, 2.0, 0.0, 0.0],  # class 1, by 0.61
        [0.0, 1.0, 0.0, 0.3],  # class 1, by 0.22: not sure
        [3.0, 0.0, 0.0, 0.0],  # class 0, which b does not hold
        [0.0, 0.0, 9.0, 0.0],  # class 2, of a sample b has not got
    ])  # fmt: skip
    here = torch.tensor([True, True, True, False])
    client.public_data = replace(client.public, ids=np.arange(4), mask=here)
    assert game.method.decide(client, logits).tolist() == [1, 4, 4, 4]  # 4: no vote


def test_samples_of_two_classes_are_dropped_and_classes_weighted(kit):
    game = federation(kit)
    client = game.federation.clients.build_client("a")
    down = Message({"rows": torch.tensor([1, 5, 7, 5, 2]), "counts": torch.tensor([1, 3, 1])})
    labels, known = game.method.agreed_labels(client, down)
    assert known.tolist() == [0, 1, 1, 0, 0, 0, 0, 1, 0, 0]  # 5 is listed twice
    assert labels[[1, 2, 7]].tolist() == [0, 2, 1]
    weights = game.method.balance(client, labels, known)
    # a has 3, 3, 1 samples of classes 0, 1, 2; with one more of each 4, 4, 2
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5, 1.0, 0.0]))
    empty = Message({"rows": torch.zeros(0, dtype=torch.long), "counts": torch.zeros(3, dtype=torch.long)})
    labels, known = game.method.agreed_labels(client, empty)
    assert not known.any()
    expected = torch.tensor([1 / 3, 1 / 3, 1.0, 0.0])
    torch.testing.assert_close(game.method.balance(client, labels, known), expected)


def plain_votes(model, held):
    with torch.no_grad():
        likely = model(torch.tensor(PUBLIC)).softmax(1).sort(1, descending=True)
    sure = likely.values[:, 0] - likely.values[:, 1] > 0.1
    return [
        int(label) if sure[row] and int(label) in held else None
        for row, label in enumerate(likely.indices[:, 0])
    ]


def test_a_round_is_a_plain_loop(kit):
    game = federation(kit, margin=0.1)
    heldby = {"a": (0, 1, 2), "b": (1, 2)}
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    lines = game.round("a", "b").ledger.lines
    for client, model in models.items():
        steps = game.steps(client, 1)
        kit.plain_training(model, [(torch.tensor(X[r]), torch.tensor(LABELS[r])) for r in steps], lr=0.2)
    votes = {client: plain_votes(model, heldby[client]) for client, model in models.items()}
    agreed = {}
    for label in (0, 1, 2):
        owners = [client for client in ROWS if label in heldby[client]]
        shares = [sum(votes[one][row] == label for one in owners) / len(owners) for row in range(10)]
        agreed[label] = [row for row, share in enumerate(shares) if share > 0.3]
    down = {line["client"]: line["names"] for line in lines if line["direction"] == "down"}
    for client, model in models.items():
        listed = [(row, label) for label in heldby[client] for row in agreed[label]]
        assert down[client] == {"rows": len(listed), "counts": len(heldby[client])}
        rows = [row for row, _ in listed]
        labels = {row: label for row, label in listed if rows.count(row) == 1}
        assert labels
        plain_union(game, client, model, labels)
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}"
            )
    ups = [line["names"] for line in lines if line["direction"] == "up"]
    assert ups == [{"votes": 10}] * 2


def plain_union(game, client, model, labels):
    """Weighted cross-entropy over private and agreed samples."""
    counts = np.bincount([*LABELS[game.rows[client]], *labels.values()], minlength=4)
    weight = [counts[counts > 0].min() / count if count else 0.0 for count in counts]
    rng = game.rng(client, 1)
    private = shuffled_batches(game.rows[client], 3, 1, "wrap", rng.child("union"))
    public = shuffled_batches(np.arange(10), 4, 1, "wrap", rng.child("agreed"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(max(len(private), len(public))):
        own, open_ = private[step % len(private)], public[step % len(public)]
        known = [row for row in open_ if row in labels]
        x = np.concatenate([X[own], PUBLIC[known]])
        y = [*LABELS[own], *(labels[row] for row in known)]
        each = torch.tensor([weight[label] for label in y], dtype=torch.float32)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.tensor(x)), torch.tensor(y), reduction="none")
        ((loss * each).sum() / each.sum()).backward()
        optimizer.step()


def groups(names):
    """Two data sets of the same samples, the classes of each called as the names say."""
    y = np.arange(24) % 3
    x = np.random.Generator(np.random.PCG64(1)).standard_normal((24, 3)).astype(np.float32) + y[:, None]
    sets = [from_arrays(x, y, class_names=one, name=f"set{place}") for place, one in enumerate(names)]
    partition = {"kind": "iid", "clients": 1, "test": 0.2}
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    federation = [{"data": data, "partition": partition, "models": model} for data in sets]
    public = from_arrays(x, y, name="public")
    return Experiment.make(
        federation=federation, method={"name": "cofed", "margin": 0.0}, public={"data": public},
        training={"rounds": 1, "batch_size": 8}, engine={"device": "cpu"},
    )  # fmt: skip


def test_classes_are_known_by_their_names():
    federation = groups([["cat", "dog", "owl"], ["owl", "ant", "cat"]]).build()
    assert federation.method.numbers == {"cat": 0, "dog": 1, "owl": 2, "ant": 3}
    assert federation.method.labels == {"0": [0, 1, 2], "1": [2, 3, 0]}
    played = Played(federation)
    assert not played.round(federation.population.ids).failures
    agreed = torch.zeros(4, 24, dtype=torch.bool)
    agreed[2, 5] = agreed[1, 6] = agreed[3, 7] = True  # an owl, a dog, an ant
    lists = {
        client: federation.method.listed(agreed, federation.population.card(client))
        for client in federation.population.ids
    }
    assert [lists[one]["rows"].tolist() for one in "01"] == [[6, 5], [5, 7]]
    assert [lists[one]["counts"].tolist() for one in "01"] == [[0, 1, 1], [1, 1, 0]]


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"method.batch of 11 samples is larger than the public data"):
        federation(kit, batch=11)
    values = {"partition": {"kind": "iid", "clients": 1}, "models": "conv-small", "data": "digits-attributes"}
    with pytest.raises(
        ConfigError, match=r"cofed learns from one class per sample; client 0 has multi-label"
    ):
        Experiment.make(**values, method="cofed", public={"data": "digits"}).build()
