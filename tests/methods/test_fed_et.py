"""Fed-ET: the ensemble by hand, a round against a plain loop, whose head goes where, what is refused."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.streams import shuffled_batches
from potluck.errors import ConfigError
from potluck.kit.ensembles import ensemble
from potluck.methods.fed_et import FedET

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 16)}
TRAINING = {"epochs": 3, "batch_size": 3, "optimizer": {"lr": 0.2}}
PUBLIC = np.random.Generator(np.random.PCG64(8)).standard_normal((10, 3)).astype(np.float32)
CHOSEN = {"name": "fed-et", "steps": 5, "batch": 4, "lr": 0.05, "diversity": 0.5}


Y = np.where(np.arange(16) % 3, 1, np.arange(16) % 4)  # most are of one class, so that clients agree at times


def federation(kit, models=None, public=PUBLIC, y=Y, lacking=None, **options):
    models = models or [kit.Shallow, kit.Shallow, kit.Deep]  # a and b are one architecture
    chosen = {**CHOSEN, **options}
    return kit.Federation(chosen, models, ROWS, training=TRAINING, public=public, y=y, lacking=lacking)


def variance(values):
    mean = sum(values) / len(values)
    return sum((one - mean) ** 2 for one in values) / (len(values) - 1)


def consensus_by_hand(opinions):
    """Of one sample: the label, and the logits of those who dissent or None."""
    weights = [variance(one) for one in opinions]
    mean = [sum(w * o[c] for w, o in zip(weights, opinions, strict=True)) for c in range(len(opinions[0]))]
    label = mean.index(max(mean))
    against = [(w, o) for w, o in zip(weights, opinions, strict=True) if o.index(max(o)) != label]
    if not against:
        return label, None
    total = sum(w for w, _ in against)
    return label, [sum(w * o[c] for w, o in against) / total for c in range(len(opinions[0]))]


def test_a_sure_teacher_outvotes_two_that_waver():
    """The plain mean says class 0; weighted by variance it is class 2. The dissent is that of both others."""
    opinions = [[0.9, 0.5, 0.2], [0.9, 0.4, 0.3], [-0.5, -1.0, 0.6]]
    found = ensemble(torch.tensor(opinions).unsqueeze(1))
    label, dissent = consensus_by_hand(opinions)
    assert int(torch.tensor(opinions).mean(0).argmax()) == 0
    assert int(found["labels"]) == label == 2
    assert found["dissent"][0].tolist() == pytest.approx(dissent)
    assert float(found["divided"]) == float(found["known"]) == 1


def test_where_nobody_dissents_the_second_term_is_left_out(kit):
    """Zero logits in its place would be a uniform target, and pull towards it."""
    game = federation(kit)
    logits = torch.tensor([[[2.0, 0.0, 0.0, 1.0]], [[1.0, 0.5, 0.0, 0.0]]])
    lessons = {name: value.expand(10, *value.shape[1:]) for name, value in ensemble(logits).items()}
    assert not lessons["divided"].any()
    batch = game.server.public.source.take(torch.arange(4))
    terms = game.method.lesson(game.server, batch, **lessons)
    assert float(terms["diversity"].detach()) == 0
    plain = F.cross_entropy(game.server["server"](batch.x), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(terms["consensus"], plain)
    weight = game.server["server"].content.head.weight
    [gradient] = torch.autograd.grad(sum(terms.values()), [weight])
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, [weight])[0])


@pytest.mark.parametrize("wrong", [3e38, -3e38])
def test_a_teacher_with_the_largest_logits_spoils_nothing(wrong):
    logits = torch.tensor([[[1.0, 0.0]], [[wrong, 0.0]]])
    found = ensemble(logits)
    assert all(bool(value.isfinite().all()) for value in found.values())
    nobody = ensemble(torch.full((2, 1, 2), 0.5))
    assert float(nobody["known"]) == float(nobody["divided"]) == 0


def mean_of(models, name, weights):
    tensors = [dict(model.named_parameters())[name].detach() for model in models]
    return sum(w * one for w, one in zip(weights, tensors, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("weights", "own", "lacking"),
    [("uniform", False, ()), ("samples", False, (1, 4, 7)), ("uniform", True, ())],
)
def test_a_round_is_a_plain_loop(kit, weights, own, lacking):
    game = federation(kit, weights=weights, lacking={None: lacking}, **({"server": kit.Side} if own else {}))
    student, models = copy.deepcopy(game.server["server"].content), game.trained(lr=0.2)
    assert type(student) is (kit.Side if own else kit.Deep)  # the largest of the pool
    game.round(*ROWS)
    counts = dict.fromkeys(ROWS, 1) if weights == "uniform" else {"a": 7, "b": 5, "c": 4}
    with torch.no_grad():
        for name in ("weight", "bias"):
            mean = mean_of(models.values(), f"head.{name}", counts.values())
            getattr(student.head, name).copy_(mean)
        said = torch.stack([model(torch.tensor(PUBLIC)) for model in models.values()], 1).tolist()
    lessons = [consensus_by_hand(opinions) for opinions in said]
    assert {dissent is None for _, dissent in lessons} == {True, False}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    there = np.setdiff1d(np.arange(10), lacking)
    rng = game.federation.server_rng(1).child("transfer")
    order = [rows for rows in shuffled_batches(there, 4, 5, "keep", rng) if len(rows) > 1]
    for rows in order[:5]:
        logits = student(torch.tensor(PUBLIC[rows]))
        loss = F.cross_entropy(logits, torch.tensor([lessons[row][0] for row in rows]))
        for one, row in zip(logits, rows, strict=True):
            if lessons[row][1] is not None:
                target = torch.tensor(lessons[row][1]).softmax(0)
                loss = loss + 0.5 * (target * (target.log() - one.log_softmax(0))).sum() / len(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in student.named_parameters():
        torch.testing.assert_close(game.server["server"].tensors()[name], value, atol=1e-5, rtol=1e-4)
    for clients in (["a", "b"], ["c"]):
        sent = game.method.downlink(game.server, clients[0])["model"]
        for name in game.initial(clients[0]):
            expected = mean_of([models[one] for one in clients], name, [counts[one] for one in clients])
            if name.startswith("head."):
                expected = dict(student.named_parameters())[name].detach()
            torch.testing.assert_close(sent[name], expected, msg=name, atol=1e-5, rtol=1e-4)


def test_an_architecture_without_a_client_stays_as_it_is(kit):
    game = federation(kit)
    game.round(*ROWS)
    before = game.method.downlink(game.server, "c")["model"]
    game.round("a", "b")
    after = game.method.downlink(game.server, "c")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_crosses(kit):
    game = federation(kit)
    game.round(*ROWS)
    lines = game.round(*ROWS).ledger.lines
    small, large = (3 * 6 + 6 + 6 * 4 + 4, 3 * 6 + 6 + 6 * 6 + 6 + 6 * 4 + 4)
    sizes = {"a": small, "b": small, "c": large}
    assert {(line["client"], line["direction"]): line["scalars"] for line in lines} == {
        (client, way): sizes[client] for client in ROWS for way in ("up", "down")
    }


def test_the_defaults(kit):
    config = FedET.Config()
    assert (config.diversity, config.steps, config.lr, config.momentum) == (0.05, 128, 5e-3, 0.9)
    assert federation(kit, public=np.zeros((300, 3), np.float32), batch=None).method.batch == 64


def test_a_server_smaller_than_a_client_is_advised_against(kit):
    small = federation(kit, server=kit.Shallow)
    [sentence] = small.method.advice(small.federation.population)
    assert "smaller than a client's; name a larger one in method.server" in sentence
    assert not [*federation(kit).method.advice(federation(kit).federation.population)]


def two_layers(kit):
    class TwoLayers(kit.Shallow):
        """A head of two layers."""

        def __init__(self, task):
            super().__init__(task)
            self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, task.classes))

    return TwoLayers


def test_what_cannot_work_is_said_in_a_sentence(kit):
    with pytest.raises(ConfigError, match=r"fed-et: the head of client b \(Narrow\) is .* or use feddf"):
        federation(kit, models=[kit.Shallow, kit.Narrow, kit.Deep])
    with pytest.raises(
        ConfigError, match=r"fed-et: the head of method.server is 0.weight 6×6, .* or use feddf"
    ):
        federation(kit, server=two_layers(kit))
    with pytest.raises(ConfigError, match="fed-et needs public data"):
        federation(kit, public=None)
    with pytest.raises(ConfigError, match=r"fed-et: client a \(Shallow\) has 1 class, .* or use local"):
        federation(kit, y=np.zeros(16, dtype=np.int64))
