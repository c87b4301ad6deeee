"""Local against a plain loop: every client on its own, nothing on the wire."""

import pytest
import torch

from potluck.core.method import client_step
from potluck.core.state import Moments
from potluck.methods.local import Local
from potluck.training.fit import fit

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def test_it_is_a_plain_loop_that_goes_on_from_round_to_round(kit):
    game = kit.Federation("local", kit.Shallow, ROWS, training=TRAINING)
    model = game.federation.population.build_model("a")
    for number in (1, 2):
        game.round("a", "b")
        batches = [
            (torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps("a", number)
        ]
        assert [len(y) for _, y in batches] == [3, 3, 1] * 2
        kit.plain_training(model, batches, lr=0.2)
    for name, value in model.named_parameters():
        assert torch.allclose(game.part("a", "model")[name], value, atol=1e-5), name


def test_nothing_crosses_and_nobody_disturbs_anybody(kit):
    together = kit.Federation("local", kit.Shallow, ROWS, training=TRAINING)
    alone = kit.Federation("local", kit.Shallow, ROWS, training=TRAINING)
    cohorts = [together.round("a", "b") for _ in range(3)]
    for _ in range(3):
        alone.round("b")
    assert all(cohort.ledger.lines == [] for cohort in cohorts)
    for name, value in together.state("b").items():
        assert torch.equal(value, alone.state("b")[name]), name


def test_an_unsampled_client_stays_as_it_is(kit):
    game = kit.Federation("local", kit.Shallow, ROWS, training=TRAINING)
    before = game.state("b")
    game.round("a")
    assert all(torch.equal(before[name], value) for name, value in game.state("b").items())


def keeping(lifetime):
    """Local training, twice a round, with momentum that outlives a call."""

    class Keeping(Local):
        name = ""

        def client_state(self, task, model):
            return {"model": model, "moments": Moments(lifetime)}

        def round(self, server, clients):
            clients.ask(self.train)
            clients.ask(self.train)

        @client_step
        def train(self, client):
            fit(client, self.loss, epochs=1, moments=client["moments"].content)

    return Keeping


@pytest.mark.parametrize("lifetime", ["run", "round"])
def test_momentum_lives_as_long_as_it_was_declared_to(kit, lifetime):
    """Against one optimiser for the whole run, or a new one per round; client b shares the live client with a."""
    training = {"batch_size": 8, "optimizer": {"lr": 0.1, "momentum": 0.9}}
    game = kit.Federation(keeping(lifetime), kit.Shallow, ROWS, training=training)
    model = game.federation.population.build_model("a")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.tensor(game.x[:7]), torch.tensor(game.y[:7])
    for number in range(3):
        game.round("a", "b")
        if lifetime == "round" and number:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, value in model.named_parameters():
        assert torch.allclose(game.part("a", "model")[name], value, atol=1e-5), name
