"""LG-FedAvg against plain PyTorch loops: shared heads over private layers, clients that sit out, and Local."""

import pytest
import torch

from potluck.errors import ConfigError

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
LR = 0.2
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": LR}}
SCHEDULE = [("a", "b"), ("b", "c"), ("a", "c")]


def play(kit, options, models, schedule=SCHEDULE):
    game = kit.Federation({"name": "lg-fedavg"} | options, models, ROWS, training=TRAINING)
    for cohort in schedule:
        game.round(*cohort)
    return game


def by_hand(kit, game, shared, weights):
    """Every client's weights and the shared ones, by a plain loop over the rounds."""
    start = game.federation.server()
    common = {
        f"{layer}.{name}": value.clone() for layer in shared for name, value in start[layer].state().items()
    }
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    for number, cohort in enumerate(SCHEDULE, start=1):
        for client in cohort:
            models[client].load_state_dict(models[client].state_dict() | common)
            rows = game.steps(client, number)
            batches = [(torch.tensor(game.x[r]), torch.tensor(game.y[r])) for r in rows]
            kit.plain_training(models[client], batches, LR)
        shares = {client: len(ROWS[client]) if weights == "samples" else 1 for client in cohort}
        common = {
            name: sum(shares[one] * models[one].state_dict()[name] for one in cohort) / sum(shares.values())
            for name in common
        }
    return models, common


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("layers", [("head",), ("fc1", "head")])
def test_three_rounds_of_two_depths(kit, weights, layers):
    game = play(kit, {"layers": layers, "weights": weights}, [kit.Shallow, kit.Deep, kit.Deep])
    private, common = by_hand(kit, game, layers, weights)
    down = game.method.downlink(game.server, "b")  # b sat out the last round and gets the newest all the same
    for name, value in common.items():
        layer, _, key = name.partition(".")
        torch.testing.assert_close(down[layer][key], value, msg=name)
    for client, model in private.items():
        held = game.part(client, "model")
        for name, value in model.state_dict().items():
            torch.testing.assert_close(held[name], value, msg=f"{client} {name}")


def test_the_mean_of_the_released_code_is_unweighted(kit):
    assert kit.Federation("lg-fedavg", kit.Linear, ROWS).method.config.weights == "uniform"


def test_all_start_from_one_head_and_keep_their_own_layers(kit):
    still = TRAINING | {"optimizer": {"lr": 1e-12}}
    game = kit.Federation(
        "lg-fedavg", [kit.Shallow, kit.Deep, kit.Deep], ROWS, training=still, per_client=True
    )
    head = {name: value.clone() for name, value in game.server["head"].state().items()}
    game.round("a", "b", "c")
    for client in ROWS:
        held = game.part(client, "model")
        torch.testing.assert_close(held["head.weight"], head["weight"])
        torch.testing.assert_close(held["fc1.weight"], game.initial(client)["fc1.weight"])


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_statistics_of_a_shared_layer(kit, buffers):
    """They go with it, or stay at home; the count of batches always stays."""
    options = {"name": "lg-fedavg", "layers": ["norm", "head"], "buffers": buffers}
    game = kit.Federation(options, kit.Normed, ROWS, training=TRAINING)
    game.round("a", "b")
    down = game.method.downlink(game.server, "c")["norm"]
    assert set(down) == {"weight", "bias"} | (
        {"running_mean", "running_var"} if buffers == "average" else set()
    )
    a, b = (game.part(client, "model") for client in ("a", "b"))
    for name, value in down.items():
        torch.testing.assert_close(value, (a[f"norm.{name}"] + b[f"norm.{name}"]) / 2)


def test_only_the_head_crosses(kit):
    game = kit.Federation("lg-fedavg", [kit.Shallow, kit.Deep, kit.Deep], ROWS, training=TRAINING)
    size = 6 * kit.classes + kit.classes
    lines = game.round("a", "b", "c").ledger.lines
    assert {(line["direction"], line["scalars"]) for line in lines} == {("down", size), ("up", size)}


def test_with_everything_local_it_is_local_bit_for_bit(kit):
    models = [kit.Shallow, kit.Deep, kit.Narrow]
    shared, alone = (
        kit.Federation(method, models, ROWS, training=TRAINING)
        for method in ({"name": "lg-fedavg", "layers": []}, "local")
    )
    for cohort in SCHEDULE:
        assert all(line["scalars"] == 0 for line in shared.round(*cohort).ledger.lines)
        alone.round(*cohort)
    for client in ROWS:
        for name, value in alone.state(client).items():
            assert torch.equal(shared.state(client)[name], value), f"{client} {name}"
    [sentence] = shared.method.advice(shared.federation.population)
    assert "nothing is shared" in sentence


@pytest.mark.parametrize(
    ("layers", "models", "sentence"),
    [
        (
            ["head"],
            ("Shallow", "Narrow", "Deep"),
            r"the head of client b .* is weight 4×4, bias 4, .*rep_dim.*, or use fedavg",
        ),
        (
            ["fc2"],
            ("Deep", "Shallow", "Deep"),
            r"client b .* has no layer 'fc2' with parameters .* use fedavg",
        ),
        (["head", ""], ("Deep", "Deep", "Deep"), r"client a .* has no layer ''"),
    ],
)
def test_models_that_do_not_fit_are_refused(kit, layers, models, sentence):
    kinds = [getattr(kit, name) for name in models]
    with pytest.raises(ConfigError, match=f"lg-fedavg: {sentence}"):
        kit.Federation({"name": "lg-fedavg", "layers": layers}, kinds, ROWS)
