"""FD and FedHe: class logits, targets and losses by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from potluck.core.client import Client
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.errors import ConfigError
from potluck.methods.fd import FD
from potluck.methods.fedhe import FedHe

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LABELS = np.array([0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 1, 2, 3])  # a: 0 1 2; b: 1 2; the last sample is nobody's
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}


def federation(kit, method="fd", rows=ROWS, **options):
    x = np.random.Generator(np.random.PCG64(3)).standard_normal((13, 3)).astype(np.float32)
    models = [kit.Shallow, kit.Narrow][: len(rows)]  # widths need not agree
    return kit.Federation({"name": method, **options}, models, rows, x=x, y=LABELS, training=TRAINING)


def plain_round(game, client, model, number, targets, term, weight):
    """A round of a client in a plain loop; gives the mean logits of each class, as they were while training."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.2), {}
    for rows in game.steps(client, number):
        x, y = torch.tensor(game.x[rows]), game.y[rows].tolist()
        logits = model(x)
        loss = F.cross_entropy(logits, torch.tensor(y))
        pulled = [term(o, targets[c]) for o, c in zip(logits, y, strict=True) if c in targets]
        if pulled:
            loss = loss + weight * torch.stack(pulled).mean()
        for o, c in zip(logits.detach(), y, strict=True):
            seen.setdefault(c, []).append(o)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {c: (torch.stack(found).mean(0), len(found)) for c, found in seen.items()}


def kl(logits, target):
    p = target.exp() / target.exp().sum()
    q = logits.exp() / logits.exp().sum()
    return (p * (p / q).log()).sum()


def mse(logits, target):
    return ((logits - target) ** 2).sum() / len(target)


@pytest.mark.parametrize(
    ("method", "options", "term"),
    [
        ("fd", {"weight": 0.7}, kl),
        ("fd", {"weight": 0.3, "distance": "mse", "weights": "count"}, mse),
        ("fd", {"weight": 0.7, "exclude_self": True}, kl),
        ("fedhe", {"weight": 0.3}, mse),
    ],
)
def test_two_rounds_against_a_plain_loop(kit, method, options, term):
    game = federation(kit, method, **options)
    models = {client: game.federation.population.build_model(client) for client in ROWS}
    targets = {client: {} for client in ROWS}
    for number in (1, 2):
        game.round(*ROWS)
        means = {
            client: plain_round(
                game, client, models[client], number, targets[client], term, options["weight"]
            )
            for client in ROWS
        }
        for client in ROWS:
            others = [one for one in ROWS if not (options.get("exclude_self") and one == client)]
            targets[client] = {}
            for label in {c for one in others for c in means[one]}:
                pairs = [means[one][label] for one in others if label in means[one]]
                shares = [count if options.get("weights") == "count" else 1 for _, count in pairs]
                total = sum(share * mean for share, (mean, _) in zip(shares, pairs, strict=True))
                targets[client][label] = total / sum(shares)
    for client, model in models.items():
        for name, value in model.named_parameters():
            torch.testing.assert_close(game.part(client, "model")[name], value.detach(), atol=1e-5, rtol=0)
        down = game.method.downlink(game.server, client)
        assert down["classes"].tolist() == sorted(targets[client])
        for label, row in zip(down["classes"].tolist(), down["logits"], strict=True):
            torch.testing.assert_close(row, targets[client][label], atol=1e-5, rtol=0)


def tiny(known, targets, method=FD, **options):
    """A client whose logits are its samples."""
    made = method(method.Config(name=method.name, **options))
    x, y = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]]), torch.tensor([0, 1, 2])
    client = Client(Task("classification", 3, (3,)), Source(x, y))
    client.declare(
        {
            "model": torch.nn.Identity(),
            "logits": torch.tensor(targets),
            "known": torch.tensor(known, dtype=torch.float),
        }
    )
    return made, client, Batch(x, y)


TARGETS = [[0.0, 0.0, 0.0], [-3.0, 7.0, 1.0], [4.0, 4.0, 4.0]]


@pytest.mark.parametrize("known", [[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]])
def test_only_samples_with_a_target_count(known):
    method, client, batch = tiny(known, TARGETS, weight=0.5)
    terms = [kl(o, torch.tensor(TARGETS[c])) for c, o in enumerate(batch.x) if known[c]]
    expected = 0.5 * sum(terms) / max(len(terms), 1)
    found = method.loss(client, batch)
    assert found["distillation"].item() == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(found["ce"], F.cross_entropy(batch.x, batch.y))


def test_raw_logits_are_no_probabilities():
    """HtFLlib gives the logits themselves to cross-entropy: adding a constant to a target would change the loss."""
    method, client, batch = tiny([1, 1, 1], TARGETS)
    shifted, other, _ = tiny([1, 1, 1], [[value + 9 for value in row] for row in TARGETS])
    one, two = (m.loss(c, batch)["distillation"] for m, c in ((method, client), (shifted, other)))
    torch.testing.assert_close(one, two)
    assert abs(F.cross_entropy(batch.x, torch.tensor(TARGETS)) - one) > 1
    same, own, _ = tiny([1, 1, 1], [[1.0, 2.0, 0.0], [3.0, 0.0, 1.0], [0.0, 1.0, 5.0]])
    assert same.loss(own, batch)["distillation"].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("method", [FD, FedHe])
def test_squared_distance_by_hand(method):
    options = {"distance": "mse"} if method is FD else {}
    made, client, batch = tiny([1, 0, 0], [[0.0, 0.0, 3.0]] * 3, method, **options)
    assert made.loss(client, batch)["distillation"].item() == pytest.approx((1 + 4 + 9) / 3)


def test_a_sample_that_counts_nothing_is_left_out():
    method, client, batch = tiny([1, 1, 1], TARGETS)
    weighted = Batch(batch.x, batch.y, weight=torch.tensor([1.0, 0.0, 1.0]))
    only = Batch(batch.x[[0, 2]], batch.y[[0, 2]])
    for name, value in method.loss(client, weighted).items():
        torch.testing.assert_close(value, method.loss(client, only)[name])


def test_what_crosses(kit):
    game = federation(kit)
    game.round(*ROWS)
    lines = game.round(*ROWS).ledger.lines
    sizes = {(line["client"], line["direction"]): line["names"] for line in lines}
    assert sizes["a", "up"] == {"logits": 3 * 4, "classes": 3, "counts": 3}
    assert sizes["b", "up"] == {"logits": 2 * 4, "classes": 2, "counts": 2}
    assert sizes["a", "down"] == {"logits": 3 * 4, "classes": 3}


def test_counts_are_of_samples_and_not_of_epochs(kit):
    game = federation(kit)
    client = game.federation.clients.build_client("a")
    game.federation.clients.enter(client, 1, {})
    sent = game.method.train(client)
    assert sent["classes"].tolist() == [0, 1, 2]
    assert sent["counts"].tolist() == [3, 3, 1]  # in two epochs


def test_a_class_that_was_in_no_batch_is_not_sent_as_held(kit):
    x = np.zeros((13, 3), dtype=np.float32)
    training = TRAINING | {"epochs": 1, "batch_size": 4, "last_batch": "drop"}
    game = kit.Federation("fd", [kit.Shallow, kit.Narrow], ROWS, x=x, y=LABELS, training=training)
    client = game.federation.clients.build_client("a")
    for number in range(1, 30):
        game.federation.clients.enter(client, number, {})
        sent = game.method.train(client)
        seen = {int(game.y[row]) for rows in game.steps("a", number) for row in rows}
        assert [bool(count) for count in sent["counts"]] == [label in seen for label in (0, 1, 2)]
        if len(seen) < 3:
            return
    pytest.fail("no order of batches leaves a class out")


def test_fedhe_is_fd_with_the_squared_distance(kit):
    one, other = federation(kit, "fedhe", weight=0.5), federation(kit, "fd", distance="mse", weight=0.5)
    for cohort in (("a", "b"), ("b",), ("a", "b")):
        one.round(*cohort)
        other.round(*cohort)
    for client in ROWS:
        assert all(torch.equal(value, other.state(client)[name]) for name, value in one.state(client).items())


class Scripted:
    """Clients that answer with given replies."""

    def __init__(self, *rounds):
        self.rounds = iter(rounds)

    def ask(self, step):
        made = {
            client: {
                "logits": torch.tensor(rows),
                "classes": torch.tensor(held),
                "counts": torch.tensor(counts),
            }
            for client, (rows, held, counts) in next(self.rounds).items()
        }
        return Replies.of(made, samples=dict.fromkeys(made, 1))


def served(method, *rounds, **options):
    """The server after rounds with given replies."""
    made, task = method(method.Config(name=method.name, **options)), Task("classification", 2, (1,))
    server = Server(task, {})
    server.declare(made.server_state(task))
    clients = Scripted(*rounds)
    for number, _ in enumerate(rounds, 1):
        server.round = number
        made.round(server, clients)
    return made, server


def targets(method, server, client="a"):
    down = method.downlink(server, client)
    return dict(zip(down["classes"].tolist(), down["logits"].tolist(), strict=True)) if down else {}


def test_fedhe_forgets_by_turning_sums_into_one_mean():
    rounds = [{"a": ([[value, 0.0]], [0], [1.0])} for value in (2.0, 4.0, 12.0, 0.0)]
    for count, expected in ((1, 2.0), (2, 3.0), (3, 7.5), (4, 5.0)):
        # the mean of 2 and 4 counts once after the second round: (3 + 12) / 2, then (3 + 12 + 0) / 3
        method, server = served(FedHe, *rounds[:count], forget=2)
        assert targets(method, server)[0] == pytest.approx([expected, 0.0])
    assert server["running"].value[0].tolist() == pytest.approx([5.0, 0.0, 1.0])
    assert 1 not in targets(method, server)


def test_leaving_oneself_out_with_some_clients_absent():
    first = {"a": ([[1.0, 0.0], [5.0, 5.0]], [0, 1], [2.0, 2.0]), "b": ([[3.0, 0.0]], [0], [1.0])}
    second = {"b": ([[7.0, 0.0]], [0], [1.0])}
    method, server = served(FD, first, exclude_self=True)
    assert targets(method, server, "a") == {0: [3.0, 0.0]}  # nobody else holds class 1
    assert targets(method, server, "b") == {0: [1.0, 0.0], 1: [5.0, 5.0]}
    assert targets(method, server, "c") == {0: [2.0, 0.0], 1: [5.0, 5.0]}
    method, server = served(FD, first, second, exclude_self=True)
    assert targets(method, server, "a") == {0: [7.0, 0.0]}
    assert targets(method, server, "b") == {1: [5.0, 5.0]}  # class 1 came in the first round only


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("weights", ["uniform", "count"])
def test_counts_of_zero_and_huge_values_do_not_raise(exclude_self, weights):
    lie = {"a": ([[3e38, -3e38], [1.0, 1.0]], [0, 1], [5.0, 0.0]), "b": ([[3e38, 0.0]], [0], [4.0])}
    nothing = {"a": ([[1.0, 1.0]], [1], [0.0])}
    method, server = served(FD, lie, nothing, exclude_self=exclude_self, weights=weights)
    assert 1 not in targets(method, server, "c")
    method, server = served(FD, nothing, exclude_self=exclude_self, weights=weights)
    assert targets(method, server) == {}


def test_one_client_cannot_leave_itself_out(kit):
    with pytest.raises(ConfigError, match=r"exclude_self leaves client a without any target.*use local"):
        federation(kit, rows={"a": range(0, 7)}, exclude_self=True)
