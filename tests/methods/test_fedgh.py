"""FedGH and FedAllRep: class means and single representations on the same head trainer."""

import numpy as np
import pytest
import torch
from torch import nn

from potluck.core.message import Message
from potluck.core.model import Model
from potluck.core.streams import shuffled_batches
from potluck.errors import ConfigError
from potluck.federation.explain import explain

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 3, 2, 2, 1, 1, 2])  # a holds 0, 1, 3; b holds 1, 2
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def federation(kit, method, **options):
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((12, 3)).astype(np.float32)
    return kit.Federation(
        {"name": method, **options}, [kit.Normed, kit.Deep], ROWS, x=x, y=LABELS, training=TRAINING
    )


def features(game, client):
    """The representations of a client's trained model, by a plain pass in evaluation mode."""
    model = game.federation.population.build_model(client)
    model.load_state_dict({name: game.part(client, "model")[name] for name in model.state_dict()})
    rows = game.rows[client]
    with torch.no_grad():
        return model.eval().features(torch.tensor(game.x[rows])), torch.tensor(LABELS[rows])


def plain_head(start, x, y, game, batch, epochs=1, lr=0.01):
    """SGD on the mean cross-entropy in a plain loop."""
    head = nn.Linear(6, 4)
    head.load_state_dict(start)
    optimizer = torch.optim.SGD(head.parameters(), lr=lr)
    rng = game.federation.server_rng(1).child("uploads")
    for rows in shuffled_batches(np.arange(len(x)), batch, epochs, "keep", rng):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(x[rows]), y[rows]).backward()
        optimizer.step()
    return head.state_dict()


def test_fedgh_trains_the_head_on_the_class_means(kit):
    """The official script's loop leaves the head as it was; this one moves it, by the means over samples."""
    game = federation(kit, "fedgh", server_batch=2, server_epochs=2, server_lr=0.5)
    start = game.server["head"].state()
    game.round("a", "b")
    means, classes = [], []
    for client in ROWS:
        z, y = features(game, client)
        for label in sorted(set(y.tolist())):
            means.append(z[y == label].mean(0))
            classes.append(label)
    assert classes == [0, 1, 3, 1, 2]
    expected = plain_head(start, torch.stack(means), torch.tensor(classes), game, 2, epochs=2, lr=0.5)
    for name, value in expected.items():
        torch.testing.assert_close(game.server["head"].state()[name], value)
        assert not torch.equal(value, start[name])


def test_fedallrep_trains_it_on_every_representation(kit):
    game = federation(kit, "fedallrep", server_batch=5, server_lr=0.5)
    start = game.server["head"].state()
    game.round("a", "b")
    pairs = [features(game, client) for client in ROWS]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    expected = plain_head(start, x, y, game, 5, lr=0.5)
    for name, value in expected.items():
        torch.testing.assert_close(game.server["head"].state()[name], value)


@pytest.mark.parametrize("method", ["fedgh", "fedallrep"])
def test_nothing_is_differentiated(kit, method):
    game = federation(kit, method)
    client = game.federation.clients.build_client("a")
    game.federation.clients.enter(client, 1, {})
    up = game.method.upload(client)
    assert not any(value.requires_grad for value in up.values())
    assert all(value.grad is None for value in client["model"].module.parameters())


@pytest.mark.parametrize("method", ["fedgh", "fedallrep"])
def test_the_head_is_received_before_training(kit, method):
    game = federation(kit, method)
    client = game.federation.clients.build_client("a")
    game.method.receive(client, Message(game.method.downlink(game.server, "a")))
    for name, value in game.server["head"].state().items():
        assert torch.equal(client["model"].head.state_dict()[name], value)


def test_what_crosses(kit):
    for method, sizes in {
        "fedgh": {"a": {"prototypes": 3 * 6, "classes": 3}, "b": {"prototypes": 2 * 6, "classes": 2}},
        "fedallrep": {
            "a": {"representations": 7 * 6, "classes": 7},
            "b": {"representations": 5 * 6, "classes": 5},
        },
    }.items():
        lines = federation(kit, method).round("a", "b").ledger.lines
        assert {line["client"]: line["names"] for line in lines if line["direction"] == "up"} == sizes
        assert all(line["names"] == {"head": 4 * 6 + 4} for line in lines if line["direction"] == "down")


class Wide(Model):
    """512 features."""

    rep_dim = 512

    def __init__(self, task):
        super().__init__()
        self.fc = nn.Linear(task.input[0], 512)
        self.head = nn.Linear(512, task.classes)

    def features(self, x):
        return self.fc(x)


def test_sizes_of_the_papers_table(kit):
    """257,024 = 502·512: prototypes over ten clients that hold 502 classes in all, as the paper counts them.

    The paper puts 512.00 K (all prototypes) in the column of what comes down; a head of 51,300 does, 513.00 K.
    """
    held = [50] * 8 + [51, 51]
    y = [(client * 50 + place) % 100 for client, count in enumerate(held) for place in range(count)]
    ends = np.cumsum(held)
    rows = {
        str(client): range(end - count, end)
        for client, (count, end) in enumerate(zip(held, ends, strict=True))
    }
    game = kit.Federation("fedgh", Wide, rows, x=np.zeros((502, 3), dtype=np.float32), y=np.array(y))
    lines = game.round(*rows).ledger.lines
    assert sum(line["names"]["prototypes"] for line in lines if line["direction"] == "up") == 257_024
    assert sum(line["scalars"] for line in lines if line["direction"] == "up") == 502 * 513
    assert sum(line["scalars"] for line in lines if line["direction"] == "down") == 513_000
    explained = explain(game.federation, "9")
    assert (explained["up_scalars"], explained["down_scalars"]) == (51 * 513, 51_300)


@pytest.mark.parametrize("method", ["fedgh", "fedallrep"])
def test_heads_of_different_shape(kit, method):
    with pytest.raises(ConfigError, match=f"{method}: the head of client b"):
        kit.Federation(method, [kit.Shallow, kit.Narrow], ROWS, y=LABELS)
