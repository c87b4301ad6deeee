"""MOON against plain PyTorch loops and numbers by hand: contrast, frozen and previous models, FedAvg at μ = 0."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.message import Message
from potluck.errors import ConfigError
from potluck.methods.moon import contrast

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
LR = 0.2
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": LR}}
ONE = torch.ones(1)


# --- the contrast ------------------------------------------------------------------------------------------


def test_the_contrast_of_known_angles():
    """cos is 1 to the positive, 0 and −1 to the negatives: −log(e²/(e² + 1 + e⁻²)) at τ = 0.5."""
    u, far = torch.tensor([[3.0, 0.0]]), torch.tensor([[-2.0, 0.0]])
    value = contrast(u, torch.tensor([[5.0, 0.0]]), [torch.tensor([[0.0, 4.0]]), far], torch.ones(2), 0.5)
    expected = -math.log(math.exp(2) / (math.exp(2) + 1 + math.exp(-2)))
    torch.testing.assert_close(value, torch.tensor([expected]))


def test_equal_models_give_log_2():
    u = torch.randn(4, 3)
    torch.testing.assert_close(contrast(u, u, [u], ONE, 0.5), torch.full((4,), math.log(2)))


def test_a_place_without_a_model_does_not_count():
    u, p, q = torch.randn(3, 4, 5).unbind()
    both = contrast(u, p, [q, u], torch.tensor([1.0, 0.0]), 0.5)
    assert torch.equal(both, contrast(u, p, [q], ONE, 0.5))


def test_a_small_temperature_does_not_overflow():
    """The ratio of exponentials would be inf/inf."""
    u = torch.tensor([[1.0, 0.0]], requires_grad=True)
    value = contrast(u, torch.tensor([[-1.0, 0.1]]), [torch.tensor([[1.0, 0.1]])], ONE, 1e-3)
    value.sum().backward()
    assert value.item() == pytest.approx(1990, rel=0.01)
    assert u.grad.isfinite().all()


# --- whole rounds ------------------------------------------------------------------------------------------


def represent(model, projector, x):
    return projector(model.features(x))


def by_hand(kit, game, schedule, *, mu, tau, kept, between):
    """Plain loops: frozen copies in evaluation mode, cross-entropy over [positive, negatives]/τ with label 0."""
    start = {client: game.federation.clients.build_client(client) for client in ROWS}
    model, projector = (copy.deepcopy(start["a"][part].content) for part in ("model", "projector"))
    pools = {client: [(copy.deepcopy(model), copy.deepcopy(projector))] for client in ROWS}
    for number, cohort in enumerate(schedule, start=1):
        trained = []
        for client in cohort:
            own, g = copy.deepcopy(model), copy.deepcopy(projector)
            optimizer = torch.optim.SGD([*own.parameters(), *g.parameters()], lr=LR)
            own.train()
            frozen = [(model, projector), *pools[client]]
            for one, _ in frozen:
                one.eval()
            for rows in game.steps(client, number):
                x, y = torch.tensor(game.x[rows]), torch.tensor(game.y[rows])
                u = represent(own, g, x)
                scores = own.head(u) if between else own.head(own.features(x))
                with torch.no_grad():
                    others = [represent(*one, x) for one in frozen]
                cosines = torch.stack([torch.nn.CosineSimilarity(dim=-1)(u, other) for other in others], 1)
                loss = F.cross_entropy(scores, y) + mu * F.cross_entropy(
                    cosines / tau, torch.zeros(len(y), dtype=torch.long)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            pools[client] = [(own, g), *pools[client]][:kept]
            trained.append((own, g))
        shares = [len(ROWS[client]) for client in cohort]
        model, projector = (mean(parts, shares) for parts in zip(*trained, strict=True))
    return model, projector


def mean(modules, shares):
    result = copy.deepcopy(modules[0])
    states = [module.state_dict() for module in modules]
    result.load_state_dict(
        {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) / sum(shares)
            for name in states[0]
        }
    )
    return result


@pytest.mark.parametrize(
    ("projector", "kept"), [("between", 1), ("between", 3), ("beside", 1), ("none", 2)], ids=str
)
def test_rounds_match_plain_loops(kit, projector, kept):
    options = {"name": "moon", "mu": 3.0, "tau": 0.4, "previous": kept, "projector": projector}
    options |= {"width": 5} if projector == "beside" else {}
    game = kit.Federation(options, kit.Shallow, ROWS, training=TRAINING)
    schedule = [("a", "b"), ("b", "c"), ("a", "b"), ("a", "b", "c"), ("a", "c")]
    for cohort in schedule:
        game.round(*cohort)
    between = projector == "between"
    model, g = by_hand(kit, game, schedule, mu=3.0, tau=0.4, kept=kept, between=between)
    down = game.method.downlink(game.server, "b")
    for part, module in (("model", model), ("projector", g)):
        for name, value in module.state_dict().items():
            np.testing.assert_allclose(down[part][name], value, atol=2e-5, err_msg=f"{part} {name}")


def test_the_contrast_matters(kit):
    pulled, plain = (
        kit.Federation({"name": "moon", "mu": mu}, kit.Shallow, ROWS, training=TRAINING) for mu in (3.0, 0.0)
    )
    for game in (pulled, plain):
        for _ in range(2):
            game.round("a", "b")
    name = "fc1.weight"
    one, other = (game.method.downlink(game.server, "a")["model"][name] for game in (pulled, plain))
    assert not torch.allclose(one, other, atol=1e-4)


def test_frozen_models_stay_in_evaluation_mode_and_change_nothing(kit):
    """With batch norm a global model in training mode would lose its statistics, and see other features."""
    game = kit.Federation("moon", kit.Normed, ROWS, training=TRAINING | {"batch_size": 4})
    game.round("a", "b")
    sent = {name: value.clone() for name, value in game.method.downlink(game.server, "a")["model"].items()}
    before = game.part("a", "model")
    game.round("a", "b")
    frozen = game.part("a", "global")
    for name, value in sent.items():
        assert torch.equal(frozen[f"model.{name}"], value), name
    assert frozen["model.norm.num_batches_tracked"] == before["norm.num_batches_tracked"]


def test_the_last_models_are_kept_newest_first(kit):
    """The released code's buffer of three ends up with copies of one model."""
    game = kit.Federation({"name": "moon", "previous": 3}, kit.Shallow, ROWS, training=TRAINING)
    kept = [game.initial("a")["fc1.weight"]]
    for number in range(1, 4):
        game.round("a", "b")
        kept.insert(0, game.part("a", "model")["fc1.weight"].clone())
        for place, value in enumerate(kept[:3]):
            assert torch.equal(game.part("a", "previous")[f"{place}.model.fc1.weight"], value), place
        assert game.state("a")["filled"].tolist() == [1.0] * min(3, number + 1) + [0.0] * max(0, 2 - number)


def test_a_client_that_sits_out_keeps_its_previous_model(kit):
    game = kit.Federation("moon", kit.Shallow, ROWS, training=TRAINING)
    game.round("a", "b")
    before = {name: value.clone() for name, value in game.part("a", "previous").items()}
    game.round("b", "c")
    assert all(torch.equal(value, before[name]) for name, value in game.part("a", "previous").items())


def test_predictions_come_through_the_projector_only_where_it_is_between(kit):
    for projector in ("between", "beside"):
        game = kit.Federation(
            {"name": "moon", "projector": projector}, kit.Shallow, ROWS, training=TRAINING, test=range(5)
        )
        game.round("a", "b")
        client = game.federation.clients.build_client("a")
        game.method.receive(client, Message(game.method.downlink(game.server, "a")))
        x, y = torch.tensor(game.x[:5]), torch.tensor(game.y[:5])
        z = client["model"].features(x)
        scores = client["model"].head(client["projector"](z) if projector == "between" else z)
        assert game.measure("a", "model")["loss"] == pytest.approx(
            F.cross_entropy(scores, y, reduction="sum").item(), rel=1e-4
        )


# --- FedAvg ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["all", "groups", "layers"])
@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"name": "adam", "lr": 0.02}], ids=str)
@pytest.mark.parametrize("projector", ["beside", "none"])
def test_at_mu_0_it_is_fedavg_bit_for_bit(kit, share, optimizer, projector):
    """Where scores do not come through the projector; whether there is one makes no difference."""
    models = kit.Normed if share == "all" else [kit.Shallow, kit.Deep, kit.Deep]
    training = TRAINING | {"optimizer": {"lr": LR} | optimizer}
    moon, plain = (
        kit.Federation(method | {"share": share}, models, ROWS, training=training)
        for method in ({"name": "moon", "mu": 0.0, "projector": projector}, {"name": "fedavg"})
    )
    for cohort in [("a", "b", "c"), ("b", "c"), ("a", "b")]:
        moon.round(*cohort)
        plain.round(*cohort)
    for client in ROWS:
        expected = plain.method.downlink(plain.server, client)["model"]
        ours = moon.method.downlink(moon.server, client)["model"]
        assert ours.keys() == expected.keys()
        for name, value in ours.items():
            assert torch.equal(value, expected[name]), f"{client} {name}"


# --- unlike models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["groups", "layers"])
def test_which_clients_have_one_projector(kit, share):
    models = [kit.Shallow, kit.Deep, kit.Deep]
    game = kit.Federation({"name": "moon", "share": share}, models, ROWS, training=TRAINING, per_client=True)
    initial = [game.part(client, "projector")["0.weight"] for client in ROWS]
    assert not torch.equal(initial[0], initial[1])
    game.round("a", "b", "c")
    a, b, c = (game.method.downlink(game.server, client)["projector"] for client in ROWS)
    assert a.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert torch.equal(b["0.weight"], c["0.weight"])
    assert torch.equal(a["0.weight"], b["0.weight"]) == (share == "layers")


def test_with_layers_the_projector_is_a_mean_over_all(kit):
    options = {"name": "moon", "share": "layers", "weights": "uniform"}
    game = kit.Federation(options, [kit.Shallow, kit.Deep, kit.Deep], ROWS, training=TRAINING)
    game.round("a", "b", "c")
    trained = [game.part(client, "projector")["2.weight"] for client in ROWS]
    down = game.method.downlink(game.server, "a")["projector"]["2.weight"]
    torch.testing.assert_close(down, torch.stack(trained).mean(0))


def test_unlike_widths_need_groups_or_no_projector(kit):
    models = [kit.Shallow, kit.Narrow, kit.Narrow]
    sentence = (
        r"moon: a projector that all share .* client b \(Narrow\) has 4, client a .* 6; .* or use fedavg"
    )
    with pytest.raises(ConfigError, match=sentence):
        kit.Federation({"name": "moon", "share": "layers"}, models, ROWS)
    for options in ({"share": "groups"}, {"share": "layers", "projector": "none"}):
        game = kit.Federation({"name": "moon"} | options, models, ROWS, training=TRAINING)
        game.round("a", "b", "c")
        assert len(game.round("a", "b", "c").ids) == 3


def test_the_projector_crosses_with_the_model(kit):
    for projector, more in (("between", 2 * (6 * 6 + 6)), ("none", 0)):
        options = {"name": "moon", "projector": projector}
        game = kit.Federation(options, kit.Shallow, ROWS, training=TRAINING)
        game.round("a", "b")
        size = sum(value.numel() for value in game.initial("a").values()) + more
        lines = game.round("a", "b").ledger.lines
        assert {(line["direction"], line["scalars"]) for line in lines} == {("down", size), ("up", size)}
