"""FjORD against hand-made means and plain PyTorch: nested averages, drawn widths, distillation, statistics."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.task import Batch
from potluck.errors import ConfigError
from potluck.testing.bench import Bench
from width_nets import net

ROWS = {"a": range(0, 8), "b": range(8, 14), "c": range(14, 19)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.1}}


def play(kit, options=None, models=None, rows=ROWS):
    return kit.Federation(
        {"name": "fjord", **(options or {})}, models or [net(6), net(4), net(2)], rows, training=TRAINING
    )


def live(game, client):
    found = game.federation.clients.build_client(client)
    game.method.receive(found, Message(game.method.downlink(game.server, client)))
    return found


# --- the server -------------------------------------------------------------------------------------------


def test_the_mean_is_flowers_from_wide_to_narrow(kit):
    """For each width from large to small the inner block becomes the mean, by samples, of those that hold it."""
    game = play(kit)
    draw = Rng(0).generator()
    sent = {
        client: {
            name: torch.randn(shape, generator=draw)
            for name, shape in game.server.cards[client].names.items()
        }
        for client in ROWS
    }
    made = Replies.of({client: {"model": own} for client, own in sent.items()}, dict.fromkeys(ROWS, 1))
    found = game.method.mean(game.server, Replies(made.messages, game.server.cards))
    expected = game.server["parent"].state()["fc2.weight"].clone()
    widths = {"a": 6, "b": 4, "c": 2}
    for width in (6, 4, 2):
        holders = [client for client, own in widths.items() if own >= width]
        samples = [len(ROWS[client]) for client in holders]
        expected[:width, :width] = sum(
            count * sent[client]["fc2.weight"][:width, :width]
            for client, count in zip(holders, samples, strict=True)
        ) / sum(samples)
    torch.testing.assert_close(found["fc2.weight"], expected)
    torch.testing.assert_close(
        found["head.bias"], sum(len(ROWS[c]) * sent[c]["head.bias"] for c in ROWS) / 19
    )


def test_statistics_are_averaged_over_the_clients_that_hold_the_width(kit):
    game = play(kit, models=[net(6, True), net(4, True), net(4, True)])
    game.round("a", "b", "c")
    kept = game.server["statistics"].state()["0.running_mean"]
    own = {client: game.part(client, "statistics")["0.running_mean"] for client in ROWS}
    assert [tuple(value.shape) for value in own.values()] == [(2, 6), (1, 4), (1, 4)]
    mean = sum(len(ROWS[client]) * own[client][0, :4] for client in ROWS) / 19
    torch.testing.assert_close(kept[0, :4], mean)
    torch.testing.assert_close(kept[1], own["a"][1])


def test_a_client_is_evaluated_with_the_statistics_of_its_width(kit):
    game = play(kit, models=[net(6, True), net(4, True), net(4, True)])
    game.round("a", "b", "c")
    kept = game.server["statistics"].state()["0.running_var"]
    assert torch.equal(live(game, "a")["model"].norm.running_var, kept[1])
    assert torch.equal(live(game, "b")["model"].norm.running_var, kept[0, :4])
    assert not any("running" in name for name in game.method.downlink(game.server, "a")["model"])


# --- the client -------------------------------------------------------------------------------------------


def drawn_by(game, client, batches=60):
    """The widths that batches of a client were computed at."""
    seen, own = [], live(game, client)
    batch = Batch(torch.zeros(2, 3), torch.tensor([0, 1]))
    scores = type(game.method).scores

    def watch(method, client, batch, width):
        seen.append(int(width))
        return scores(method, client, batch, width)

    with mock.patch.object(type(game.method), "scores", watch), Rng(3).as_default():
        for _ in range(batches):
            game.method.loss(own, batch)
    return seen


def test_widths_up_to_the_own_one_are_drawn_alike_often(kit):
    game = play(kit, {"widths": [net(3)]})
    assert [shapes["fc1.bias"] for shapes in game.method.widths] == [(2,), (3,), (4,), (6,)]
    counts = [drawn_by(game, "a", 400).count(width) for width in range(4)]
    assert min(counts) > 70
    assert {*drawn_by(game, "b")} == {0, 1, 2}
    assert drawn_by(game, "c") == []  # the narrowest has nothing to draw from


def test_a_narrow_batch_trains_the_inner_block_alone(kit):
    game = play(kit)
    own = live(game, "a")
    x, y = torch.sin(torch.arange(9.0)).view(3, 3), torch.tensor([0, 1, 2])
    with mock.patch("torch.randint", return_value=torch.tensor([0])):
        loss = game.method.loss(own, Batch(x, y))
    weights = {
        name: value[: 2 if "head" not in name else 4] for name, value in own["model"].tensors().items()
    }
    hidden = F.relu(x @ weights["fc1.weight"].T + weights["fc1.bias"])
    hidden = F.relu(hidden @ weights["fc2.weight"][:, :2].T + weights["fc2.bias"])
    scores = hidden @ weights["head.weight"][:, :2].T + weights["head.bias"]
    torch.testing.assert_close(loss, F.cross_entropy(scores, y))
    [gradient] = torch.autograd.grad(loss, [own["model"].fc2.weight])
    assert gradient[:2, :2].any()
    gradient[:2, :2] = 0
    assert not gradient.any()


def test_distillation_by_hand_and_as_in_flower(kit):
    game = play(kit, {"distil": True, "alpha": 0.25, "temperature": 2.0})
    own = live(game, "a")
    model, x, y = own["model"].module, torch.sin(torch.arange(9.0)).view(3, 3), torch.tensor([0, 1, 2])
    width = torch.tensor([1])
    with model.ordered_dropout.at(width):
        small = model(x)
    teacher = (model(x) / 2).softmax(1).detach()
    gap = (teacher * (teacher.log() - (small / 2).log_softmax(1))).sum(1).mean()
    with mock.patch("torch.randint", return_value=width):
        terms = game.method.loss(own, Batch(x, y))
    torch.testing.assert_close(terms["own"], F.cross_entropy(model(x), y))
    torch.testing.assert_close(terms["drawn"], 0.75 * F.cross_entropy(small, y))
    torch.testing.assert_close(terms["distil"], 0.25 * gap)

    game.method.config = game.method.Config(name="fjord", distil=True)
    with mock.patch("torch.randint", return_value=width):
        terms = game.method.loss(own, Batch(x, y))
    parameters = [*model.parameters()]
    found = torch.autograd.grad(sum(terms.values()), parameters)
    full = model(x)
    with model.ordered_dropout.at(width):
        flower = F.cross_entropy(full, y) + F.cross_entropy(model(x), full.detach().softmax(1))
    for mine, theirs in zip(found, torch.autograd.grad(flower, parameters), strict=True):
        torch.testing.assert_close(mine, theirs)


# --- equivalence, models, refusals ------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_at_one_width_it_is_fedavg(kit, weights):
    """From the same weights, with either weighting; running statistics are then the model's own."""
    model = net(5, norm=True)
    plain = kit.Federation({"name": "fedavg", "weights": weights}, model, ROWS, training=TRAINING)
    nested = play(kit, {"weights": weights}, model)
    first = plain.federation.clients.build_client("a")["model"].wire()
    nested.server["parent"].load({name: value.clone() for name, value in first.items()})
    for game in (plain, nested):
        game.round("a", "b", "c")
        game.round("a", "c")
    ours, theirs = (game.method.downlink(game.server, "b")["model"] for game in (nested, plain))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    "models",
    [
        [{"name": "resnet152", "width": 2}, {"name": "resnet152", "width": 1}],
        [{"name": "vit-b16", "scale": 0.03}, {"name": "vit-b16", "scale": 0.015}],
    ],
    ids=["deep", "vit"],
)
def test_deep_residual_networks_and_transformers_play_a_round(models):
    training = {"epochs": 1, "batch_size": 16, "optimizer": {"lr": 0.01}}
    played = Bench("fjord", models, training=training).play([("0", "1")])
    assert not played.cohorts[0].failures
    state = played.rounds.server.snapshot()
    assert all(bool(value.isfinite().all()) for value in state.values())


def refused(models, **options):
    with pytest.raises(ConfigError) as error:
        Bench({"name": "fjord", **options}, models).build()
    return str(error.value)


def test_what_cannot_work_is_refused():
    assert "client 1 (mlp-small) has a tensor 'fc1.weight'" in refused(["conv-large", "mlp-small"])
    assert "alpha does nothing with distil: false" in refused("mlp-small", alpha=0.5)
    wider = refused("mlp-small", widths=[{"name": "mlp-small", "scale": 2.0}])
    assert wider.startswith("fjord: a model of method.widths has 'fc1.weight' of shape (256, 64)")
    assert "neither is inside the other" in refused(
        [{"name": "mlp-small", "rep_dim": 64}, {"name": "mlp-small", "scale": 0.9, "rep_dim": 8},
         {"name": "mlp-small", "scale": 0.5, "rep_dim": 20}]
    )  # fmt: skip


def test_at_home_statistics_do_not_cross(kit):
    game = play(kit, {"buffers": "local"}, [net(6, True), net(4, True), net(4, True)])
    game.round("a", "b", "c")
    assert {*game.method.downlink(game.server, "a")} == {"model"}
    assert game.part("a", "statistics")["0.running_mean"].any()
