"""FedAvg against plain NumPy and PyTorch loops: one model, groups, layers, batch norm under both policies."""

import numpy as np
import pytest
import torch

from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.engine.protocol import Engine, Failure
from potluck.errors import ConfigError

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
TRAINING = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}}
LR = 0.2


def numpy_fedavg(kit, game, schedule, weights):
    """Softmax regression under FedAvg: two nested loops over the formula."""
    start = game.initial("a")
    weight, bias = start["head.weight"].double().numpy(), start["head.bias"].double().numpy()
    for number, cohort in enumerate(schedule, start=1):
        trained = []
        for client in cohort:
            w, b = weight.copy(), bias.copy()
            for rows in game.steps(client, number):
                dw, db = kit.Regression.gradient(w, b, game.x[rows], game.y[rows])
                w, b = w - LR * dw, b - LR * db
            trained.append((w, b))
        shares = [len(ROWS[client]) if weights == "samples" else 1 for client in cohort]
        weight = sum(share * w for share, (w, _) in zip(shares, trained, strict=True)) / sum(shares)
        bias = sum(share * b for share, (_, b) in zip(shares, trained, strict=True)) / sum(shares)
    return weight, bias


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("share", ["all", "groups", "layers"])
def test_two_rounds_of_softmax_regression(kit, share, weights):
    options = {"name": "fedavg", "share": share, "weights": weights}
    game = kit.Federation(options, kit.Linear, ROWS, training=TRAINING)
    schedule = [("a", "b", "c"), ("b", "c")]
    for cohort in schedule:
        game.round(*cohort)
    weight, bias = numpy_fedavg(kit, game, schedule, weights)
    down = game.method.downlink(game.server, "a")["model"]
    np.testing.assert_allclose(down["head.weight"], weight, atol=1e-5)
    np.testing.assert_allclose(down["head.bias"], bias, atol=1e-5)


def test_clients_that_start_apart_are_brought_together_first(kit):
    """Initial weights differ per client; the first of the cohort brings its own before anyone trains."""
    game = kit.Federation("fedavg", kit.Linear, ROWS, training=TRAINING, per_client=True)
    assert not torch.equal(game.initial("a")["head.weight"], game.initial("b")["head.weight"])
    cohort = game.round("a", "b")
    weight, _ = numpy_fedavg(kit, game, [("a", "b")], "samples")
    np.testing.assert_allclose(
        game.method.downlink(game.server, "c")["model"]["head.weight"], weight, atol=1e-5
    )
    setup = [line for line in cohort.ledger.lines if line["purpose"] == "setup"]
    assert [(line["client"], line["direction"]) for line in setup] == [("a", "up")]
    assert all(line["purpose"] == "train" for line in game.round("a", "b").ledger.lines)


def test_of_two_that_bring_the_same_layer_the_first_counts(kit):
    options = {"name": "fedavg", "share": "layers"}
    still = TRAINING | {"optimizer": {"lr": 1e-12}}
    game = kit.Federation(options, [kit.Shallow, kit.Side, kit.Deep], ROWS, training=still, per_client=True)
    game.round("a", "b", "c")  # b and c have more tensors than a, b comes before c
    for client in ROWS:
        down = game.method.downlink(game.server, client)["model"]
        owner = {name: "c" if name.startswith("fc2") else "b" for name in down}
        for name, value in down.items():
            torch.testing.assert_close(value, game.initial(owner[name])[name], msg=f"{client} {name}")


def torch_round(kit, game, number, cohort, start):
    """One round of plain PyTorch training; gives each client's weights."""
    trained = {}
    for client in cohort:
        model = game.federation.population.build_model(client)
        model.load_state_dict({**model.state_dict(), **start[client]})
        batches = [
            (torch.tensor(game.x[rows]), torch.tensor(game.y[rows])) for rows in game.steps(client, number)
        ]
        kit.plain_training(model, batches, LR)
        trained[client] = {name: value.detach().double() for name, value in model.state_dict().items()}
    return trained


def mean_by_name(trained, clients, shares):
    """Layer by layer, over the clients that have the layer."""
    result = {}
    for name in {name for client in clients for name in trained[client]}:
        holders = [client for client in clients if name in trained[client]]
        total = sum(shares[client] for client in holders)
        result[name] = sum(shares[client] * trained[client][name] for client in holders) / total
    return result


@pytest.mark.parametrize("share", ["groups", "layers"])
def test_two_architectures_over_two_rounds(kit, share):
    models = [kit.Shallow, kit.Deep, kit.Deep]
    options = {"name": "fedavg", "share": share, "weights": "uniform" if share == "layers" else "samples"}
    game = kit.Federation(options, models, ROWS, training=TRAINING)
    shares = {client: 1 if share == "layers" else len(rows) for client, rows in ROWS.items()}
    groups = [["a"], ["b", "c"]] if share == "groups" else [["a", "b", "c"]]
    donor = {client: game.initial(group[-1]) for group in groups for client in group}
    start = {
        client: {name: donor[client][name].double() for name in game.initial(client)} for client in game.rows
    }
    for number in (1, 2):
        game.round("a", "b", "c")
        trained = torch_round(kit, game, number, ["a", "b", "c"], start)
        for group in groups:
            means = mean_by_name(trained, group, shares)
            start |= {client: {name: means[name] for name in start[client]} for client in group}
    for client in game.rows:
        down = game.method.downlink(game.server, client)["model"]
        assert down.keys() == game.initial(client).keys()
        for name, value in down.items():
            np.testing.assert_allclose(value, start[client][name], atol=1e-5, err_msg=f"{client} {name}")


def test_layer_wise_mean_of_known_numbers(kit):
    """Three owners of one layer with 1, 2, 6 give 3; two of another with 4, 8 give 6; one nobody sent stays."""
    options = {"name": "fedavg", "share": "layers", "weights": "uniform"}
    game = kit.Federation(options, [kit.Shallow, kit.Deep, kit.Deep], ROWS, training=TRAINING)
    game.round("a", "b", "c")
    values = {"a": (1.0, None), "b": (2.0, 4.0), "c": (6.0, 8.0)}
    replies = replies_with(game, values)
    before = game.method.downlink(game.server, "b")["model"]
    game.server["weights"].load(game.method.mean(replies, "model", "uniform"))
    after = game.method.downlink(game.server, "b")["model"]
    torch.testing.assert_close(after["fc1.bias"], torch.full((6,), 3.0))
    torch.testing.assert_close(after["fc2.bias"], torch.full((6,), 6.0))
    for name in ("fc1.weight", "fc2.weight", "head.weight", "head.bias"):
        assert torch.equal(after[name], before[name]), name


def replies_with(game, values):
    messages = {}
    for client, (first, second) in values.items():
        tensors = {"fc1.bias": torch.full((6,), first)}
        if second is not None:
            tensors["fc2.bias"] = torch.full((6,), second)
        messages[client] = Message({"model": tensors})
    return Replies(messages, game.server.cards)


def test_a_group_with_no_sampled_member_keeps_its_weights(kit):
    game = kit.Federation("fedavg", [kit.Shallow, kit.Deep, kit.Deep], ROWS, training=TRAINING)
    game.round("a", "b", "c")
    before = {client: game.method.downlink(game.server, client)["model"] for client in game.rows}
    game.round("b", "c")
    after = {client: game.method.downlink(game.server, client)["model"] for client in game.rows}
    assert all(torch.equal(before["a"][name], after["a"][name]) for name in before["a"])
    assert not any(torch.equal(before["b"][name], after["b"][name]) for name in before["b"])


def test_groups_of_one_are_local_bit_for_bit(kit):
    models, rows = [kit.Shallow, kit.Deep], {"a": ROWS["a"], "b": ROWS["b"]}
    averaged = kit.Federation("fedavg", models, rows, training=TRAINING)
    alone = kit.Federation("local", models, rows, training=TRAINING)
    for _ in range(3):
        averaged.round("a", "b")
        alone.round("a", "b")
    for client in rows:
        for name, value in alone.state(client).items():
            assert torch.equal(averaged.state(client)[name], value), f"{client} {name}"


def test_different_models_are_refused_where_all_must_share(kit):
    with pytest.raises(ConfigError, match=r"client b .* has another model than client a"):
        kit.Federation({"name": "fedavg", "share": "all"}, [kit.Shallow, kit.Deep, kit.Deep], ROWS)


class TestBatchNorm:
    """`average`: running statistics travel with the weights. `local`: they never leave. The count never does."""

    def play(self, kit, buffers, rounds=2, batch_size=8):
        options = {"name": "fedavg", "buffers": buffers}
        game = kit.Federation(options, kit.Normed, ROWS, training=TRAINING | {"batch_size": batch_size})
        cohorts = [game.round("a", "b") for _ in range(rounds)]
        return game, [line for cohort in cohorts for line in cohort.ledger.lines]

    def plain(self, kit, game, number, start, client):
        """What the client's model is after a plain loop from these values."""
        model = game.federation.population.build_model(client)
        model.load_state_dict(start)
        rows = game.steps(client, number)
        kit.plain_training(model, [(torch.tensor(game.x[r]), torch.tensor(game.y[r])) for r in rows], LR)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def test_averaged_statistics_are_the_weighted_mean(self, kit):
        game, lines = self.play(kit, "average", rounds=1)
        start = game.federation.population.build_model("a").state_dict()
        a, b = (self.plain(kit, game, 1, start, client) for client in ("a", "b"))
        down = game.method.downlink(game.server, "c")["model"]
        assert {"norm.running_mean", "norm.running_var"} < down.keys()
        for name in down:
            expected = (7 * a[name].double() + 5 * b[name].double()) / 12
            np.testing.assert_allclose(down[name], expected, atol=1e-5, err_msg=name)
        parameters = sum(value.numel() for value in game.initial("a").values())
        assert {line["scalars"] for line in lines} == {parameters + 12}

    def test_local_statistics_never_cross_and_live_on(self, kit):
        game, lines = self.play(kit, "local")
        parameters = sum(value.numel() for value in game.initial("a").values())
        assert {line["scalars"] for line in lines} == {parameters}
        assert game.method.downlink(game.server, "a")["model"].keys() == game.initial("a").keys()
        states, means = {}, game.federation.population.build_model("a").state_dict()
        for number in (1, 2):
            for client in ("a", "b"):
                start = {**states.get(client, means), **{name: means[name] for name in game.initial("a")}}
                states[client] = self.plain(kit, game, number, start, client)
            means = {name: (7 * states["a"][name] + 5 * states["b"][name]) / 12 for name in states["a"]}
        for client in ("a", "b"):
            for name in ("running_mean", "running_var"):
                own = game.part(client, "model")[f"norm.{name}"]
                np.testing.assert_allclose(own, states[client][f"norm.{name}"], atol=1e-5)
        a, b = (game.part(client, "model")["norm.running_mean"] for client in ("a", "b"))
        assert not torch.allclose(a, b)

    @pytest.mark.parametrize("buffers", ["average", "local"])
    def test_the_count_of_batches_stays_at_home(self, kit, buffers):
        game, _ = self.play(kit, buffers, batch_size=4)
        assert "norm.num_batches_tracked" not in game.method.downlink(game.server, "a")["model"]
        assert [len(rows) for rows in game.steps("b", 1)] == [4, 1, 4, 1]
        assert game.part("b", "model")["norm.num_batches_tracked"] == 4  # a single sample has no statistics


class Unwilling(Engine):
    """An engine on which one client fails whatever it is asked."""

    def __init__(self, engine, client):
        self.engine, self.client = engine, client

    def run(self, requests):
        done = iter(self.engine.run([one for one in requests if one.client != self.client]))
        return [
            Failure(one.client, f"client {one.client}: gone") if one.client == self.client else next(done)
            for one in requests
        ]

    def examine(self, examinations):
        return self.engine.examine(examinations)

    def settle(self, round_, cohort, accepted):
        self.engine.settle(round_, cohort, accepted)


def test_another_client_brings_the_start_if_the_first_fails(kit):
    game = kit.Federation("fedavg", kit.Linear, ROWS, training=TRAINING, per_client=True)
    cohort = game.round("a", "b", "c", engine=Unwilling(game.engine, "a"))
    assert cohort.ids == ("b", "c")
    setup = [line for line in cohort.ledger.lines if line["purpose"] == "setup"]
    assert [(line["client"], line["direction"]) for line in setup] == [("b", "up")]
    other = kit.Federation("fedavg", kit.Linear, ROWS, training=TRAINING, per_client=True)
    other.round("b", "c")
    name = "head.weight"
    expected = other.method.downlink(other.server, "a")["model"][name]
    assert torch.equal(game.method.downlink(game.server, "a")["model"][name], expected)


def test_at_full_energy_compressed_uploads_give_the_same_average(kit):
    """θ + (θ_k − θ) against θ_k: a difference and a sum, each off by ε/2 of its size."""
    schedule = [("a", "b"), ("a", "b", "c")]
    games = [
        kit.Federation({"name": "fedavg", "compress": compress}, kit.Deep, ROWS, training=TRAINING)
        for compress in (None, {"start": 1.0, "end": 1.0})
    ]
    plain, full = games
    for game in games:
        game.round(*schedule[0])
    for name, value in plain.server["weights"].tensors().items():
        sizes = [value.abs()] + [
            plain.part(client, "model")[name.partition(":")[2]].abs() for client in schedule[0]
        ]
        bound = 8 * torch.finfo(torch.float32).eps * float(torch.stack(sizes).sum(0).max())
        torch.testing.assert_close(full.server["weights"].tensors()[name], value, rtol=0, atol=bound)


def test_compressed_uploads_are_cut_to_the_energy_and_the_averages_come_down_whole(kit):
    """The change of each matrix by NumPy's decomposition; what is not cut is the change itself."""
    options = {"name": "fedavg", "share": "all", "compress": {"start": 0.5, "end": 0.5}}
    game = kit.Federation(options, kit.Deep, ROWS, training=TRAINING)
    cohort = game.round("a")
    sent = {line["direction"]: line["scalars"] for line in cohort.ledger.lines if line["step"] == "train"}
    assert sent["up"] < sent["down"]
    start, server, cut = game.initial("a"), game.server["weights"].tensors(), 0
    for name, after in game.part("a", "model").items():
        change = (after - start[name]).double().numpy()
        moved = (server[name] - start[name]).double().numpy()
        if change.ndim == 2:
            u, s, v = np.linalg.svd(change, full_matrices=False)
            rank = int(np.searchsorted(np.cumsum(s**2), 0.5 * (s**2).sum())) + 1
            if rank * (sum(change.shape) + 1) < change.size:
                change, cut = (u[:, :rank] * s[:rank]) @ v[:rank], cut + 1
        np.testing.assert_allclose(moved, change, atol=1e-6)
    assert cut
