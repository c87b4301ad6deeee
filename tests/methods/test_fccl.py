"""FCCL: the cross-correlation by a few lines of its own, rounds against a plain loop, teachers, the own slot."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.streams import shuffled_batches
from potluck.errors import ConfigError
from potluck.methods.fccl import FCCL, correlation_loss

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 16)}
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 0.1}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((11, 3)).astype(np.float32)
CHOSEN = {"name": "fccl", "samples": 11, "batch": 5, "pretrain_epochs": 2}


def federation(kit, public=PUBLIC, y=None, **options):
    chosen = {**CHOSEN, **options}
    return kit.Federation(
        chosen, [kit.Shallow, kit.Deep, kit.Side], ROWS, training=TRAINING, public=public, y=y
    )


def plain_correlation(z, target, weight=0.0051):
    """Entry by entry: the diagonal towards 1, all else towards −1."""
    columns = [[(one - one.mean()) / (one.var() + 1e-5).sqrt() for one in table.T] for table in (z, target)]
    total = 0.0
    for u, own in enumerate(columns[0]):
        for v, other in enumerate(columns[1]):
            entry = (own * other).sum() / len(z)
            total = total + ((1 - entry) ** 2 if u == v else weight * (1 + entry) ** 2)
    return total


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def everyone(z):
    return torch.ones(len(z), dtype=torch.bool)


def test_the_loss_entry_by_entry():
    z, target = drawn(6, 4).requires_grad_(), drawn(6, 4, seed=2)
    for weight in (0.0051, 1.0):
        found, expected = (
            correlation_loss(z, target, everyone(z), weight),
            plain_correlation(z, target, weight),
        )
        torch.testing.assert_close(found, expected)
        one, other = (torch.autograd.grad(term, [z])[0] for term in (found, expected))
        torch.testing.assert_close(one, other)


def test_off_diagonals_go_to_minus_one():
    """Two opposite columns are the optimum but for what B − 1 in the variance leaves; equal ones cost 4λ each."""
    column = drawn(400, 1)
    opposite, equal = torch.cat([column, -column], 1), torch.cat([column, column], 1)
    at = [float(correlation_loss(z, z, everyone(z), 1.0)) for z in (opposite, equal)]
    assert at[0] == pytest.approx(0, abs=1e-3)
    assert at[1] == pytest.approx(2 * 4, abs=5e-2)  # Barlow Twins would ask for 0 there: 2·1


def test_constant_columns_and_tiny_batches_have_a_gradient():
    z = torch.cat([drawn(5, 2), torch.zeros(5, 1)], 1).requires_grad_()
    [gradient] = torch.autograd.grad(correlation_loss(z, torch.ones(5, 3), everyone(z), 0.0051), [z])
    assert bool(gradient.isfinite().all())
    there = torch.tensor([True, False, False, False, False])
    few = correlation_loss(z, drawn(5, 3), there, 0.0051)
    assert float(few.detach()) == 0
    assert not torch.autograd.grad(few, [z])[0].any()


def test_missing_samples_do_not_count():
    z, target = drawn(6, 3), drawn(6, 3, seed=2)
    there = torch.tensor([True, True, False, True, False, True])
    found = correlation_loss(z, target, there, 0.1)
    torch.testing.assert_close(found, plain_correlation(z[there], target[there], 0.1))


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def divergence(logits, teacher):
    with torch.no_grad():
        target = teacher.softmax(1)
    return F.kl_div(logits.log_softmax(1), target, reduction="batchmean")


@pytest.mark.parametrize(
    "options",
    [{}, {"exchange": "batch", "public_lr": 0.05}, {"exchange": "batch", "own": "mean"}],
    ids=["round", "batch", "mean"],
)
def test_two_rounds_are_a_plain_loop(kit, options):
    """Clients pre-train and keep a copy; public batches, the last one left out; then private data, two teachers."""
    game = federation(kit, **options)
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    frozen, x = {}, torch.tensor(PUBLIC)
    for number in (1, 2):
        game.round(*ROWS)
        for client, model in models.items() if number == 1 else ():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for rows in [*game.steps(client, 1, 0), *game.steps(client, 1, 1)]:
                step(
                    optimizer, F.cross_entropy(model(torch.tensor(game.x[rows])), torch.tensor(game.y[rows]))
                )
            frozen[client] = copy.deepcopy(model)
        previous = copy.deepcopy(models)
        public = game.federation.population.public()
        order = public.order(number, 11)[0]
        batches = shuffled_batches(order, 5, 1, "drop", public.rng.child("round", number, "batches"))
        assert [len(rows) for rows in batches] == [5, 5]
        lr = options.get("public_lr", 0.1)
        optimizers = {client: torch.optim.SGD(model.parameters(), lr=lr) for client, model in models.items()}
        for place, rows in enumerate(batches):
            if place == 0 or options:
                with torch.no_grad():
                    said = {client: model(x) for client, model in models.items()}
            for client, model in models.items():
                own = said[client] if options.get("own") else previous[client](x).detach()
                slots = [own if one == client else said[one] for one in models]
                step(optimizers[client], plain_correlation(model(x[rows]), (sum(slots) / 3)[rows]))
        for client, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for rows in game.steps(client, number, 2 if number == 1 else 0):
                batch = torch.tensor(game.x[rows])
                logits = model(batch)
                task = F.cross_entropy(logits, torch.tensor(game.y[rows]))
                teachers = (previous[client](batch), frozen[client](batch))
                step(optimizer, task + sum(divergence(logits, one) for one in teachers))
    for client, model in models.items():
        for part, expected in (
            ("model", model),
            ("pretrained", frozen[client]),
            ("previous", previous[client]),
        ):
            for name, value in expected.named_parameters():
                torch.testing.assert_close(
                    game.part(client, part)[name],
                    value.detach(),
                    msg=f"{client} {part} {name}",
                    atol=1e-5,
                    rtol=1e-3,
                )


@pytest.mark.parametrize(
    ("options", "down"),
    [
        ({}, [{"scores": 44}]),
        ({"exchange": "batch"}, [{"scores": 20, "share": 1}] * 2),
        ({"exchange": "batch", "own": "mean"}, [{"scores": 20}] * 2),
    ],
)
def test_what_crosses(kit, options, down):
    lines = federation(kit, **options).round(*ROWS).ledger.lines
    for client in ROWS:
        own = [line for line in lines if line["client"] == client]
        assert [line["names"] for line in own if line["direction"] == "down"] == down
        assert [line["names"] for line in own if line["direction"] == "up"] == [
            {"scores": one["scores"]} for one in down
        ]


def test_weights_of_zero_leave_plain_training(kit):
    game = federation(kit, weight_previous=0, weight_pretrained=0)
    game.round("a")
    model = game.federation.population.build_model("a")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for again in (0, 1, 2):
        for rows in game.steps("a", 1, again):
            step(optimizer, F.cross_entropy(model(torch.tensor(game.x[rows])), torch.tensor(game.y[rows])))
    for name, value in model.named_parameters():
        torch.testing.assert_close(game.part("a", "model")[name], value.detach())


def test_the_released_codes_values_are_the_defaults(kit):
    config = FCCL.Config()
    assert (config.off_diagonal, config.pretrain_epochs, config.public_epochs) == (0.0051, 40, 1)
    whole = federation(kit, public=np.zeros((5003, 3), np.float32), samples=None, batch=None).method
    assert (whole.samples, whole.batch) == (5000, 512)


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"fccl needs public data.* such as fedmrl"):
        federation(kit, public=None)
    with pytest.raises(ConfigError, match=r"fccl: client a \(Shallow\) has 1 class, .* or use local"):
        federation(kit, y=np.zeros(16, dtype=np.int64))
    with pytest.raises(ConfigError, match="own does nothing with exchange: round; it is for batch"):
        FCCL.Config(own="mean")
