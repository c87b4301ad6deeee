"""FedHeNN: kernels, their alignment and its weight by hand; a round against a plain loop."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.streams import shuffled_batches
from potluck.errors import ConfigError
from potluck.kit.kernels import centred, cka, mean_kernel

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)


def federation(kit, models=None, public=PUBLIC, lacking=None, **options):
    method = {"name": "fedhenn", "weight": 0.5, "samples": 5, **options}
    models = models or [kit.Shallow, kit.Narrow]
    return kit.Federation(method, models, ROWS, training=TRAINING, public=public, lacking=lacking)


def plain_cka(one, other):
    """With the centring matrix written out, in float64."""
    size = len(one)
    h = np.eye(size) - np.ones((size, size)) / size
    hsic = lambda a, b: float((h @ a @ h * (h @ b @ h)).sum())  # noqa: E731
    return hsic(one, other) / math.sqrt(hsic(one, one) * hsic(other, other))


def test_alignment_by_hand():
    line = torch.tensor([[0.0], [1.0], [3.0]])
    centre = torch.tensor([[-4.0], [-1.0], [5.0]]) / 3
    torch.testing.assert_close(centred(line @ line.T, torch.ones(3)), centre @ centre.T)
    other = torch.tensor([[0.0], [1.0], [0.0]])  # centred: (−1, 2, −1)/3
    expected = (((4 - 2 - 5) / 9) ** 2) / ((42 / 9) * (6 / 9))  # CKA of lines is their squared correlation
    assert float(cka(line @ line.T, other @ other.T)) == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(1 / 28)


def test_alignment_against_the_centring_matrix_and_what_leaves_it_alone():
    draw = np.random.Generator(np.random.PCG64(1))
    a, b = draw.standard_normal((6, 4)), draw.standard_normal((6, 3))
    ka, kb = a @ a.T, b @ b.T
    ours = cka(torch.tensor(ka), torch.tensor(kb))
    assert float(ours) == pytest.approx(plain_cka(ka, kb), abs=1e-10)
    turn, _ = np.linalg.qr(draw.standard_normal((4, 4)))
    turned = 3 * (a + 1) @ turn  # rotation, scale and shift
    assert float(cka(torch.tensor(ka), torch.tensor(turned @ turned.T))) == pytest.approx(1, abs=1e-10)


def test_missing_samples_are_left_out():
    draw = np.random.Generator(np.random.PCG64(2))
    a, b = draw.standard_normal((6, 4)), draw.standard_normal((6, 3))
    there = torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=torch.float64)
    kept = [0, 1, 3, 4]
    ours = cka(torch.tensor(a @ a.T), torch.tensor(b @ b.T), there)
    assert float(ours) == pytest.approx(
        plain_cka((a @ a.T)[np.ix_(kept, kept)], (b @ b.T)[np.ix_(kept, kept)])
    )


def test_a_constant_kernel_has_no_alignment_and_no_gradient():
    z = torch.ones(4, 2, requires_grad=True)
    value = cka(torch.eye(4), z @ z.T)
    value.backward()
    assert float(value.detach()) == 0
    assert z.grad is not None
    assert torch.equal(z.grad, torch.zeros(4, 2))


def test_kernels_are_averaged_over_those_who_have_both_samples():
    one = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
    blind = torch.tensor([[6.0, 0.0], [0.0, 0.0]])  # lacks the second sample
    torch.testing.assert_close(mean_kernel([one, blind]), torch.tensor([[4.0, 1.0], [1.0, 4.0]]))
    torch.testing.assert_close(mean_kernel([one, 3 * one]), 2 * one)


def plain_round(game, client, model, number, kernel, eta, lacking=()):
    """Local steps, each with R beside it, as far as the client and the kernel have it; the kernel of the next R."""
    public = game.federation.population.public()
    rows = public.order(number, 5)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    [order] = shuffled_batches(rows, 5, 1, "keep", game.rng(client, number).child("align"))
    known = rows if kernel is None else rows[kernel.diagonal().numpy() > 0]
    order = np.array([row for row in order if row not in lacking and row in known])
    places = [rows.tolist().index(row) for row in order]
    for batch in game.steps(client, number):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.tensor(game.x[batch])), torch.tensor(game.y[batch]))
        if kernel is not None:
            z = model.features(torch.tensor(PUBLIC[order]))
            h = torch.eye(len(order)) - 1 / len(order)
            one, other = h @ kernel[places][:, places] @ h, h @ z @ z.T @ h
            loss = loss + eta * (1 - (one * other).sum() / (one.norm() * other.norm()))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        following = public.order(number + 1, 5)[0]
        z = model.features(torch.tensor(PUBLIC[following]))
        z[np.isin(following, lacking)] = 0
        return z @ z.T


@pytest.mark.usefixtures("in_double_precision")
def test_rounds_are_a_plain_loop_whose_weight_grows_with_the_root_of_the_round(kit):
    game = federation(kit)
    models, kernel = {client: game.federation.population.build_model(client) for client in ROWS}, None
    for number, eta in ((1, 0.0), (2, 0.5), (3, 0.5 * math.sqrt(2))):
        game.round("a", "b")
        kernels = [plain_round(game, one, model, number, kernel, eta) for one, model in models.items()]
        kernel = sum(kernels) / 2
        torch.testing.assert_close(game.server["kernel"]["kernel"], kernel)
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}"
            )


@pytest.mark.usefixtures("in_double_precision")
def test_rounds_with_missing_samples_are_a_plain_loop_over_those_there_are(kit):
    """Client a lacks some that b has; after a round without b, K̄ has nothing to say of them."""
    lacking = {"a": (0, 2, 4, 9), "b": (0,)}
    game = federation(kit, lacking=lacking)
    models, kernel = {client: game.federation.population.build_model(client) for client in ROWS}, None
    seen = [set(game.federation.population.public().order(number, 5)[0]) for number in (2, 3)]
    assert all(rows & {2, 4, 9} for rows in seen)
    for number, cohort, eta in ((1, "ab", 0.0), (2, "a", 0.5), (3, "ab", 0.5 * math.sqrt(2))):
        game.round(*cohort)
        kernels = [plain_round(game, one, models[one], number, kernel, eta, lacking[one]) for one in cohort]
        there = [(one.diagonal() > 0).float() for one in kernels]
        counts = sum(has[:, None] * has for has in there).clamp_min(1)
        kernel = sum(kernels) / counts
        torch.testing.assert_close(game.server["kernel"]["kernel"], kernel)
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}"
            )


def test_what_crosses(kit):
    """min(|R|², |R|·d) up, |R|² down, nothing down in the first round: widths 6 and 4, |R| = 5."""
    game = federation(kit)
    first, second = (game.round("a", "b").ledger.lines for _ in range(2))
    assert {line["client"]: line["scalars"] for line in first} == {"a": 25, "b": 20}
    assert {(line["client"], line["direction"]): line["scalars"] for line in second} == {
        ("a", "up"): 25, ("b", "up"): 20, ("a", "down"): 25, ("b", "down"): 25
    }  # fmt: skip


@pytest.mark.parametrize("send", ["kernel", "representations"])
def test_whatever_is_sent_the_mean_kernel_is_the_same(kit, send):
    smaller, other = federation(kit), federation(kit, send=send)
    for game in (smaller, other):
        game.round("a", "b")
    torch.testing.assert_close(smaller.server["kernel"]["kernel"], other.server["kernel"]["kernel"])


def test_the_scripts_sizes_are_the_defaults(kit):
    game = federation(kit, public=np.zeros((1200, 3), np.float32), samples=None)
    assert (game.method.samples, game.method.batch, game.method.Config().weight) == (1000, 1000, 0.01)


def test_a_model_that_is_all_head_is_refused(kit):
    with pytest.raises(ConfigError, match=r"fedhenn: client b \(Linear\) has no representation to train"):
        federation(kit, models=[kit.Shallow, kit.Linear])
    with pytest.raises(ConfigError, match=r"method.samples of 11 samples is larger than the public data"):
        federation(kit, samples=11)
    with pytest.raises(ConfigError, match=r"method.batch of 11 samples is larger than the public data"):
        federation(kit, batch=11)
