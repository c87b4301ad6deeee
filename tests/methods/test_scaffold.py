"""SCAFFOLD against its formulas in plain NumPy: two rounds, unequal steps, clients that sit out."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.message import Message
from potluck.core.replies import Replies

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
LR = 0.2
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": LR}}
SCHEDULE = [("a", "b"), ("b", "c"), ("a", "b")]


def numpy_scaffold(kit, game, schedule, server_lr=1.0, decay=1.0):
    """x, c and every c_k, from the paper's three lines (Option II)."""
    x = [value.double().numpy() for value in game.initial("a").values()]
    c = [np.zeros_like(value) for value in x]
    own = {client: [np.zeros_like(value) for value in x] for client in ROWS}
    for number, cohort in enumerate(schedule, start=1):
        rate, moves, changes = LR * decay ** (number - 1), [], []
        for client in cohort:
            y, steps = [value.copy() for value in x], game.steps(client, number)
            for rows in steps:
                gradients = kit.Regression.gradient(*y, game.x[rows], game.y[rows])
                for place, gradient in enumerate(gradients):
                    y[place] = y[place] - rate * (gradient + c[place] - own[client][place])
            new = [
                ck - s + (a - b) / (len(steps) * rate)
                for ck, s, a, b in zip(own[client], c, x, y, strict=True)
            ]
            changes.append([after - before for after, before in zip(new, own[client], strict=True)])
            moves.append([after - before for after, before in zip(y, x, strict=True)])
            own[client] = new
        x = [
            value + server_lr * np.mean(move, 0)
            for value, move in zip(x, zip(*moves, strict=True), strict=True)
        ]
        c = [
            value + np.sum(change, 0) / len(ROWS)
            for value, change in zip(c, zip(*changes, strict=True), strict=True)
        ]
    return x, c, own


def assert_same(game, expected):
    x, c, own = expected
    down = game.method.downlink(game.server, "a")
    for place, name in enumerate(("head.weight", "head.bias")):
        np.testing.assert_allclose(down["model"][name], x[place], atol=1e-5, err_msg=f"x, {name}")
        np.testing.assert_allclose(down["control"][name], c[place], atol=1e-5, err_msg=f"c, {name}")
        for client in ROWS:
            held = game.part(client, "own_control")[name]
            np.testing.assert_allclose(held, own[client][place], atol=1e-5, err_msg=f"c_{client}, {name}")


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("variate", ["mean", "option2"])
def test_rounds_with_partial_cohorts_match_the_formulas(kit, variate):
    game = kit.Federation({"name": "scaffold", "variate": variate}, kit.Linear, ROWS, training=TRAINING)
    for cohort in SCHEDULE:
        game.round(*cohort)
    assert len(game.steps("a", 1)) != len(game.steps("b", 1))
    assert_same(game, numpy_scaffold(kit, game, SCHEDULE))


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("variate", ["mean", "option2"])
def test_server_rate_and_decaying_client_rate(kit, variate):
    options = {"name": "scaffold", "variate": variate, "server_lr": 0.5}
    game = kit.Federation(options, kit.Linear, ROWS, training=TRAINING | {"lr_decay": 0.5})
    for cohort in SCHEDULE:
        game.round(*cohort)
    assert_same(game, numpy_scaffold(kit, game, SCHEDULE, server_lr=0.5, decay=0.5))


def test_up_and_down_are_twice_the_model(kit):
    game = kit.Federation("scaffold", kit.Linear, ROWS, training=TRAINING)
    game.round("a", "b")
    size = sum(value.numel() for value in game.initial("a").values())
    lines = game.round("a", "b").ledger.lines
    assert {(line["direction"], line["scalars"]) for line in lines} == {("up", 2 * size), ("down", 2 * size)}


def test_with_adam_the_variate_is_the_mean_raw_gradient_along_the_way(kit):
    training = {"epochs": 5, "batch_size": 3, "optimizer": {"name": "adam", "lr": 0.05}}
    game = kit.Federation("scaffold", kit.Linear, ROWS, training=training)
    game.round("a", "b", "c")
    for client in ROWS:
        model = game.federation.population.build_model(client)
        optimizer, gradients = torch.optim.Adam(model.parameters(), lr=0.05), []
        for rows in game.steps(client, 1):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.tensor(game.x[rows])), torch.tensor(game.y[rows])).backward()
            gradients.append(model.head.weight.grad.clone())
            optimizer.step()
        held = game.part(client, "own_control")["head.weight"]
        torch.testing.assert_close(held, torch.stack(gradients).mean(0), atol=1e-5, rtol=0)


def test_with_adam_the_variates_stay_within_the_gradients_for_many_rounds(kit):
    training = {"epochs": 5, "batch_size": 3, "optimizer": {"name": "adam", "lr": 0.05}}
    game = kit.Federation("scaffold", kit.Linear, ROWS, training=training)
    for number in range(15):
        game.round(*(("a", "b") if number % 2 else ("b", "c")))
    largest = np.abs(game.x).max()  # no entry of a softmax regression's gradient is larger
    control = torch.cat([value.flatten() for value in game.server["control"].tensors().values()])
    weights = torch.cat([value.flatten() for value in game.server["weights"].tensors().values()])
    assert control.abs().max() <= largest
    assert weights.isfinite().all()


def test_buffers_have_no_variate_and_are_averaged(kit):
    training = TRAINING | {"batch_size": 8, "epochs": 1}
    averaged = kit.Federation({"name": "scaffold", "server_lr": 0.5}, kit.Normed, ROWS, training=training)
    plain = kit.Federation({"name": "fedavg", "weights": "uniform"}, kit.Normed, ROWS, training=training)
    for game in (averaged, plain):
        game.round("a", "b")
    down = averaged.method.downlink(averaged.server, "a")
    assert "norm.running_mean" in down["model"]
    assert "norm.running_mean" not in down["control"]
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(
            down["model"][name], plain.method.downlink(plain.server, "a")["model"][name]
        )


class TestModelsOfTwoDepths:
    """Layer by layer, c is divided by the number of clients that own the layer."""

    def game(self, kit, **options):
        method = {"name": "scaffold", "share": "layers", **options}
        return kit.Federation(method, [kit.Shallow, kit.Deep, kit.Deep], ROWS, training=TRAINING)

    def test_known_changes(self, kit):
        game = self.game(kit)
        game.round("a", "b", "c")
        changes = {"a": {"fc1.bias": 1.0}, "b": {"fc1.bias": 2.0, "fc2.bias": 4.0}}
        replies = Replies(
            {
                client: Message({"control": {name: torch.full((6,), value) for name, value in held.items()}})
                for client, held in changes.items()
            },
            game.server.cards,
        )
        shares = game.method.reach(replies, CohortOf(game))
        means = game.method.mean(replies, "control", "uniform")
        sums = {key.split(":")[0]: (means[key] * shares[key])[0].item() for key in means}
        assert sums == pytest.approx({"fc1.bias": 3 / 3, "fc2.bias": 4 / 2})

    def test_a_deeper_client_joins_after_the_shallow_one_made_variates(self, kit):
        game = self.game(kit)
        game.round("a")
        cohort = game.round("b")
        assert cohort.failures == {}
        assert cohort.ids == ("b",)
        assert set(game.method.downlink(game.server, "c")["control"]) == set(game.initial("c"))

    def test_each_group_is_a_scaffold_of_its_own(self, kit):
        models = [kit.Linear, kit.Linear, kit.Shallow]
        both = kit.Federation({"name": "scaffold", "share": "groups"}, models, ROWS, training=TRAINING)
        alone = kit.Federation("scaffold", kit.Linear, {k: ROWS[k] for k in ("a", "b")}, training=TRAINING)
        for _ in range(2):
            both.round("a", "b", "c")
            alone.round("a", "b")
        ours, theirs = both.method.downlink(both.server, "b"), alone.method.downlink(alone.server, "b")
        for part in ("model", "control"):
            for name, value in theirs[part].items():
                torch.testing.assert_close(ours[part][name], value)


class CohortOf:
    """As much of a cohort as counting needs."""

    def __init__(self, game):
        self.cards, self.total = game.server.cards, len(game.server.cards)


def test_a_client_without_a_step_changes_no_variate(kit):
    rows = {"a": range(0, 7), "b": range(7, 12), "c": []}
    for variate in ("mean", "option2"):
        game = kit.Federation({"name": "scaffold", "variate": variate}, kit.Linear, rows, training=TRAINING)
        game.round("a", "b")
        game.round("a", "c")
        assert game.accepted["c"] == 2
        assert all(not value.any() for value in game.part("c", "own_control").values())


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("share", ["all", "groups", "layers"])
@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"name": "adam", "lr": 0.02}], ids=str)
def test_with_zero_variates_it_is_fedavg_with_uniform_weights(kit, share, optimizer):
    """As in every first round; here variates are kept at zero for two more. η_g is 1."""
    models = kit.Normed if share == "all" else [kit.Shallow, kit.Deep, kit.Deep]
    training = TRAINING | {"optimizer": {"lr": LR} | optimizer}
    scaffold, plain = (
        kit.Federation({"name": name, "share": share, "weights": "uniform"}, models, ROWS, training=training)
        for name in ("scaffold", "fedavg")
    )
    scaffold.method.control_change = lambda client, moved, steps: {
        name: torch.zeros_like(value) for name, value in client["own_control"].tensors().items()
    }
    for cohort in [("a", "b", "c"), ("b", "c"), ("a", "b")]:
        scaffold.round(*cohort)
        plain.round(*cohort)
    for client in ROWS:
        expected = plain.method.downlink(plain.server, client)["model"]
        ours = scaffold.method.downlink(scaffold.server, client)["model"]
        for name, value in ours.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-9, msg=f"{client} {name}")
