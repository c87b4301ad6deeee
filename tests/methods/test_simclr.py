"""SimCLR at a client: NT-Xent by hand, two views, and what each phase trains."""

import math

import numpy as np
import pytest
import torch

from potluck.core.rng import Rng
from potluck.data import from_arrays
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.kit.contrastive import nt_xent
from potluck.kit.random_views import RandomViews

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)


def federation(kit, models=None, **options):
    method = {"name": "simclr", "batch": 4, **options}
    return kit.Federation(method, models or [kit.Shallow, kit.Narrow], ROWS, training=TRAINING, public=PUBLIC)


def brute(first, second, tau):
    """Pair by pair, in float64."""
    views = [row / np.linalg.norm(row) for row in np.concatenate([first, second])]
    total, pairs = 0.0, len(first)
    for i, view in enumerate(views):
        exponents = {j: math.exp(view @ other / tau) for j, other in enumerate(views) if j != i}
        total -= math.log(exponents[(i + pairs) % (2 * pairs)] / sum(exponents.values()))
    return total / len(views)


def test_the_loss_by_hand():
    e = torch.eye(2)
    assert float(nt_xent(e, e, 0.5)) == pytest.approx(math.log(1 + 2 * math.exp(-2)), abs=2e-5)
    assert float(nt_xent(e, e, 0.2)) == pytest.approx(math.log(1 + 2 * math.exp(-5)), abs=2e-5)
    swapped = math.log(2 + math.exp(2))  # the positive is at right angles, one negative is the view itself
    assert float(nt_xent(e, e.flip(0), 0.5)) == pytest.approx(swapped, abs=2e-5)
    assert float(nt_xent(torch.ones(3, 2), torch.ones(3, 2), 0.5)) == pytest.approx(math.log(5), abs=2e-5)


def test_the_loss_pair_by_pair_and_without_missing_samples():
    draw = np.random.Generator(np.random.PCG64(3))
    first, second = draw.standard_normal((2, 5, 4))
    ours = nt_xent(torch.tensor(first), torch.tensor(second), 0.5)
    assert float(ours) == pytest.approx(brute(first, second, 0.5), abs=2e-5)
    there = torch.tensor([True, False, True, True, False])
    masked = nt_xent(torch.tensor(first), torch.tensor(second), 0.5, there)
    kept = [0, 2, 3]
    assert float(masked) == pytest.approx(brute(first[kept], second[kept], 0.5), abs=2e-5)
    assert float(nt_xent(torch.tensor(first), torch.tensor(second), 0.5, there & False)) == 0


def test_nothing_crosses_and_the_default_temperature(kit):
    game = federation(kit)
    assert game.round("a", "b").ledger.lines == []
    assert game.method.config.tau == 0.5


def test_the_private_phase_is_local_and_the_public_one_leaves_the_head_alone(kit):
    game = federation(kit)
    model = game.federation.population.build_model("a")
    before = game.part("a", "projector")
    game.round("a", "b")
    batches = [(torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps("a", 1)]
    kit.plain_training(model, batches, lr=0.2)
    after = game.part("a", "model")
    for name, value in model.named_parameters():
        alike = torch.allclose(after[name], value, atol=1e-5)
        assert alike == name.startswith("head"), name
    for name, value in game.part("a", "projector").items():
        assert not torch.equal(value, before[name]), name


def test_the_public_phase_is_a_plain_loop_over_two_views(kit):
    game, plain = federation(kit, drop=0.5), federation(kit, drop=0.5)
    game.round("a")
    model = plain.federation.population.build_model("a")
    projector = plain.federation.clients.build_client("a")["projector"].content
    kit.plain_training(
        model,
        [(torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps("a", 1)],
        lr=0.2,
    )
    optimizer = torch.optim.SGD([*model.parameters(), *projector.parameters()], lr=0.2)
    generator = game.rng("a", 1).child("train", "augment", 1).generator()
    for rows in game.federation.population.public().order(1, 4):
        x = torch.tensor(PUBLIC[rows])
        views = [x.masked_fill(torch.rand(x.shape, generator=generator) < 0.5, 0) for _ in range(2)]
        assert not torch.equal(*views)
        optimizer.zero_grad()
        nt_xent(*(projector(model.features(view)) for view in views), 0.5).backward()
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(game.part("a", "model")[name], value.detach(), msg=name)
    for name, value in projector.named_parameters():
        torch.testing.assert_close(game.part("a", "projector")[name], value.detach(), msg=name)


def test_views_of_images_are_prepared_and_then_changed(kit):
    raw = torch.full((4, 1, 8, 8), 255, dtype=torch.uint8)
    prepare = lambda x, generator: x.float() / 255  # noqa: E731
    game = federation(kit)
    views = RandomViews(prepare, game.method.operations, 0.0)
    one, other = (views(raw, Rng(seed).generator()) for seed in (1, 2))
    assert torch.equal(views(raw, None), torch.ones(4, 1, 8, 8))
    assert one.shape == raw.shape
    assert not torch.equal(one, other)
    assert set(one.unique().tolist()) == {0.0, 1.0}  # cropping and erasing put zeros
    words = torch.arange(1, 9).expand(50, 8)
    left = RandomViews(None, (), 0.25)(words, Rng(1).generator())
    assert left.dtype == words.dtype
    assert torch.equal(left[left > 0], words[left > 0])
    assert 0.15 < float((left == 0).float().mean()) < 0.35


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"simclr: client b \(Linear\) has no representation to train"):
        federation(kit, models=[kit.Shallow, kit.Linear])
    with pytest.raises(ConfigError, match=r"method.batch of 11 samples is larger than the public data"):
        federation(kit, batch=11)
    with pytest.raises(ConfigError, match=r"without method.drop both views .* client a are the same"):
        federation(kit, drop=0)
    images = from_arrays(np.zeros((12, 1, 8, 8), np.float32), np.arange(12) % 2)
    values = {"data": images, "partition": {"kind": "iid", "clients": 2}, "models": "mlp-small"}
    with pytest.raises(ConfigError, match=r"without method.augment both views"):
        Experiment.make(
            **values, method={"name": "simclr", "augment": ["normalize"]}, public={"data": images}
        ).build()


def test_a_file_says_its_views_and_is_written_as_it_was_read():
    values = {"data": "digits", "partition": {"kind": "iid", "clients": 2}, "models": "mlp-small"}
    asked = Experiment.make(
        **values, method={"name": "simclr", "augment": ["flip", {"crop": 2}]}, public={"data": "digits"}
    )
    assert [one.kind for one in asked.build().method.operations] == ["flip", "crop"]
    assert "crop" in asked.to_yaml()
