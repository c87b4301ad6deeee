"""FedKD: the loss and its gradients by hand, compression both ways, and the same without loss at full energy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from potluck.core.client import Client
from potluck.core.message import Message
from potluck.core.model import Model
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.engine.protocol import Answer
from potluck.kit.low_rank import decode
from potluck.methods.fedkd import LEAST, FedKD

TASK = Task("classification", 3, (2,))
ROWS = {"a": range(0, 12), "b": range(12, 20), "c": range(20, 30)}
TRAINING = {"batch_size": 4, "epochs": 2, "optimizer": {"lr": 0.1, "momentum": 0.9}}
O_P, O_G = (2.0, -1.0, 0.5), (0.0, 1.0, -0.5)
Z_P, Z_G, MAP = (1.0, -2.0), (0.5, 1.5, -1.0), ((1.0, 0.0, 2.0), (0.0, -1.0, 0.5))
EPS = torch.finfo(torch.float32).eps


class Fixed(Model):
    """Representation and scores are parameters, whatever the sample is."""

    def __init__(self, z, scores):
        super().__init__()
        self.rep_dim = len(z)
        self.z = nn.Parameter(torch.tensor(z))
        self.head = nn.Linear(len(z), 3)
        nn.init.zeros_(self.head.weight)
        self.head.bias.data.copy_(torch.tensor(scores))

    def features(self, x):
        return self.z.expand(len(x), self.rep_dim)


def tiny_client(o_p=O_P, o_g=O_G):
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    client = Client(TASK, Source(x, y))
    linear = nn.Linear(3, 2, bias=False)
    linear.weight.data.copy_(torch.tensor(MAP))
    client.declare({"model": Fixed(Z_P, o_p), "small": Fixed(Z_G, o_g), "map": linear})
    return client, Batch(x, y)


def softmax(scores):
    shifted = np.exp(np.asarray(scores) - np.max(scores))
    return shifted / shifted.sum()


def kl(target, scores):
    p, q = softmax(target), softmax(scores)
    return float((p * np.log(p / q)).sum())


ERRORS = [-math.log(softmax(scores)[0]) for scores in (O_P, O_G)]
S = sum(ERRORS)
GAP = np.array(Z_P) - np.array(MAP) @ np.array(Z_G)


def test_the_loss_by_hand():
    client, batch = tiny_client()
    terms = {name: value.item() for name, value in FedKD().loss(client, batch).items()}
    assert terms == pytest.approx(
        {
            "mentor": ERRORS[0],
            "mentor_from_mentee": kl(O_G, O_P) / S,
            "mentee": ERRORS[1],
            "mentee_from_mentor": kl(O_P, O_G) / S,
            "hidden": 2 * (GAP**2).mean() / S,
        },
        rel=1e-5,
    )


def test_the_gradients_by_hand():
    """With constants for s and for the targets; an undetached one, or a mean over classes, gives others."""
    client, batch = tiny_client()
    sum(FedKD().loss(client, batch).values()).backward()
    y, p, g = np.eye(3)[0], softmax(O_P), softmax(O_G)
    of_gap = 2 * 2 * GAP / len(Z_P) / S
    expected = {
        "model": {"head.bias": p - y + (p - g) / S, "z": of_gap},
        "small": {"head.bias": g - y + (g - p) / S, "z": -np.array(MAP).T @ of_gap},
        "map": {"weight": -np.outer(of_gap, Z_G)},
    }
    for part, gradients in expected.items():
        for name, value in gradients.items():
            found = client[part].module.get_parameter(name).grad
            np.testing.assert_allclose(found.numpy(), value, rtol=1e-4, err_msg=f"{part} {name}")


def test_a_sum_of_errors_of_0_divides_nothing_by_0():
    client, batch = tiny_client((200.0, 0.0, 0.0), (200.0, 0.0, 0.0))
    terms = FedKD().loss(client, batch)
    assert terms["mentor"].item() == 0
    assert terms["hidden"].item() == pytest.approx(2 * (GAP**2).mean() / LEAST, rel=1e-5)
    sum(terms.values()).backward()
    assert all(bool(value.grad.isfinite().all()) for value in client["model"].module.parameters())


class Wide(Model):
    """Layers that are large enough to be sent in factors."""

    def __init__(self, task):
        super().__init__()
        self.rep_dim = 16
        self.fc1, self.fc2 = nn.Linear(task.input[0], 24), nn.Linear(24, 16)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(16, task.classes)

    def features(self, x):
        return self.fc2(self.norm(self.fc1(x)).relu()).relu()


def game_of(kit, compress, **options):
    method = {"name": "fedkd", "small": Wide, "compress": compress, **options}
    return kit.Federation(method, kit.Shallow, ROWS, training=TRAINING)


def heard(game):
    """What goes down and up in each round, by client, from now on."""
    inner, rounds = game.engine.run, []

    def run(requests):
        outcomes = inner(requests)
        rounds.append(({one.client: one.down for one in requests}, {one.client: one.up for one in outcomes}))
        return outcomes

    game.engine.run = run
    return rounds


def as_matrix(value):
    return value.double().numpy().reshape(len(value), -1)


def cut(matrix, energy):
    """The least rank that keeps the energy, in a plain loop."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    rank, kept = 0, 0.0
    while kept < energy * (s**2).sum() and rank < len(s):
        kept += s[rank] ** 2
        rank += 1
    return rank, (u[:, :rank] * s[:rank]) @ v[:rank]


def test_uploads_are_changes_of_low_rank_and_the_server_sends_their_mean_of_low_rank(kit):
    """One round by hand: e = 0.95 + 1/100·0.03; θ ← θ + cut(mean of what the clients sent)."""
    game = game_of(kit, {})
    energy, before, rounds = 0.9503, game.server["small"].state(), heard(game)
    game.round("a", "b")
    down, up = rounds[0]
    after = game.server["small"].state()
    for client in ("a", "b"):
        small = game.part(client, "small")
        assert "changes" not in down[client]  # nobody has the first θ
        for name, value in before.items():
            change = as_matrix(small[name] - value) if value.dim() > 1 else None
            sent = up[client].group("small")
            if f"{name}:s" not in sent:
                torch.testing.assert_close(sent[name], small[name] - value)
                rank = 0 if change is None else cut(change, energy)[0]
                assert rank == 0 or rank * (sum(change.shape) + 1) >= change.size
                continue
            rank, expected = cut(change, energy)
            u, s, v = (sent[f"{name}:{factor}"].double().numpy() for factor in "usv")
            assert len(s) == rank >= 1
            np.testing.assert_allclose((u * s) @ v, expected, atol=1e-5 * np.linalg.norm(change))
    assert any(name.endswith(":s") for name in up["a"])
    decoded = [decode(up[client].group("small"), before) for client in ("a", "b")]
    for name, value in before.items():
        mean = np.mean([as_matrix(one[name]) if value.dim() > 1 else one[name].numpy() for one in decoded], 0)
        moved = (after[name] - value).double().numpy().reshape(mean.shape)
        if value.dim() > 1 and (rank := cut(mean, energy)[0]) * (sum(mean.shape) + 1) < mean.size:
            mean = cut(mean, energy)[1]
        scale = float(value.abs().max()) + np.abs(mean).max()
        np.testing.assert_allclose(moved, mean, atol=2e-5 * scale)


def test_clients_have_the_servers_model_whether_they_were_there_or_not(kit):
    game = game_of(kit, {})
    rounds = heard(game)
    whole = Message({"small": game.server["small"].state()}).scalars
    for cohort in (("a", "b"), ("a", "b", "c"), ("b", "c"), ("a", "b", "c")):
        server = game.server["small"].state()
        game.round(*cohort)
        down, _ = rounds[-1]
        current = {client for client in cohort if "changes" in down[client]}
        before = set() if len(rounds) == 1 else set(rounds[-2][1])
        assert current == before & set(cohort)
        for client in cohort:
            assert (down[client].scalars < whole) == (client in current)
            for name, value in game.part(client, "received").items():
                bound = 10 * EPS * float(value.abs().max() + server[name].abs().max())  # a sum, made twice
                torch.testing.assert_close(value, server[name], rtol=0, atol=bound)


def test_the_ledger_counts_what_crosses(kit):
    """Σ r(m + n + 1) of what is in factors, and the other tensors whole."""
    game = game_of(kit, {"start": 0.5, "end": 0.5})
    rounds, shapes = heard(game), {name: value.shape for name, value in game.server["small"].state().items()}
    game.round("a", "b")
    cohort = game.round("a", "b")
    for line in cohort.ledger.lines:
        message = rounds[1][line["direction"] == "up"][line["client"]]
        expected = 1 if line["direction"] == "down" else 0  # the mark of a change
        for name, shape in shapes.items():
            rank = len(message.get(f"small/{name}:s", ()))
            expected += rank * (shape[0] + shape[1:].numel() + 1) if rank else shape.numel()
        assert line["scalars"] == expected
        assert line["scalars"] < sum(shape.numel() for shape in shapes.values())


def test_one_round_at_full_energy_is_one_round_without_compression(kit):
    """θ + mean(θ_k − θ) against mean θ_k: a difference, a mean of two and a sum, each off by ε/2 of its size."""
    plain, full = game_of(kit, None), game_of(kit, {"start": 1.0, "end": 1.0})
    start = plain.server["small"].state()
    for game in (plain, full):
        game.round("a", "b")
    for name, value in plain.server["small"].state().items():
        sizes = [start[name].abs(), *(plain.part(client, "small")[name].abs() for client in ("a", "b"))]
        bound = 4 * EPS * float(torch.stack(sizes).sum(0).max())
        torch.testing.assert_close(full.server["small"].state()[name], value, rtol=0, atol=bound)
    for client in ("a", "b"):
        for name, value in plain.part(client, "model").items():
            assert torch.equal(full.part(client, "model")[name], value)


@pytest.mark.usefixtures("in_double_precision")
def test_several_rounds_at_full_energy_are_those_without_compression(kit):
    """In double precision rounding begins at 1e-16, and stays far below 1e-9 in three rounds of few steps."""
    games = [game_of(kit, None), game_of(kit, {"start": 1.0, "end": 1.0})]
    for game in games:
        for cohort in (("a", "b"), ("a", "c"), ("a", "b", "c")):
            game.round(*cohort)
    plain, full = games
    for client in ROWS:
        for part in ("model", "small", "map"):
            for name, value in plain.part(client, part).items():
                torch.testing.assert_close(full.part(client, part)[name], value, rtol=1e-9, atol=1e-9)


def test_of_weights_the_model_itself_is_cut_as_in_htfllib(kit):
    game = game_of(kit, {"of": "weights", "start": 0.6, "end": 0.6})
    rounds = heard(game)
    game.round("a", "b")
    small = game.part("a", "small")
    sent = decode(rounds[0][1]["a"].group("small"), small)
    for name, value in small.items():
        if f"small/{name}:s" in rounds[0][1]["a"]:
            _, expected = cut(as_matrix(value), 0.6)
            np.testing.assert_allclose(as_matrix(sent[name]), expected, atol=1e-5 * float(value.norm()))
    game.round("c")
    server = Message(game.method.downlink(game.server, "a"))
    assert "changes" not in server
    assert any(name.endswith(":s") for name in server)


def lying(game, change):
    """Let the first client of a round send something else than it has."""
    inner = game.engine.run

    def run(requests):
        outcomes = inner(requests)
        assert isinstance(outcomes[0], Answer)
        changed = {name: change(name, value) for name, value in outcomes[0].up.items()}
        return [dataclasses.replace(outcomes[0], up=Message(changed)), *outcomes[1:]]

    game.engine.run = run


def test_extreme_values_end_no_script(kit):
    """Singular values and whole tensors at the end of float32: their sums are not finite, and nothing raises."""
    game = game_of(kit, {})
    lying(game, lambda name, value: value if name[-2:] in (":u", ":v") else torch.full_like(value, 3e38))
    assert not game.round("a", "b", "c").failures
    assert Message(game.method.downlink(game.server, "b")).scalars


def test_factors_that_are_none_of_a_decomposition_are_refused(kit):
    game = game_of(kit, {})
    lying(game, lambda name, value: value * 100 if name.endswith(":u") else value)
    assert "factors u and v from -1 to 1" in game.round("a", "b", "c").failures["a"]


def test_mentee_and_mentor_may_have_unlike_widths_and_clipping_is_per_part(kit):
    """One step with a small bound: every part moves by the rate times the bound."""
    training = {"batch_size": 12, "optimizer": {"lr": 0.1}}
    method = {"name": "fedkd", "small": kit.Narrow, "clip": 1e-3}
    game = kit.Federation(method, kit.Shallow, ROWS, training=training)
    start = {part: game.part("a", part) for part in ("model", "map")}
    start["small"] = game.server["small"].state()
    game.round("a")
    for part, before in start.items():
        after = game.part("a", part)
        moved = math.sqrt(sum(float((after[name] - value).square().sum()) for name, value in before.items()))
        assert moved == pytest.approx(1e-4, rel=1e-2)
