"""FedNova against its formulas in plain NumPy: unequal steps, momentum, a proximal term, layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from potluck.core.card import Card
from potluck.core.message import Message
from potluck.core.replies import Replies
from potluck.core.settings import ClientTraining, OptimizerSettings
from potluck.core.task import Task
from potluck.engine.protocol import Engine
from potluck.errors import ConfigError
from potluck.methods.fednova import FedNova, accumulated, adding_up

ROWS = {"a": range(0, 7), "b": range(7, 12), "c": range(12, 14)}
LR = 0.2
SCHEDULE = [("a", "b"), ("b", "c"), ("a", "b")]


def training(**optimizer):
    return {"epochs": 2, "batch_size": 3, "optimizer": {"lr": LR} | optimizer}


# --- a_k ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_the_closed_forms(steps):
    for rho in (0.5, 0.9):
        expected = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        assert accumulated(OptimizerSettings(momentum=rho), steps) == pytest.approx(expected)
        for nesterov in (False, True):
            settings = OptimizerSettings(momentum=rho, nesterov=nesterov)
            assert adding_up(settings, steps) == pytest.approx(accumulated(settings, steps))
    for pull in (0.02, 0.5):
        expected = (1 - (1 - pull) ** steps) / pull
        assert accumulated(OptimizerSettings(), steps, pull) == pytest.approx(expected)
    assert accumulated(OptimizerSettings(), steps) == steps
    assert accumulated(OptimizerSettings(name="adam"), steps, 0.3) == steps


def test_no_step_is_nothing():
    assert (
        accumulated(OptimizerSettings(momentum=0.9), 0) == adding_up(OptimizerSettings(momentum=0.9), 0) == 0
    )


def test_a_card_with_very_many_samples_costs_no_time():
    method = FedNova()
    method.training = lambda client: ClientTraining(batch_size=1, optimizer={"momentum": 0.9})
    known = method.symbols(Card("0", 10**12, Task("classification", 3, (1,)), {}))
    assert known["T"] == 10**12
    assert known["A"] == pytest.approx(10**13)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mu", [0.0, 1.5])
def test_it_is_the_way_of_a_constant_gradient(nesterov, mu):
    """As PyTorch's own SGD takes it; counting momentum and pull one after the other gives another number."""
    w = torch.zeros(1, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=LR, momentum=0.9, nesterov=nesterov)
    for _ in range(6):
        w.grad = torch.ones_like(w) + mu * w.detach()
        optimizer.step()
    settings = OptimizerSettings(lr=LR, momentum=0.9, nesterov=nesterov)
    assert accumulated(settings, 6, LR * mu) == pytest.approx(-w.item() / LR)


# --- rounds ------------------------------------------------------------------------------------------------


def numpy_fednova(kit, game, schedule, rho=0.0, mu=0.0, gamma=0.0):
    """Softmax regression; a_k is counted step by step as in the released code, which has one of ρ and μ."""
    x = [value.double().numpy() for value in game.initial("a").values()]
    v = [np.zeros_like(value) for value in x]
    for number, cohort in enumerate(schedule, start=1):
        moved, counted, taken = [], [], []
        for client in cohort:
            y, buffer = [value.copy() for value in x], [np.zeros_like(value) for value in x]
            a = counter = 0.0
            for rows in game.steps(client, number):
                gradients = kit.Regression.gradient(*y, game.x[rows], game.y[rows])
                for place, gradient in enumerate(gradients):
                    buffer[place] = rho * buffer[place] + gradient + mu * (y[place] - x[place])
                    y[place] = y[place] - LR * buffer[place]
                if rho:
                    counter = counter * rho + 1
                    a += counter
                elif mu:
                    a = a * (1 - LR * mu) + 1
                else:
                    a += 1
            moved.append([after - before for after, before in zip(y, x, strict=True)])
            counted.append(a)
            taken.append(len(game.steps(client, number)))
        p = np.array([len(ROWS[client]) for client in cohort]) / sum(len(ROWS[client]) for client in cohort)
        effective = p @ np.array(taken if mu else counted)
        for place in range(len(x)):
            step = sum(share * move[place] / a for share, move, a in zip(p, moved, counted, strict=True))
            v[place] = gamma * v[place] + effective * step
            x[place] = x[place] + v[place]
    return x


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize(
    ("options", "optimizer", "given"),
    [
        ({}, {}, {}),
        ({}, {"momentum": 0.9}, {"rho": 0.9}),
        ({"mu": 0.7}, {}, {"mu": 0.7}),
        ({"server_momentum": 0.6}, {}, {"gamma": 0.6}),
        ({"server_momentum": 0.6, "share": "layers"}, {"momentum": 0.5}, {"rho": 0.5, "gamma": 0.6}),
    ],
)
def test_rounds_with_unequal_steps_match_the_formulas(kit, options, optimizer, given):
    game = kit.Federation({"name": "fednova"} | options, kit.Linear, ROWS, training=training(**optimizer))
    for cohort in SCHEDULE:
        game.round(*cohort)
    assert len(game.steps("a", 1)) != len(game.steps("b", 1))
    down = game.method.downlink(game.server, "a")["model"]
    expected = numpy_fednova(kit, game, SCHEDULE, **given)
    for name, value in zip(("head.weight", "head.bias"), expected, strict=True):
        np.testing.assert_allclose(down[name], value, atol=1e-5, err_msg=name)


def test_one_number_more_than_fedavg_goes_up_and_one_more_with_a_proximal_term(kit):
    for options, more in (({}, 1), ({"mu": 0.1}, 2)):
        game = kit.Federation({"name": "fednova"} | options, kit.Linear, ROWS, training=training())
        game.round("a", "b")
        size = sum(value.numel() for value in game.initial("a").values())
        lines = game.round("a", "b").ledger.lines
        assert {(line["direction"], line["scalars"]) for line in lines} == {
            ("down", size),
            ("up", size + more),
        }


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("share", ["all", "groups", "layers"])
@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"name": "adam", "lr": 0.02}], ids=str)
def test_with_equal_steps_it_is_fedavg(kit, share, optimizer):
    rows = {"a": range(0, 6), "b": range(6, 11), "c": range(11, 16)}  # two batches each
    models = kit.Normed if share == "all" else [kit.Shallow, kit.Deep, kit.Deep]
    nova, plain = (
        kit.Federation({"name": name, "share": share}, models, rows, training=training(**optimizer))
        for name in ("fednova", "fedavg")
    )
    for cohort in [("a", "b", "c"), ("b", "c"), ("a", "c")]:
        nova.round(*cohort)
        plain.round(*cohort)
    for client in rows:
        expected = plain.method.downlink(plain.server, client)["model"]
        for name, value in nova.method.downlink(nova.server, client)["model"].items():
            torch.testing.assert_close(value, expected[name], msg=f"{client} {name}")


# --- the server's step, with numbers by hand ----------------------------------------------------------------


class Answering:
    """A cohort that answers with given messages."""

    def __init__(self, game, messages):
        self.replies = Replies({k: Message(value) for k, value in messages.items()}, game.server.cards)
        self.ids, self.cards, self.total = tuple(messages), game.server.cards, len(game.server.cards)

    def ask(self, step, **keywords):
        return self.replies


def answers(moved, normalizers):
    """Changes of biases, and a_k."""
    return {
        client: {
            "model": {f"{name}.bias": torch.full((6,), value) for name, value in moved[client].items()},
            "normalizer": torch.tensor(normalizers[client]),
        }
        for client in moved
    }


def played(kit, moved, normalizers, **options):
    """How far the biases of a deep client moved."""
    game = kit.Federation(
        {"name": "fednova", "share": "layers"} | options,
        [kit.Shallow, kit.Deep, kit.Deep],
        ROWS,
        training=training(),
    )
    game.round("a", "b", "c")
    before = game.method.downlink(game.server, "b")["model"]
    game.method.round(game.server, Answering(game, answers(moved, normalizers)))
    after = game.method.downlink(game.server, "b")["model"]
    return {name: (after[name] - before[name])[0].item() for name in ("fc1.bias", "fc2.bias")}


MOVED = {"a": {"fc1": 6.0}, "b": {"fc1": 4.0, "fc2": 8.0}, "c": {"fc1": 2.0, "fc2": 2.0}}


def test_a_layer_has_its_own_weights_and_effective_steps(kit):
    """n is 7, 5, 2. fc1: τ_eff = (7·3 + 5·2 + 2·1)/14, a step is 2 everywhere; fc2: of b and c alone."""
    moves = played(kit, MOVED, {"a": 3.0, "b": 2.0, "c": 1.0})
    assert moves["fc1.bias"] == pytest.approx(33 / 14 * 2, rel=1e-5)
    assert moves["fc2.bias"] == pytest.approx((5 * 2 + 2 * 1) / 7 * (5 * 4 + 2 * 2) / 7, rel=1e-5)


def test_uniform_weights(kit):
    moves = played(kit, MOVED, {"a": 3.0, "b": 2.0, "c": 1.0}, weights="uniform")
    assert moves == pytest.approx({"fc1.bias": 2 * 2, "fc2.bias": 1.5 * 3}, rel=1e-5)


def test_a_client_without_a_step_is_left_out(kit):
    moves = played(kit, MOVED, {"a": 3.0, "b": 2.0, "c": 0.0})
    assert moves == pytest.approx({"fc1.bias": (7 * 3 + 5 * 2) / 12 * 2, "fc2.bias": 8.0}, rel=1e-5)
    assert played(kit, MOVED, dict.fromkeys(MOVED, 0.0)) == {"fc1.bias": 0.0, "fc2.bias": 0.0}


def test_clients_without_a_sample_take_part_and_change_nothing(kit):
    rows = {"a": range(0, 7), "b": range(7, 12), "c": []}
    for mu in (0.0, 0.5):
        game, alone = (
            kit.Federation(
                {"name": "fednova", "mu": mu, "weights": "uniform"}, kit.Linear, rows, training=training()
            )
            for _ in range(2)
        )
        game.round("a", "c")
        alone.round("a")
        assert game.accepted["c"] == 1
        torch.testing.assert_close(game.server["weights"].state(), alone.server["weights"].state())


def test_a_count_beyond_what_a_client_can_do_is_out_of_range(kit):
    game = kit.Federation("fednova", kit.Linear, ROWS, training=training(momentum=0.5))
    symbols = game.method.symbols(game.server.cards["a"])
    assert symbols["T"] == len(game.steps("a", 1)) == 6
    assert symbols["A"] == 11  # [6 − 0.5·(1 − 0.5⁶)/0.5]/0.5 = 10.03
    assert game.method.up_contract("train")["normalizer"].at_most == "A"


class Lying(Engine):
    """An engine on which one client tells another number than it found."""

    def __init__(self, engine, client, name, value):
        self.engine, self.client, self.name, self.value = engine, client, name, value

    def run(self, requests):
        return [self.altered(answer) for answer in self.engine.run(requests)]

    def altered(self, answer):
        if answer.client != self.client or self.name not in answer.up:
            return answer
        return replace(answer, up=Message({**answer.up, self.name: torch.tensor(self.value)}))

    def examine(self, examinations):
        return self.engine.examine(examinations)

    def settle(self, round_, cohort, accepted):
        self.engine.settle(round_, cohort, accepted)


@pytest.mark.parametrize(
    ("name", "value"), [("normalizer", 1e30), ("normalizer", -2.0), ("steps", 7.0), ("steps", 0.5)]
)
def test_a_client_that_lies_about_its_steps_is_left_out(kit, name, value):
    game = kit.Federation({"name": "fednova", "mu": 0.5}, kit.Linear, ROWS, training=training())
    cohort = game.round("a", "b", engine=Lying(game.engine, "a", name, value))
    assert cohort.ids == ("b",)
    assert f"tensor '{name}' has other numbers than" in cohort.failures["a"]


@pytest.mark.parametrize(("name", "value"), [("normalizer", 0.0), ("normalizer", 1e-30), ("steps", 0.0)])
def test_small_numbers_within_the_range_do_no_harm(kit, name, value):
    game = kit.Federation({"name": "fednova", "mu": 0.5}, kit.Linear, ROWS, training=training())
    cohort = game.round("a", "b", engine=Lying(game.engine, "a", name, value))
    assert cohort.ids == ("a", "b")
    assert all(value.isfinite().all() for value in game.server["weights"].state().values())


def test_statistics_are_the_plain_mean(kit):
    nova, plain = (
        kit.Federation(name, kit.Normed, ROWS, training=training() | {"batch_size": 4})
        for name in ("fednova", "fedavg")
    )
    for game in (nova, plain):
        game.round("a", "b")
    assert len(nova.steps("a", 1)) == len(nova.steps("b", 1))
    ours, theirs = (game.method.downlink(game.server, "a")["model"] for game in (nova, plain))
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(ours[name], theirs[name])


# --- settings ----------------------------------------------------------------------------------------------


def test_a_proximal_term_that_overshoots_is_refused(kit):
    with pytest.raises(ConfigError, match=r"fednova: method.mu times the learning rate of client a is 1.2"):
        kit.Federation({"name": "fednova", "mu": 6.0}, kit.Linear, ROWS, training=training())
    kit.Federation({"name": "fednova", "mu": 5.0}, kit.Linear, ROWS, training=training())


def test_that_adam_has_no_count_is_said_once(kit):
    said = {
        name: [
            sentence
            for sentence in game.method.advice(game.federation.population)
            if "the paper has no a_k" in sentence
        ]
        for name in ("sgd", "adam")
        for game in [kit.Federation("fednova", kit.Linear, ROWS, training=training(name=name))]
    }
    assert (len(said["sgd"]), len(said["adam"])) == (0, 1)
