"""FedProx: the pull towards the received weights, by hand and against a plain loop."""

import numpy as np
import pytest
import torch
from torch import nn

from potluck.core.client import Client
from potluck.core.settings import ClientTraining, OptimizerSettings
from potluck.core.streams import Source, Stream
from potluck.core.task import Task
from potluck.training.fit import fit

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


class Point(nn.Module):
    """Two numbers to move around."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def test_half_mu_0_05_at_distance_1_2_gives_0_25_and_the_gradient_0_1_0_2():
    """A first step carries w from w₀ to w₀ + (1, 2); the second sees the pull alone."""
    x = torch.zeros(1, 1)
    client = Client(Task("classification", 2, (1,)), Source(x, torch.zeros(1, dtype=torch.long)))
    client.declare({"model": Point()})
    client.training = ClientTraining(optimizer=OptimizerSettings(lr=1.0))
    push = torch.tensor([-1.0, -2.0])
    seen = []

    def loss(client, batch):
        return {"push": (client["model"].w * push).sum() * (1.0 if not seen else 0.0)}

    def combine(terms):
        seen.append(terms)
        return {name: terms["push"][name] + terms["prox"][name] for name in terms["push"]}

    done = fit(client, loss, streams={"one": Stream.of(x)}, steps=2, prox={"model": 0.1}, combine=combine)
    assert torch.equal(seen[0]["prox"]["model/w"], torch.zeros(2))
    torch.testing.assert_close(seen[1]["prox"]["model/w"], torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(done.losses["prox"] * done.steps, torch.tensor(0.25))
    torch.testing.assert_close(client["model"].w.detach(), torch.tensor([0.9, 1.8]))


@pytest.mark.parametrize("mu", [0.3, 5.0])
def test_two_rounds_are_fedavg_of_loops_with_the_term_in_the_loss(kit, mu):
    game = kit.Federation({"name": "fedprox", "mu": mu}, kit.Shallow, ROWS, training=TRAINING)
    start = game.initial("a")
    for number in (1, 2):
        game.round("a", "b")
        trained = []
        for client in ("a", "b"):
            model = game.federation.population.build_model(client)
            model.load_state_dict(start)
            rows = game.steps(client, number)
            batches = [(torch.tensor(game.x[r]), torch.tensor(game.y[r])) for r in rows]
            kit.plain_training(model, batches, 0.2, anchor=start, mu=mu)
            trained.append({name: value.detach() for name, value in model.named_parameters()})
        start = {name: (7 * trained[0][name] + 5 * trained[1][name]) / 12 for name in start}
    for name, value in game.method.downlink(game.server, "a")["model"].items():
        np.testing.assert_allclose(value, start[name], atol=1e-5, err_msg=name)


def test_without_mu_it_is_fedavg(kit):
    prox = kit.Federation({"name": "fedprox", "mu": 0.0}, kit.Shallow, ROWS, training=TRAINING)
    plain = kit.Federation("fedavg", kit.Shallow, ROWS, training=TRAINING)
    for game in (prox, plain, prox, plain):
        game.round("a", "b")
    for name, value in plain.method.downlink(plain.server, "a")["model"].items():
        torch.testing.assert_close(prox.method.downlink(prox.server, "a")["model"][name], value)


def test_the_pull_needs_no_more_wire_than_fedavg(kit):
    prox = kit.Federation("fedprox", kit.Shallow, ROWS, training=TRAINING).round("a", "b")
    plain = kit.Federation("fedavg", kit.Shallow, ROWS, training=TRAINING).round("a", "b")
    assert prox.ledger.lines == plain.ledger.lines
