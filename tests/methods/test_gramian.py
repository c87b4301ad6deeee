"""Gramian alignment: volumes by determinants, smoothed labels, a learned temperature, what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.errors import ConfigError
from potluck.kit.contrastive import gramian

ROWS = {"a": range(0, 6), "b": range(6, 10), "c": range(10, 16)}
TRAINING = {"epochs": 1, "batch_size": 8, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((11, 3)).astype(np.float32)
CHOSEN = {
    "name": "gramian",
    "batch": 5,
    "peers": 2,
    "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0},
}


def federation(kit, models=None, public=PUBLIC, **options):
    models = models or [kit.Shallow, kit.Deep, kit.Side]
    return kit.Federation({**CHOSEN, **options}, models, ROWS, training=TRAINING, public=public)


def volumes(z, others):
    """V[i, j] of anchor i with the peers' rows of sample j, one determinant each."""
    table = torch.zeros(len(z), len(z), dtype=z.dtype)
    for i in range(len(z)):
        for j in range(len(z)):
            vectors = F.normalize(torch.stack([z[i], *(other[j] for other in others)]), dim=1)
            table[i, j] = torch.linalg.det(vectors @ vectors.T).clamp_min(1e-8).sqrt()
    return table


def by_hand(z, others, tau, smoothing):
    scores, own = -volumes(z, others) / tau, torch.arange(len(z))
    both = [F.cross_entropy(one, own, label_smoothing=smoothing) for one in (scores, scores.T)]
    return sum(both) / 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_the_loss_is_the_formula(peers, smoothing):
    draw = torch.Generator().manual_seed(3)
    z, *others = (torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(peers + 1))
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    z.requires_grad_()
    found = gramian(z, others, tau, negatives="anchor", smoothing=smoothing)
    expected = by_hand(z, others, tau, smoothing)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, [z, tau]), torch.autograd.grad(expected, [z, tau]), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_smoothing_leaves_out_what_is_no_candidate():
    """A sample that the peer lacks takes no share of the label: as if the batch did not have it."""
    draw = torch.Generator().manual_seed(4)
    z, other = (torch.randn(4, 6, generator=draw) for _ in range(2))
    has = torch.tensor([True, True, False, True])
    rows = [0, 1, 3]
    found = gramian(z, [other], 0.3, negatives="anchor", smoothing=0.2, weight=has.float(), present=[has])
    torch.testing.assert_close(found, gramian(z[rows], [other[rows]], 0.3, negatives="anchor", smoothing=0.2))


def test_perfect_agreement_has_a_gradient():
    """Where GRAM's √|det| has none: all clients represent every sample alike."""
    rows = F.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(5)), dim=1)
    z = rows.clone().requires_grad_()
    loss = gramian(z, [rows, rows], 0.07, negatives="anchor", smoothing=0.1)
    [gradient] = torch.autograd.grad(loss, [z])
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) < 1e3


def test_smoothing_and_learning_are_for_anchors():
    z = torch.eye(3)
    for wrong in ({"smoothing": 0.1}, {"tau": torch.tensor(0.1)}):
        with pytest.raises(ConfigError, match="set negatives to 'anchor'"):
            gramian(z, [z], **wrong)


def test_a_round_is_a_plain_loop(kit, in_double_precision):
    """The temperature is a parameter of each client, stepped with the representation; the head is not."""
    game = federation(kit)
    models = {client: game.federation.population.build_model(client).double() for client in ROWS}
    logs = {client: torch.tensor(math.log(0.07), requires_grad=True) for client in ROWS}
    game.round(*ROWS)
    for client, model in models.items():
        batches = [
            (torch.tensor(game.x[one]).double(), torch.tensor(game.y[one])) for one in game.steps(client, 1)
        ]
        kit.plain_training(model, batches, lr=0.2)
    for rows in game.federation.population.public().order(1, 5):
        x = torch.tensor(PUBLIC[rows]).double()
        with torch.no_grad():
            sent = {client: model.features(x) for client, model in models.items()}
        for client, model in models.items():
            trained = [one for name, one in model.named_parameters() if not name.startswith("head.")]
            optimizer = torch.optim.SGD([*trained, logs[client]], lr=0.1)
            optimizer.zero_grad()
            others = [sent[one] for one in ROWS if one != client]
            by_hand(model.features(x), others, logs[client].exp(), 0.1).backward()
            optimizer.step()
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name].double(), value.detach(), atol=1e-5, rtol=1e-4
            )
        assert logs[client].item() != pytest.approx(math.log(0.07), abs=1e-3)
        assert game.part(client, "temperature")["log_tau"].item() == pytest.approx(
            logs[client].item(), abs=1e-4
        )


def test_with_fixed_values_it_is_fedmuscles_gramian(kit):
    ours = federation(kit, tau=0.2, learned=False, smoothing=0.0)
    theirs = federation(kit, name="fedmuscle", loss="gramian", negatives="anchor")
    for one in (ours, theirs):
        one.round(*ROWS)
    for client in ROWS:
        for name, value in theirs.part(client, "model").items():
            assert torch.equal(ours.part(client, "model")[name], value)


def test_more_vectors_than_columns_are_refused(kit):
    narrow = [kit.Narrow] * 3
    assert federation(kit, models=narrow).method.name == "gramian"
    with pytest.raises(
        ConfigError, match=r"gramian: 3 vectors .* client a \(Flat\), which has width 2; .*use pairwise"
    ):
        federation(kit, models=[type("Flat", (kit.Shallow,), {"width": 2})] * 3)


def test_the_defaults_are_grams(kit):
    config = federation(kit).method.Config()
    assert (config.tau, config.learned, config.smoothing) == (0.07, True, 0.1)
