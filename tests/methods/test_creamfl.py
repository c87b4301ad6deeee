"""CreamFL: both contrasts and the weights of the mean by hand; rounds against a plain loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.task import Batch, Task
from potluck.data import load
from potluck.errors import ConfigError
from potluck.experiment.schema import Experiment
from potluck.kit.contrastive import global_tables, inter, intra, log_share, muscle
from potluck.kit.modality_tables import weighted_by_agreement
from potluck.kit.public_knowledge import MODALITIES, modality

ROWS = {"a": range(0, 7), "b": range(7, 12)}
TRAINING = {"epochs": 1, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
E = torch.eye(2, dtype=torch.float64)
HERE = torch.tensor([True, True])


def federation(kit, models=None, lacking=None, **options):
    method = {"name": "creamfl", "batch": 4, **options}
    models = models or [kit.Shallow, kit.Deep]
    return kit.Federation(method, models, ROWS, training=TRAINING, public=PUBLIC, lacking=lacking)


def test_the_contrast_within_a_modality_by_hand():
    """Positive at cosine 1, the previous model at 0, τ = 0.5."""
    assert float(intra(E, E, E.flip(0), HERE, 0.5)) == pytest.approx(math.log(1 + math.exp(-2)))
    assert float(intra(E, E, E, HERE, 0.5)) == pytest.approx(math.log(2))
    half = intra(E, torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=E.dtype), E, HERE, 0.5)
    assert float(half) == pytest.approx(
        math.log(2)
    )  # a sample without a global representation does not count
    only = intra(E, torch.stack([E[0], E[0]]), E.flip(0), torch.tensor([True, False]), 0.5)
    assert float(only) == pytest.approx(math.log(1 + math.exp(-2)))


def test_the_contrast_between_modalities_is_with_all_public_samples():
    table = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]).to(E)  # nobody has the last one
    rows = torch.tensor([1, 0])
    expected = [math.log(2 + math.exp(-2)), math.log(1 + 2 * math.exp(-2))]
    found = inter(E, [table], rows, HERE, 0.5)
    assert float(found) == pytest.approx(np.mean(expected), abs=1e-6)
    one = inter(E, [table], rows, torch.tensor([True, False]), 0.5)
    assert float(one) == pytest.approx(expected[0], abs=1e-6)
    both = inter(E, [table, 0 * table + E[0]], rows, HERE, 0.5)
    assert float(both) == pytest.approx((np.mean(expected) + math.log(4)) / 2, abs=1e-6)


def test_the_log_share_in_pieces_is_the_one_of_the_whole(monkeypatch):
    draw = torch.tensor(np.random.Generator(np.random.PCG64(4)).standard_normal((2, 9, 4)))
    whole = log_share(*draw)
    monkeypatch.setattr(global_tables, "CHUNK", 2)
    torch.testing.assert_close(log_share(*draw), whole)
    torch.testing.assert_close(whole, (draw[0] @ draw[1].T).log_softmax(1).diagonal())


def test_weights_of_the_mean_by_hand():
    """Scores 0 and log 3: weights 1/4 and 3/4. Who lacks a sample has none; where all do the target is zero."""
    z = torch.stack([torch.stack([E[0], E[0], 0 * E[0]]), torch.stack([E[1], 0 * E[1], 0 * E[1]])])
    scores = torch.tensor([[0.0, 0.0, 0.0], [math.log(3), 9.0, 9.0]], dtype=E.dtype)
    expected = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.0, 0.0]], dtype=E.dtype)
    torch.testing.assert_close(weighted_by_agreement(z, scores), expected)


def unit(model, rows=slice(None)):
    return F.normalize(model.features(torch.tensor(PUBLIC[rows])), dim=1)


def contrast(z, table, previous, rows, regularizer):
    """γ = 0.5 times both terms at τ = 0.5, or the Muscle loss."""
    if regularizer == "muscle":
        return 0.5 * muscle(z, [table[rows]], 0.2, 0.15)
    across = F.cross_entropy(z @ table.T / 0.5, torch.tensor(rows))
    pair = torch.stack([(z * table[rows]).sum(1), (z * previous[rows]).sum(1)], 1) / 0.5
    return 0.5 * (across + F.cross_entropy(pair, torch.zeros(len(rows), dtype=torch.long)))


def plain_round(kit, game, client, model, number, table, regularizer):
    with torch.no_grad():
        previous = unit(model)
    batches = [
        (torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps(client, number)
    ]
    kit.plain_training(model, batches, lr=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for rows in game.federation.population.public().order(number, 4) if table is not None else ():
        optimizer.zero_grad()
        contrast(unit(model, rows), table, previous, rows, regularizer).backward()
        optimizer.step()
    with torch.no_grad():
        return unit(model)


def plain_scores(z, table, aggregation):
    if table is None:
        return torch.zeros(len(z))
    if aggregation == "creamfl":
        return (z @ table.T).log_softmax(1).diagonal()
    halves = [
        muscle(z[rows], [table[rows]], 0.2, 0.15, reduction="none") for rows in (slice(5), slice(5, 10))
    ]
    return -torch.cat(halves)


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize(
    ("regularizer", "aggregation"),
    [("creamfl", "creamfl"), ("muscle", "muscle"), ("creamfl", "muscle")],
)
def test_rounds_are_a_plain_loop(kit, regularizer, aggregation):
    """The first round has nothing to contrast with and equal weights."""
    game = federation(kit, regularizer=regularizer, aggregation=aggregation)
    models, table = {client: game.federation.population.build_model(client) for client in ROWS}, None
    for number in (1, 2, 3):
        game.round("a", "b")
        sent = [plain_round(kit, game, one, models[one], number, table, regularizer) for one in ROWS]
        weights = torch.stack([plain_scores(z, table, aggregation) for z in sent]).softmax(0)
        table = sum(weight[:, None] * z for weight, z in zip(weights, sent, strict=True))
        torch.testing.assert_close(game.server["tables"]["vector"], table)
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}"
            )


def cross_entropy_among(scores, own, candidates):
    """−log softmax of a sample's own score among those of the candidates, one sample after the other."""
    each = [scores[i, candidates].logsumexp(0) - scores[i, row] for i, row in enumerate(own)]
    return torch.stack(each)


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("regularizer", ["creamfl", "muscle"])
@pytest.mark.parametrize("aggregation", ["creamfl", "muscle"])
def test_with_missing_samples_it_is_a_plain_loop_over_those_there_are(kit, regularizer, aggregation):
    """Client a lacks three samples, one of which b lacks too: G is zero there, no positive and no negative."""
    lacking = {"a": (1, 4, 7), "b": (4,)}
    has = {client: [row for row in range(10) if row not in lacking[client]] for client in lacking}
    game = federation(kit, regularizer=regularizer, aggregation=aggregation, lacking=lacking)
    models, table = {client: game.federation.population.build_model(client) for client in ROWS}, None
    known = has["b"]

    def pull(z, rows, previous):
        if regularizer == "muscle":
            there = [row for row in batch if row in known]
            return 0.5 * cross_entropy_among(z @ F.normalize(table).T / 0.2, rows, there)
        pair = torch.stack([(z * table[rows]).sum(1), (z * previous[rows]).sum(1)], 1) / 0.5
        within = F.cross_entropy(pair, torch.zeros(len(rows), dtype=torch.long))
        return 0.5 * (cross_entropy_among(z @ table.T / 0.5, rows, known).mean() + within)

    def scores(z, client):
        if table is None:
            return torch.zeros(10)
        target = table if aggregation == "creamfl" else F.normalize(table) / 0.2
        found = torch.zeros(10)
        for piece in (range(10),) if aggregation == "creamfl" else (range(5), range(5, 10)):
            rows, there = [row for row in piece if row in has[client]], [row for row in piece if row in known]
            found[rows] = -cross_entropy_among(z[rows] @ target.T, rows, there)
        return found

    for number in (1, 2, 3):
        game.round("a", "b")
        sent = {}
        for client, model in models.items():
            with torch.no_grad():
                previous = unit(model)
            steps = game.steps(client, number)
            kit.plain_training(
                model, [(torch.tensor(game.x[r]), torch.tensor(game.y[r])) for r in steps], lr=0.2
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            for batch in game.federation.population.public().order(number, 4) if table is not None else ():
                rows = [row for row in batch.tolist() if row in has[client]]
                optimizer.zero_grad()
                pull(unit(model, rows), rows, previous).mean().backward()
                optimizer.step()
            with torch.no_grad():
                sent[client] = unit(model)
        agreed = torch.stack([scores(z, client) for client, z in sent.items()])
        for place, client in enumerate(sent):
            agreed[place, list(lacking[client])] = -torch.inf
        weights = agreed.softmax(0).nan_to_num(0)
        table = sum(weight[:, None] * z for weight, z in zip(weights, sent.values(), strict=True))
        torch.testing.assert_close(game.server["tables"]["vector"], table)
        assert not table[4].any()
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                game.part(client, "model")[name], value.detach(), msg=f"{client} {name}"
            )


def test_the_servers_model_learns_from_pairs_that_are_there():
    """Every fourth caption is missing: its pair is no negative of the others."""
    data = load("digits-captions")
    few = replace(data, x=data.x[:40], y=data.y[:40], strata=data.strata[:40], train_rows=40)
    told = tuple("" if row % 4 == 0 else text for row, text in enumerate(data.texts))
    federation = Experiment.make(
        data=few,
        partition={"kind": "iid", "clients": 2, "test": 0.3},
        models={"pool": "dual-small", "rep_dim": 16},
        method={"name": "creamfl", "batch": 8, "server_model": "dual-small"},
        public={"data": replace(data, texts=told), "samples": 24},
        engine={"device": "cpu", "workers": 1},
    ).build()
    server = federation.server()
    rows = torch.from_numpy(federation.population.public().order(1, 8)[0])
    there = federation.population.public().mask[rows]
    assert 1 < int(there.sum()) < 8
    batch, whole = (
        federation.population.public().source.take(rows),
        federation.population.public().source.take(rows[there]),
    )
    found = federation.method.pair_loss(server, batch)
    torch.testing.assert_close(found, server.task.loss(server["model"](whole.x), whole.y))


def test_what_crosses(kit):
    """|P|·d up, |P|·d down for the one modality: 10 samples, width 6."""
    game = federation(kit)
    first, second = (game.round("a", "b").ledger.lines for _ in range(2))
    assert [line["names"] for line in first] == [{"representations": 60}] * 2
    assert {(line["client"], line["direction"]): line["names"] for line in second} == {
        ("a", "up"): {"representations": 60}, ("b", "up"): {"representations": 60},
        ("a", "down"): {"vector": 60}, ("b", "down"): {"vector": 60},
    }  # fmt: skip


def test_the_released_values_are_the_defaults(kit):
    config = federation(kit).method.config
    assert (config.weight, config.tau, config.distil) == (0.5, 0.5, 0.3)
    assert (config.muscle_tau, config.muscle_tau_prev) == (0.2, 0.15)


def test_a_server_model_says_what_is_global_and_learns_the_targets(kit):
    game = federation(kit, server_model=kit.Shallow)
    model = game.server["model"].content
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    first = unit(model).detach()
    heard = []
    original = game.method.train

    def train(client, down):
        heard.append(down["vector"])
        return original(client, down)

    game.method.train = train
    game.round("a", "b")
    assert all(torch.equal(one, first) for one in heard)
    torch.testing.assert_close(game.server["tables"]["vector"], unit(model).detach())
    moved = {name: not torch.equal(value, start[name]) for name, value in model.named_parameters()}
    assert moved == {name: not name.startswith("head") for name in start}


def test_distillation_is_three_tenths_of_the_squared_error(kit):
    game = federation(kit, server_model=kit.Shallow)
    server, method = game.server, game.method
    server.enter(1, game.federation.server_rng(1), {}, "round")
    target = torch.tensor(
        np.random.Generator(np.random.PCG64(5)).standard_normal((10, 6)), dtype=torch.float32
    )
    target[3] = 0  # nobody has it
    batch = Batch(torch.tensor(PUBLIC[2:5]), torch.zeros(3), id=torch.tensor([2, 3, 4]))
    z = unit(server["model"].content, slice(2, 5))
    expected = 0.3 * ((z - target[2:5]).square().mean(1)[[0, 2]]).mean()
    torch.testing.assert_close(method.distil_loss(server, batch, target), expected)


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [
        ("classification", (1, 8, 8), "image"),
        ("segmentation", (1, 8, 8), "image"),
        ("text-classification", (9,), "text"),
        ("retrieval", (73,), "pair"),
        ("multi-label", (3,), "vector"),
    ],
)
def test_modalities(kind, shape, name):
    assert modality(Task(kind, 4, shape)) == name
    assert name in MODALITIES


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"creamfl: a global representation needs one representation width"):
        federation(kit, models=[kit.Shallow, kit.Narrow])
    with pytest.raises(ConfigError, match=r"creamfl: client a \(Linear\) has no representation to train"):
        federation(kit, models=kit.Linear)
    with pytest.raises(ConfigError, match=r"method.batch of 11 samples is larger than the public data"):
        federation(kit, batch=11)
    with pytest.raises(ConfigError, match=r"method.muscle_tau_prev is 0.3 and method.muscle_tau 0.2"):
        federation(kit, regularizer="muscle", muscle_tau_prev=0.3)
