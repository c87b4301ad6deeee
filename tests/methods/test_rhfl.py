"""RHFL: its losses and weights by hand, a round against a plain loop over pairs of clients, what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.replies import Replies
from potluck.core.streams import shuffled_batches
from potluck.errors import ConfigError
from potluck.methods.rhfl import RHFL

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 16)}
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.1}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
CHOSEN = {"name": "rhfl", "samples": 8, "batch": 4, "pretrain_epochs": 2}


def federation(kit, public=PUBLIC, lacking=None, y=None, **options):
    models = [kit.Shallow, kit.Deep, kit.Side]
    chosen = {**CHOSEN, **options}
    return kit.Federation(chosen, models, ROWS, training=TRAINING, public=public, lacking=lacking, y=y)


def sce(logits, y, alpha=0.1, beta=1.0):
    """As it is written: labels of 0 and 1, of which no logarithm is below log 1e-4."""
    labels = torch.zeros_like(logits)
    labels[torch.arange(len(y)), y] = 1
    reverse = -(logits.softmax(1) * labels.clamp(1e-4, 1).log()).sum(1)
    plain = -(labels * logits.log_softmax(1)).sum(1)
    return (alpha * plain + beta * reverse).mean()


def method(**options):
    return RHFL(RHFL.Config(name="rhfl", **options))


def test_the_symmetric_loss_by_hand():
    """Two classes, half and half: CE = log 2, RCE = ½·(0 + 4·log 10)."""
    found = method().sce(torch.zeros(1, 2), torch.tensor([1]))
    assert float(found) == pytest.approx(0.1 * math.log(2) + 0.5 * 4 * math.log(10), rel=1e-6)
    logits, y = (
        torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
        torch.tensor([0, 3, 1, 1, 2, 0]),
    )
    for alpha, beta in ((0.1, 1.0), (1.0, 0.0), (0.0, 2.0)):
        found = method(alpha=alpha, beta=beta).sce(logits, y).mean()
        torch.testing.assert_close(found, sce(logits, y, alpha, beta))


def test_a_mixture_gives_the_gradient_of_all_pairs():
    """Σ_j w_j·KL(p_j ‖ p_k) and the divergence from Σ_j w_j·p_j, with weights that do not sum to 1."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    others = [torch.randn(5, 4, generator=draw, dtype=torch.float64).softmax(1) for _ in range(3)]
    weights = [0.3, 0.2, 0.1]
    own = logits.log_softmax(1)
    pairs = sum(w * F.kl_div(own, p, reduction="batchmean") for w, p in zip(weights, others, strict=True))
    mixture = sum(w * p for w, p in zip(weights, others, strict=True))
    together = F.kl_div(own, mixture, reduction="batchmean")
    one, other = (torch.autograd.grad(term, [logits], retain_graph=True)[0] for term in (pairs, together))
    torch.testing.assert_close(one, other)
    assert float(pairs.detach()) != pytest.approx(float(together.detach()))


def confidence(now, before, **options):
    as_tensors = ({name: torch.tensor(value) for name, value in one.items()} for one in (now, before))
    return {name: float(value) for name, value in method(**options).confidence(*as_tensors).items()}


def test_weights_as_published_where_all_losses_fell():
    """q = 1, ½ and ½ of their sum 2."""
    found = confidence({"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 2.0, "b": 3.0, "c": 6.0}, eta=0.8)
    powers = [math.exp(1 / 2 + 0.8 * share) for share in (0.5, 0.25, 0.25)]
    assert list(found.values()) == pytest.approx([power / sum(powers) for power in powers])


def test_the_first_round_is_uniform():
    assert confidence({"a": 1.0, "b": 2.0, "c": 3.0}, {}) == {"a": 0.5, "b": 0.5, "c": 0.5}
    assert confidence({"a": 1.0}, {}) == {"a": 1.0}


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 1.0}),  # q = ½ and −½: their sum is 0
        ({"a": 1.0, "b": 2.0}, {"a": 0.9, "b": 0.5}),  # both rose, b more: their sum is negative
    ],
)
def test_sums_that_are_zero_or_negative_do_not_turn_the_order_around(now, before):
    found = confidence(now, before)
    assert found["a"] > found["b"] > 0
    assert found["a"] + found["b"] == pytest.approx(1)
    assert found["a"] < math.exp(0.5) / (math.exp(0.5) + math.exp(-0.5)) + 1e-6


def test_where_nothing_changed_or_is_known_all_count_alike():
    assert list(confidence({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}).values()) == pytest.approx([0.5, 0.5])
    assert list(confidence({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}).values()) == pytest.approx([0.5, 0.5])
    found = confidence({"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 2.0})
    assert found["a"] > found["b"] == found["c"]


@pytest.mark.parametrize("told", [0.0, 3e38, 1e-38])
def test_a_lie_about_a_loss_gives_finite_weights(told):
    for now, before in (({"a": told, "b": 1.0}, {"a": 3e38, "b": 1.1}), ({"a": 1.0, "b": 1.0}, {"a": told})):
        found = confidence(now, before)
        assert all(0 < value < 1 for value in found.values())


def test_mixtures_leave_out_oneself():
    said = {"a": 0.1, "b": 0.5, "c": 0.9}
    contents = {name: {"scores": torch.tensor([[value, 1 - value]])} for name, value in said.items()}
    replies = Replies.of(contents, dict.fromkeys(said, 1))
    weights = {name: torch.tensor(value) for name, value in (("a", 0.2), ("b", 0.3), ("c", 0.4))}
    heard = method().mixtures(replies, weights)
    torch.testing.assert_close(
        heard("b")["scores"], torch.tensor([[0.2 * 0.1 + 0.4 * 0.9, 0.2 * 0.9 + 0.4 * 0.1]])
    )


def own_loss(game, client, model):
    rows = list(ROWS[client])
    with torch.no_grad():
        return float(sce(model(torch.tensor(game.x[rows])), torch.tensor(game.y[rows])))


def pretrain(game, client, model):
    """Two epochs: those of `training`, then another one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in [*game.steps(client, 1, 0), *game.steps(client, 1, 1)]:
        step(optimizer, sce(model(torch.tensor(game.x[rows])), torch.tensor(game.y[rows])))


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def by_hand(losses, before):
    if before is None:
        return dict.fromkeys(losses, 1 / 2)
    quality = {client: (before[client] - losses[client]) / losses[client] for client in losses}
    total = sum(map(abs, quality.values()))
    powers = {client: math.exp(1 / 2 + 0.5 * one / total) for client, one in quality.items()}
    return {client: power / sum(powers.values()) for client, power in powers.items()}


@pytest.mark.parametrize("exchange", ["round", "batch"])
def test_two_rounds_are_a_plain_loop(kit, exchange):
    """Every pair of clients has its own divergence there, and weights are plain numbers."""
    game = federation(kit, exchange=exchange)
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    x, before = torch.tensor(PUBLIC), None
    for number in (1, 2):
        game.round(*ROWS)
        if number == 1:
            for client, model in models.items():
                pretrain(game, client, model)
        losses = {client: own_loss(game, client, model) for client, model in models.items()}
        weights, before = by_hand(losses, before), losses
        public = game.federation.population.public()
        drawn = public.order(number, 8)[0]
        batches = shuffled_batches(drawn, 4, 1, "keep", public.rng.child("round", number, "batches"))
        optimizers = {client: torch.optim.SGD(model.parameters(), lr=0.1) for client, model in models.items()}
        for place, rows in enumerate(batches):
            if place == 0 or exchange == "batch":
                with torch.no_grad():
                    said = {client: model(x).softmax(1) for client, model in models.items()}
            for client, model in models.items():
                own = model(x[rows]).log_softmax(1)
                pairs = [
                    weights[other] * F.kl_div(own, said[other][rows], reduction="batchmean")
                    for other in models
                    if other != client
                ]
                step(optimizers[client], sum(pairs))
        for client, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for rows in game.steps(client, number, 2 if number == 1 else 0):
                step(optimizer, sce(model(torch.tensor(game.x[rows])), torch.tensor(game.y[rows])))
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}", atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize(("exchange", "messages"), [("round", [8]), ("batch", [4, 4])])
def test_what_crosses(kit, exchange, messages):
    lines = federation(kit, exchange=exchange).round(*ROWS).ledger.lines
    for client in ROWS:
        own = [line for line in lines if line["client"] == client]
        up, down = ([line["names"] for line in own if line["direction"] == way] for way in ("up", "down"))
        assert up == [{"scores": messages[0] * 4, "loss": 1}, *({"scores": one * 4} for one in messages[1:])]
        assert down == [{"scores": one * 4} for one in messages]


def test_probabilities_are_between_0_and_1(kit):
    field = federation(kit).method.up_contract("score")["scores"]
    assert (field.at_least, field.at_most) == (0, "1")


def test_only_those_in_a_whole_round_are_remembered(kit):
    game = federation(kit)
    game.round("a", "b")
    assert sorted(game.server["losses"].tensors()) == sorted(game.server["met"].tensors()) == ["a", "b"]


def test_a_sample_that_a_client_lacks_is_neither_said_nor_learned(kit):
    """Client a lacks everything: its public phase changes nothing, and others hear nothing of it."""
    alone = federation(kit, lacking={"a": range(10)})
    alone.round("a", "b")
    heard = federation(kit)
    heard.round("a")
    for name, value in heard.part("a", "model").items():
        torch.testing.assert_close(alone.part("a", "model")[name], value, msg=name)


def test_private_epochs(kit):
    """|P| = 10: with 7, 5 and 4 samples 1, 2 and 2 epochs as published."""
    game = federation(kit, private_epochs="published", pretrain_epochs=0)
    clients = {client: game.federation.clients.build_client(client) for client in ROWS}
    assert [game.method.private_epochs(client) for client in clients.values()] == [1, 2, 2]
    assert federation(kit, private_epochs=3).method.private_epochs(clients["a"]) == 3
    assert federation(kit).method.private_epochs(clients["a"]) == 1


def test_the_released_codes_values_are_the_defaults(kit):
    config = RHFL.Config()
    assert (config.eta, config.alpha, config.beta, config.pretrain_epochs) == (0.5, 0.1, 1.0, 40)
    whole = federation(kit, public=np.zeros((5003, 3), np.float32), samples=None, batch=None).method
    assert (whole.samples, whole.batch) == (5000, 256)


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match="rhfl needs public data"):
        federation(kit, public=None)
    with pytest.raises(ConfigError, match=r"rhfl: client a \(Shallow\) has 1 class, .* or use local"):
        federation(kit, y=np.zeros(16, dtype=np.int64))
    with pytest.raises(ConfigError, match=r"method.batch of 11 samples is larger than the public data"):
        federation(kit, batch=11)
    with pytest.raises(ConfigError, match="alpha and beta are 0"):
        RHFL.Config(alpha=0, beta=0)
