"""Local against a plain loop: every client on its own, nothing on the wire."""

import torch

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def test_it_is_a_plain_loop_that_goes_on_from_round_to_round(kit):
    game = kit.Federation("local", kit.Shallow, ROWS, training=TRAINING)
    model = game.world.build_model("a")
    for number in (1, 2):
        game.round("a", "b")
        batches = [(torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps("a", number)]
        assert [len(y) for _, y in batches] == [3, 3, 1] * 2
        kit.plain_training(model, batches, lr=0.2)
    for name, value in model.named_parameters():
        assert torch.allclose(game.part("a", "model")[name], value, atol=1e-6), name


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
