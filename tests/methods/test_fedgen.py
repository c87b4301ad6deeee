"""FedGen: the client's terms, the generator's loss and what comes down, by hand."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.task import Batch
from potluck.errors import ConfigError
from potluck.kit.stacked_modules import Stacked
from potluck.methods import fedgen
from potluck.methods.fedgen import Generator, drawn_classes, sameness

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 2, 3])  # a: 0 1 and one of 2; b: 1 2; nobody: 3
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def federation(kit, models=None, training=TRAINING, rows=ROWS, **options):
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((13, 3)).astype(np.float32)
    options = {"name": "fedgen", "steps": 3, "batch": 4, "noise": 2, "hidden": 5} | options
    return kit.Federation(options, models or [kit.Shallow, kit.Deep], rows, x=x, y=LABELS, training=training)


def test_the_first_round_is_local_training_and_heads_are_averaged_by_samples(kit):
    game = federation(kit)
    start = game.server["head"].state()
    game.round(*ROWS)
    heads = []
    for client in ROWS:
        model = game.federation.population.build_model(client)
        model.head.load_state_dict(start)
        kit.plain_training(
            model,
            [(torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps(client, 1)],
            lr=0.2,
        )
        for name, value in model.named_parameters():
            torch.testing.assert_close(game.part(client, "model")[name], value.detach(), atol=1e-5, rtol=0)
        heads.append(model.head.weight.detach())
    mean = (7 * heads[0] + 5 * heads[1]) / 12
    torch.testing.assert_close(game.server["head"]["weight"], mean, atol=1e-5, rtol=0)


def test_what_crosses(kit):
    game = federation(kit)
    head, generator = (
        6 * 4 + 4,
        (4 + 2) * 5 + 5 + 4 * 5 + 5 * 6 + 6,
    )  # batch norm: two parameters, two statistics
    first = {(line["client"], line["direction"]): line["scalars"] for line in game.round(*ROWS).ledger.lines}
    later = {(line["client"], line["direction"]): line["scalars"] for line in game.round(*ROWS).ledger.lines}
    assert first["a", "up"] == later["a", "up"] == head + 4
    assert first["a", "down"] == head
    assert later["a", "down"] == head + generator + 3  # classes 0, 1 and 2


def taught(kit, monkeypatch, known=(1, 1, 0, 1), training=TRAINING, **options):
    """A client, with a generator that gives a fixed row per class; ŷ is always 3, 1, 1."""
    game = federation(kit, training=training, generated=3, **options)
    client = game.federation.clients.build_client("a")
    table = torch.arange(24.0).view(4, 6).sin()
    monkeypatch.setattr(game.method, "generate", lambda client, y: table[y])
    monkeypatch.setattr(fedgen, "drawn_classes", lambda known, size: torch.tensor([3, 1, 1]))
    client["known"].value.copy_(torch.tensor(known))
    return game, client, table


def by_hand(client, table, batch):
    """The three terms without weights, sample by sample."""
    model = client["model"]
    scores, own = model(batch.x), model.head(table)
    logs = own.log_softmax(1)
    generated = -(logs[3, 3] + logs[1, 1] + logs[1, 1]) / 3
    divergence = 0.0
    for o, y in zip(scores, batch.y.tolist(), strict=True):
        p = own[y].softmax(0)
        divergence = divergence + (p * (p.log() - o.log_softmax(0))).sum()
    return F.cross_entropy(scores, batch.y), generated, divergence / len(batch)


def test_terms_by_hand(kit, monkeypatch):
    game, client, table = taught(kit, monkeypatch)
    batch = Batch(torch.tensor(game.x[:3]), torch.tensor([1, 0, 1]))
    weights = {"answer": torch.tensor(0.5), "distil": torch.tensor(3.0), "guided": torch.tensor(2.0)}
    ce, generated, divergence = by_hand(client, table, batch)
    for step in range(4):
        terms = game.method.guided_loss(client, batch, **weights)
        on = float(step < 2)  # only the first steps are guided
        torch.testing.assert_close(terms["ce"], ce)
        torch.testing.assert_close(terms["generated"], on * 0.5 * generated)
        torch.testing.assert_close(terms["distillation"], on * 3.0 * divergence)
    client["done"].value.zero_()
    client["known"].value.zero_()
    terms = game.method.guided_loss(client, batch, **weights)
    assert terms["generated"] == terms["distillation"] == 0, "there is no generator yet"


def test_the_target_of_distillation_is_detached(kit, monkeypatch):
    game, client, table = taught(kit, monkeypatch)
    batch = Batch(torch.tensor(game.x[:3]), torch.tensor([1, 0, 1]))
    weights = {"answer": torch.tensor(0.0), "distil": torch.tensor(1.0), "guided": torch.tensor(9.0)}
    found = game.method.guided_loss(client, batch, **weights)["distillation"]
    head = client["model"].head
    target = head(table[batch.y]).detach()
    scores = client["model"](batch.x)
    wanted = (target.softmax(1) * (target.log_softmax(1) - scores.log_softmax(1))).sum(1).mean()
    for one, other in zip(
        torch.autograd.grad(found, head.weight), torch.autograd.grad(wanted, head.weight), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("number", "options", "answer", "distil"),
    [
        (1, {}, 10 * 8 / 3, 10.0),
        (3, {"answer": 2.0}, 2 * 0.98**2 * 8 / 3, 10 * 0.98**2),
        (2000, {}, 1e-4 * 8 / 3, 1e-4),
        (5, {"decay": 1.0, "answer": 1.0, "distil": 0.0}, 8 / 3, 0.0),
    ],
)
def test_weights_fade_and_go_in_as_tensors(kit, monkeypatch, number, options, answer, distil):
    game, given = federation(kit, generated=8, guided_epochs=1, **options), {}
    monkeypatch.setattr(fedgen, "fit", lambda client, loss, streams, scalars: given.update(scalars))
    client = game.federation.clients.build_client("a")
    game.federation.clients.enter(client, number, {})
    sent = game.method.train(client)
    assert given["answer"].item() == pytest.approx(answer)
    assert given["distil"].item() == pytest.approx(distil)
    assert given["guided"].item() == 3  # seven samples in batches of three, one of two epochs
    assert sent["counts"].tolist() == [3, 3, 1, 0]


@pytest.mark.parametrize("teacher", ["weighted_losses", "mean_logits"])
def test_the_generator_learns_from_all_heads(kit, teacher):
    game = federation(kit, teacher=teacher, diversity=0.7, student=0.3)
    draw = torch.Generator().manual_seed(5)
    heads = [
        {"weight": torch.randn(4, 6, generator=draw), "bias": torch.randn(4, generator=draw)} for _ in "ab"
    ]
    shares = torch.tensor([[1.0, 0.25, 0.6, 0.0], [0.0, 0.75, 0.4, 1.0]])
    noise, y = torch.rand(5, 2, generator=draw), torch.tensor([0, 1, 2, 1, 3])
    stacked = Stacked(game.server["head"].module, heads)
    game.server["generator"].module.eval()
    terms = game.method.consensus(game.server, Batch(noise, y), stacked, shares)

    z = game.server["generator"](y, noise)
    losses, wanted = [], []
    for i, label in enumerate(y.tolist()):
        logits = [head["weight"] @ z[i] + head["bias"] for head in heads]
        mean = sum(shares[k, label] * logits[k] for k in (0, 1))
        each = [-one.log_softmax(0)[label] for one in logits]
        losses.append(
            sum(shares[k, label] * each[k] for k in (0, 1))
            if teacher == "weighted_losses"
            else -mean.log_softmax(0)[label]
        )
        p, q = mean.softmax(0), game.server["head"](z[i]).softmax(0)
        wanted.append((p * (p / q).log()).sum())
    torch.testing.assert_close(terms["teacher"], torch.stack(losses).mean())
    torch.testing.assert_close(terms["student"], -0.3 * torch.stack(wanted).mean())
    pairs = [
        (sum((a - b) ** 2 for a, b in zip(noise[i], noise[j], strict=True)) / 2)
        * (sum(abs(a - b) for a, b in zip(z[i], z[j], strict=True)) / 6)
        for i in range(5)
        for j in range(5)
    ]
    assert terms["diversity"].item() == pytest.approx(0.7 * math.exp(-sum(pairs).item() / 25), rel=1e-5)


def test_each_loss_has_the_weight_of_its_own_sample(kit):
    """A column of weights times a row of losses, as in the official code, would mix the samples."""
    game = federation(kit, diversity=0)
    flat = {"weight": torch.zeros(4, 6), "bias": torch.zeros(4)}
    sure = {"weight": torch.zeros(4, 6), "bias": torch.tensor([9.0, 0.0, 0.0, 0.0])}
    shares = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    stacked = Stacked(game.server["head"].module, [sure, flat])
    batch = Batch(torch.zeros(2, 2), torch.tensor([0, 1]))
    found = game.method.consensus(game.server, batch, stacked, shares)["teacher"].item()
    assert found == pytest.approx((math.log(1 + 3 * math.exp(-9)) + math.log(4)) / 2, rel=1e-5)


def test_unlike_representations_of_unlike_noise_are_rewarded():
    noise = torch.tensor([[0.0], [1.0]])
    assert sameness(noise, torch.zeros(2, 3)).item() == 1.0
    assert sameness(noise, torch.tensor([[0.0] * 3, [4.0] * 3])).item() == pytest.approx(math.exp(-2))


def test_classes_are_drawn_evenly_from_the_known_ones():
    with Rng(1).as_default():
        drawn = drawn_classes(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), 3000)
        assert drawn_classes(torch.zeros(5), 7).tolist() == [0] * 7
    found = torch.bincount(drawn, minlength=5)
    assert found[[0, 2]].tolist() == [0, 0]
    assert found[[1, 3, 4]].min() > 900


def test_the_generator_is_frozen_and_still_on_clients(kit):
    game = federation(kit, training=TRAINING | {"batch_size": 1})  # one sample has no batch statistics
    for _ in range(2):
        before = {name: value.clone() for name, value in game.server["generator"].state().items()}
        assert not game.round(*ROWS).failures
    for client in ROWS:
        own = game.part(client, "generator")
        assert all(torch.equal(own[name], value) for name, value in before.items())
    assert before.keys() >= {"norm.running_mean", "norm.running_var"}
    after = game.server["generator"].state()
    assert not torch.equal(after["first.weight"], before["first.weight"])


def test_the_input_is_the_class_and_noise():
    made = Generator(3, 2, 4, 5)
    seen = []
    made.first.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    made(torch.tensor([2, 0]), torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    torch.testing.assert_close(seen[0], torch.tensor([[0.1, 0.2, 0, 0, 1], [0.3, 0.4, 1, 0, 0]]))


@pytest.mark.parametrize(("floor", "known"), [(0, [0, 1, 2]), (1, [0, 1]), (2, [0]), (5, None)])
def test_classes_with_too_few_samples_are_not_learned(kit, floor, known):
    game = federation(kit, floor=floor)
    head = game.server["head"].state()
    counts = {"a": [3.0, 2.0, 1.0, 0.0], "b": [0.0, 1.0, 1.0, 0.0]}
    replies = Replies.of(
        {client: {"head": head, "counts": torch.tensor(own)} for client, own in counts.items()},
        samples={"a": 6, "b": 2},
    )
    game.method.train_generator(game.server, replies)
    assert game.server["known"].tensors().get("classes", torch.tensor([-1])).tolist() == (known or [-1])


@pytest.mark.parametrize("teacher", ["weighted_losses", "mean_logits"])
def test_no_upload_spoils_the_generator(kit, teacher):
    game = federation(kit, teacher=teacher)
    huge = {"weight": torch.full((4, 6), 3e38), "bias": torch.tensor([-3e38, 3e38, 0.0, 1.0])}
    lie = {"head": huge, "counts": torch.tensor([5.0, 0.0, 0.0, 0.0])}
    nothing = {"head": game.server["head"].state(), "counts": torch.zeros(4)}
    for replies in ({"a": lie, "b": lie}, {"a": nothing}, {"a": lie, "b": nothing}):
        game.method.train_generator(game.server, Replies.of(replies, samples=dict.fromkeys(replies, 0)))
    assert all(value.isfinite().all() for value in game.server["generator"].state().values())


def test_heads_must_have_one_form(kit):
    with pytest.raises(ConfigError, match=r"the head of client b .* is weight 4×4.*use fd, which takes any"):
        federation(kit, models=[kit.Shallow, kit.Narrow])


def test_some_term_must_teach(kit):
    with pytest.raises(ConfigError, match="answer and distil are both 0"):
        federation(kit, answer=0, distil=0)
