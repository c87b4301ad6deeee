"""`fit` against plain PyTorch loops, bit for bit, and everything it promises besides."""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.client import Client
from potluck.core.rng import Rng
from potluck.core.server import Server
from potluck.core.settings import ClientTraining, OptimizerSettings
from potluck.core.state import Moments
from potluck.core.streams import Source, Stream
from potluck.core.task import Task
from potluck.errors import ConfigError
from potluck.training.collect import collect
from potluck.training.fit import fit
from potluck.training.optimizers import Group, Optimizer, shorten_gradients

TASK = Task("classification", 3, (4,))
DRAW = Rng(11)
X = torch.randn(20, 4, generator=DRAW.child("x").generator())
Y = torch.randint(0, 3, (20,), generator=DRAW.child("y").generator())


def network(norm=False, seed=0):
    with Rng(seed).as_default():
        middle = [nn.BatchNorm1d(5)] if norm else []
        return nn.Sequential(nn.Linear(4, 5), *middle, nn.ReLU(), nn.Linear(5, 3))


def make_client(rows=13, parts=None, prepare=None, **training):
    client = Client(TASK, Source(X, Y, prepare))
    client.declare({"model": network()} if parts is None else parts)
    client.rows = {"train": np.arange(rows), "test": np.arange(rows, 20), "validation": np.arange(0)}
    client.training = ClientTraining(**({"batch_size": 4, "epochs": 2} | training))
    enter(client, 1)
    return client


def enter(client, round_, counters=None):
    client.enter(round_, Rng(5).child("round", round_), {} if counters is None else counters, "train")


def ce(client, batch):
    return F.cross_entropy(client["model"](batch.x), batch.y)


def order(round_=1, rows=13, **training):
    """The batches a client will see in a round."""
    client = make_client(rows, **training)
    enter(client, round_)
    return [torch.from_numpy(one) for one in client.batches().order]


def plain(model, optimizer, batches, edit=None):
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        if edit is not None:
            edit(model)
        optimizer.step()


def weights(module):
    return torch.cat([value.detach().flatten() for value in module.parameters()]).clone()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "weight decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam, decay, betas": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw without decay": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
}


def asked(name):
    kind, options = OPTIMIZERS[name]
    return OptimizerSettings(name=kind.__name__.lower(), **options)


def in_torch(name, model, **extra):
    kind, options = OPTIMIZERS[name]
    return kind(model.parameters(), **options | extra)


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_the_same_fused_optimiser_bit_for_bit_and_the_plain_one_closely(self, name):
        client = make_client(optimizer=asked(name))
        fused, unfused = network(), network()
        done = fit(client, ce)
        plain(fused, in_torch(name, fused, fused=True, lr=torch.tensor(OPTIMIZERS[name][1]["lr"])), order())
        plain(unfused, in_torch(name, unfused, foreach=False), order())
        assert done.steps == 8
        assert torch.equal(weights(client["model"].module), weights(fused))
        torch.testing.assert_close(weights(client["model"].module), weights(unfused), atol=1e-5, rtol=0)
        assert not torch.equal(weights(fused), weights(network()))

    @pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "adamw"])
    def test_a_second_call_has_a_fresh_optimiser(self, name):
        client, model = make_client(optimizer=asked(name)), network()
        for round_ in (1, 2):
            enter(client, round_)
            fit(client, ce)
            plain(model, in_torch(name, model, foreach=False), order(round_))
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
    def test_moments_outlive_calls_rounds_and_restarts(self, name):
        client = make_client(parts={"model": network(), "moments": Moments()}, optimizer=asked(name))
        model = network()
        optimizer = in_torch(name, model, foreach=False)
        for round_ in (1, 2, 3):
            state = client.snapshot()
            if round_ == 3:  # as another live client would go on with it
                client = make_client(
                    parts={"model": network(seed=9), "moments": Moments()}, optimizer=asked(name)
                )
                client.restore(state)
            enter(client, round_)
            fit(client, ce, moments=client["moments"].content)
            plain(model, optimizer, order(round_))
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
        assert any(key.startswith("moments/model/0.weight:") for key in client.snapshot())

    def test_without_moments_the_next_call_forgets_them(self):
        client = make_client(parts={"model": network(), "moments": Moments()}, optimizer=asked("momentum"))
        fit(client, ce, moments=client["moments"].content)
        held = {name: value.clone() for name, value in client["moments"].content.items()}
        before = client["model"].state()
        client.enter(2, Rng(5).child("round", 2), {}, "train")
        fit(client, ce)
        model = network()
        model.load_state_dict(before)
        plain(model, in_torch("momentum", model, foreach=False), order(2))
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
        assert all(torch.equal(held[name], value) for name, value in client["moments"].content.items())

    def test_two_fits_of_one_step_keep_apart(self):
        """A step with two phases, three rounds long: neither sees the other's momentum."""
        client, model = make_client(optimizer=asked("momentum"), epochs=1), network()
        for round_ in (1, 2, 3):
            enter(client, round_)
            client_orders = make_client(epochs=1)
            enter(client_orders, round_)
            for _ in range(2):
                fit(client, ce)
                batches = [torch.from_numpy(one) for one in client_orders.batches().order]
                plain(model, in_torch("momentum", model, foreach=False), batches)
        assert client.report.steps == 8
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)

    def test_the_rate_decays_with_the_round(self):
        client, model = make_client(lr_decay=0.5, optimizer={"lr": 0.4}), network()
        for round_ in (1, 2, 3):
            enter(client, round_)
            fit(client, ce)
            plain(model, torch.optim.SGD(model.parameters(), lr=0.4 * 0.5 ** (round_ - 1)), order(round_))
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)

    def test_another_optimiser_for_one_call(self):
        client, model = make_client(optimizer=asked("sgd")), network()
        fit(client, ce, optimizer=asked("adam"))
        plain(model, in_torch("adam", model, foreach=False), order())
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)


class TestGroups:
    def test_rates_decay_and_clips_of_their_own(self):
        client = make_client(
            parts={"model": network(), "other": nn.Linear(3, 3)},
            optimizer={"lr": 0.1, "weight_decay": 0.01},
            clip=0.3,
        )
        model, other = network(), nn.Linear(3, 3)
        other.load_state_dict(client["other"].module.state_dict())
        groups = {
            "model": Group(lr=0.2, clip=0.05),
            "model/2": Group(weight_decay=0.5),
            "other": Group(lr=0.05),
        }

        def loss(client, batch):
            return F.cross_entropy(client["other"](client["model"](batch.x)), batch.y)

        fit(client, loss, groups=groups)
        optimizer = torch.optim.SGD(
            [
                {"params": model[0].parameters(), "lr": 0.2},
                {"params": model[2].parameters(), "weight_decay": 0.5},
                {"params": other.parameters(), "lr": 0.05},
            ],
            lr=0.1,
            weight_decay=0.01,
        )
        for rows in order():
            optimizer.zero_grad()
            F.cross_entropy(other(model(X[rows])), Y[rows]).backward()
            norms = [
                nn.utils.clip_grad_norm_(part.parameters(), limit)
                for part, limit in ((model[0], 0.05), (model[2], 0.3), (other, 0.3))
            ]
            optimizer.step()
        assert max(norms) > 0.3
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
        torch.testing.assert_close(weights(client["other"].module), weights(other), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("in_the_rate", [False, True], ids=["gradients", "rate"])
    def test_one_clip_over_everything_without_groups(self, monkeypatch, in_the_rate):
        monkeypatch.setattr(Optimizer, "takes_factor", lambda optimizer, group: in_the_rate)
        client, model = make_client(clip=0.1, optimizer={"lr": 1.0}), network()
        fit(client, ce)

        def clip(model):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)

        plain(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), order(), clip)
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
        client = make_client(clip=0.1, optimizer={"lr": 1.0})
        fit(client, ce, clip=1e9)
        assert not torch.allclose(weights(client["model"].module), weights(model))

    def test_on_a_cpu_gradients_are_clipped_themselves(self):
        client = make_client(clip=0.1, optimizer={"lr": 1.0})
        fit(client, ce)
        (workspace,) = client.workspaces.values()
        assert not any(map(workspace.optimizer.takes_factor, workspace.optimizer.groups))

    def test_gradients_that_are_short_enough_are_left_alone(self):
        value = nn.Parameter(torch.ones(3))
        for factor, same in ((1.0, True), (0.5, False), (torch.nan, False)):
            value.grad = gradient = torch.tensor([1.0, 2.0, -3.0])
            shorten_gradients([value], torch.tensor(factor))
            assert (value.grad is gradient) is same
            torch.testing.assert_close(value.grad, gradient * factor, rtol=0, atol=0, equal_nan=True)
        clipped, free = make_client(), make_client()
        fit(clipped, ce, clip=1e9)
        fit(free, ce)
        assert torch.equal(weights(clipped["model"].module), weights(free["model"].module))

    @pytest.mark.parametrize("argument", ["train", "groups", "prox"])
    def test_a_prefix_that_names_nothing(self, argument):
        values = {"train": ["modle"], "groups": {"modle": Group(lr=1.0)}, "prox": {"modle": 1.0}}
        with pytest.raises(ConfigError, match=r"no parameters under 'modle'; did you mean 'model'\?"):
            fit(make_client(), ce, **{argument: values[argument]})


class Odd(nn.Module):
    """Parameters whose gradients come back expanded, transposed, or as one and the same tensor."""

    def __init__(self):
        super().__init__()
        self.expanded = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.transposed = nn.Parameter(torch.arange(12.0).reshape(3, 4) / 10)
        self.one = nn.Parameter(torch.ones(3))
        self.twin = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        seen = (self.transposed.t() * (1 + x.mean(0)[:, None])).sum() + self.expanded.sum()
        return seen + ((self.one + self.twin) * torch.arange(1.0, 4.0)).sum()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_gradients_of_any_memory_layout(name, clip):
    client, model = make_client(parts={"model": Odd()}, optimizer=asked(name), clip=clip), Odd()
    fit(client, lambda client, batch: client["model"](batch.x))
    optimizer = in_torch(name, model, foreach=False)
    for rows in order():
        optimizer.zero_grad()
        model(X[rows]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    for key, value in model.named_parameters():
        torch.testing.assert_close(client["model"][key].detach(), value.detach(), atol=1e-4, rtol=0)


def test_clipping_leaves_what_combine_returned_alone():
    client = make_client(clip=1e-3)
    kept = {name: torch.ones_like(value) for name, value in client["model"].trainable().items()}
    fit(client, ce, combine=lambda terms: {f"model/{name}": value for name, value in kept.items()})
    assert all(torch.equal(value, torch.ones_like(value)) for value in kept.values())


class TestTerms:
    def test_named_terms_add_up_and_are_reported(self):
        client, model = make_client(), network()

        def loss(client, batch):
            scores = client["model"](batch.x)
            return {
                "ce": F.cross_entropy(scores, batch.y),
                "size": 0.1 * scores.square().mean(),
                "constant": X.sum(),
            }

        done = fit(client, loss)
        totals = {"ce": 0.0, "size": 0.0}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for rows in order():
            optimizer.zero_grad()
            scores = model(X[rows])
            terms = {"ce": F.cross_entropy(scores, Y[rows]), "size": 0.1 * scores.square().mean()}
            sum(terms.values()).backward()
            optimizer.step()
            totals = {name: totals[name] + value.item() for name, value in terms.items()}
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
        for name, total in totals.items():
            assert done.losses[name].item() == pytest.approx(total / 8, abs=1e-5)
        assert client.report.losses.keys() == {"ce", "size", "constant"}
        assert client.report.steps == 8

    def test_a_single_value_is_called_loss_and_starts_from_zero_each_time(self):
        client = make_client(optimizer={"lr": 1e-9})
        first = fit(client, ce).losses["loss"].item()
        enter(client, 1)
        second = fit(client, ce).losses["loss"].item()
        assert first == pytest.approx(second, abs=1e-5)
        expected = np.mean([F.cross_entropy(network()(X[rows]), Y[rows]).item() for rows in order()])
        assert first == pytest.approx(expected, abs=1e-5)

    def test_a_result_is_not_changed_by_the_next_call(self):
        client = make_client(optimizer={"lr": 0.5})
        first = fit(client, ce)
        before = first.losses["loss"].item()
        enter(client, 2)
        fit(client, ce)
        assert first.losses["loss"].item() == before

    def test_combine_sees_the_gradient_of_each_term(self):
        client, model = make_client(epochs=1, optimizer={"lr": 0.1}), network()
        seen = []

        def loss(client, batch):
            scores = client["model"](batch.x)
            return {"ce": F.cross_entropy(scores, batch.y), "size": scores.square().mean()}

        def combine(terms):
            seen.append({name: dict(gradients) for name, gradients in terms.items()})
            return {name: 2 * terms["ce"][name] - 3 * terms["size"][name] for name in terms["ce"]}

        fit(client, loss, combine=combine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows, terms in zip(order(epochs=1), seen, strict=True):
            scores = model(X[rows])
            parameters = dict(model.named_parameters())
            values = {"ce": F.cross_entropy(scores, Y[rows]), "size": scores.square().mean()}
            for name, value in values.items():
                found = torch.autograd.grad(value, list(parameters.values()), retain_graph=True)
                for key, gradient in zip(parameters, found, strict=True):
                    torch.testing.assert_close(terms[name][f"model/{key}"], gradient, atol=2e-5, rtol=0)
            optimizer.zero_grad()
            (2 * values["ce"] - 3 * values["size"]).backward()
            optimizer.step()
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)

    def test_a_term_that_does_not_reach_a_parameter_has_no_gradient_there(self):
        client = make_client(parts={"model": network(), "other": nn.Linear(4, 3)}, epochs=1)
        seen = []

        def loss(client, batch):
            return {
                "one": F.cross_entropy(client["model"](batch.x), batch.y),
                "two": client["other"](batch.x).square().mean(),
                "none": torch.tensor(3.0),
            }

        def combine(terms):
            seen.append({name: set(gradients) for name, gradients in terms.items()})
            return dict(terms["one"])

        before = weights(client["other"].module)
        done = fit(client, loss, combine=combine)
        model = {f"model/{name}" for name in client["model"].trainable()}
        assert seen[0] == {"one": model, "two": {"other/weight", "other/bias"}, "none": set()}
        assert torch.equal(weights(client["other"].module), before)
        assert done.losses["none"].item() == 3.0

    def test_a_parameter_without_a_gradient_stays_even_with_weight_decay_and_momentum(self):
        client = make_client(
            parts={"model": network(), "other": nn.Linear(4, 3)},
            optimizer={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        )
        before = weights(client["other"].module)
        fit(client, ce)
        assert torch.equal(weights(client["other"].module), before)

    def test_combine_must_name_what_is_trained(self):
        with pytest.raises(
            ConfigError, match=r"no parameter '0.weight' is trained; did you mean 'model/0.weight'\?"
        ):
            fit(make_client(), ce, combine=lambda terms: {"0.weight": torch.zeros(5, 4)})

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            (lambda value: None, "'loss' of the loss is a NoneType"),
            (lambda value: 3.0, "is a float; return a tensor with one number"),
            (lambda value: value.repeat(2), r"has shape \(2,\); return its mean or sum"),
            (lambda value: {"a": value, "b": 0.0}, "'b' of the loss is a float"),
            (lambda value: {}, "the loss is an empty mapping"),
        ],
    )
    def test_what_is_no_loss(self, wrong, sentence):
        with pytest.raises(TypeError, match=sentence):
            fit(make_client(), lambda client, batch: wrong(ce(client, batch)))


class TestProx:
    def test_the_pull_against_the_term_in_the_loss(self):
        for settings in ({"lr": 0.1, "momentum": 0.9}, {"name": "adam", "lr": 0.01}):
            client, model = make_client(optimizer=settings), network()
            done = fit(client, ce, prox={"model/0": 0.7, "model": 0.2})
            start = dict(network().named_parameters())
            kind = torch.optim.Adam if "name" in settings else torch.optim.SGD
            optimizer, total = (
                kind(model.parameters(), **{k: v for k, v in settings.items() if k != "name"}, foreach=False),
                0.0,
            )
            for rows in order():
                optimizer.zero_grad()
                pull = sum(
                    (0.7 if name.startswith("0.") else 0.2)
                    / 2
                    * (value - start[name].detach()).square().sum()
                    for name, value in model.named_parameters()
                )
                (F.cross_entropy(model(X[rows]), Y[rows]) + pull).backward()
                optimizer.step()
                total += pull.item()
            torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
            assert done.losses["prox"].item() == pytest.approx(total / 8, abs=1e-6)

    def test_names_that_only_begin_alike_are_not_pulled(self):
        client = make_client(parts={"model": network(), "model2": network(seed=1)}, epochs=1)
        seen = []

        def loss(client, batch):
            return F.cross_entropy(client["model"](batch.x) + client["model2"](batch.x), batch.y)

        def combine(terms):
            seen.append(set(terms["prox"]))
            return dict(terms["loss"])

        fit(client, loss, prox={"model": 1.0}, combine=combine)
        assert seen[0] == {f"model/{name}" for name in client["model"].trainable()}
        other = make_client(parts={"model": network(), "model2": network(seed=1)}, optimizer={"lr": 0.1})
        fit(other, loss, prox={"model": 0.0, "model2": 1e9 * 0 + 5.0})
        assert other.report.losses["prox"] > 0

    def test_a_call_without_the_pull_after_one_with_it(self):
        client, model = make_client(), network()
        fit(client, ce, prox={"model": 1.0})
        middle = client["model"].state()
        enter(client, 2)
        done = fit(client, ce)
        model.load_state_dict(middle)
        plain(model, torch.optim.SGD(model.parameters(), lr=0.01), order(2))
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)
        assert "prox" not in done.losses

    def test_the_reference_is_the_start_of_this_call(self):
        client = make_client(optimizer={"lr": 0.1})
        fit(client, ce, prox={"model": 1.0})
        start = client["model"].state()
        enter(client, 2)
        seen = []

        def combine(terms):
            seen.append(terms["prox"])
            return dict(terms["loss"])

        fit(client, ce, prox={"model": 1.0}, combine=combine, steps=2)
        assert not any(value.any() for value in seen[0].values())
        moved = client["model"].state()
        assert any((moved[name] - start[name]).any() for name in start)


class TestStreams:
    def test_shorter_streams_start_over_and_the_first_decides_the_length(self):
        client = make_client()
        seen = []

        def loss(client, batch, public, received):
            seen.append((batch.x[:, 0].tolist(), public.x[:, 0].tolist(), received.x[:, 0].tolist()))
            return client["model"](batch.x).square().mean()

        streams = {
            "private": Stream.of(X[:10], Y[:10], batch_size=2),
            "public": Stream.of(X[10:13], batch_size=1),
            "received": Stream.of(X[13:20], batch_size=4),
        }
        assert fit(client, loss, streams=streams).steps == 5
        first, public, received = zip(*seen, strict=True)
        assert np.allclose(np.concatenate(first), X[:10, 0])
        assert [value[0] for value in public] == X[[10, 11, 12, 10, 11], 0].tolist()
        assert [len(value) for value in received] == [4, 3, 4, 3, 4]
        seen.clear()
        assert fit(client, loss, streams=streams, steps=7).steps == 7
        assert len(seen) == 7
        assert seen[5][0] == X[:2, 0].tolist()

    def test_an_empty_stream_is_named(self):
        streams = {"private": Stream.of(X[:4], Y[:4]), "public": Stream.of(X[:0])}
        with pytest.raises(ConfigError, match="the stream 'public' has no samples"):
            fit(make_client(), ce, streams=streams)

    def test_a_client_without_samples_does_no_step(self):
        client = make_client(rows=0)
        before = weights(client["model"].module)
        assert fit(client, ce).steps == 0
        assert torch.equal(weights(client["model"].module), before)

    def test_scalars_are_tensors_with_a_fixed_place(self):
        client, seen = make_client(epochs=1), []

        def loss(client, batch, strength):
            seen.append((strength.item(), strength.data_ptr()))
            return strength * ce(client, batch)

        for round_, value in ((1, 0.5), (2, 0.25)):
            enter(client, round_)
            fit(client, loss, scalars={"strength": torch.tensor(value)})
        assert [value for value, _ in seen] == [0.5] * 4 + [0.25] * 4
        assert len({place for _, place in seen}) == 1

    def test_scalars_of_an_earlier_call_are_gone(self):
        client = make_client(epochs=1)
        fit(
            client,
            lambda client, batch, strength: strength * ce(client, batch),
            scalars={"strength": torch.ones(())},
        )
        enter(client, 2)
        fit(client, ce)

    def test_epochs_of_one_call(self):
        assert fit(make_client(), ce, epochs=5).steps == 20

    @pytest.mark.parametrize(("last", "steps"), [("keep", 8), ("drop", 6), ("wrap", 8)])
    def test_the_last_batch(self, last, steps):
        sizes = []

        def loss(client, batch):
            sizes.append(len(batch))
            return ce(client, batch)

        assert fit(make_client(last_batch=last), loss).steps == steps
        assert sizes == {"keep": [4, 4, 4, 1] * 2, "drop": [4] * 6, "wrap": [4] * 8}[last]

    def test_augmentation_differs_from_pass_to_pass_and_repeats_from_run_to_run(self):
        def prepare(x, generator):
            if generator is None:
                return x
            drawn.append(torch.rand(1, generator=generator).item())
            return x + drawn[-1]

        drawn, runs = [], []
        for _ in range(2):
            client = make_client(prepare=prepare, epochs=1)
            fit(client, ce)
            fit(client, ce)  # the second phase of a step
            enter(client, 1, dict(client.counters))  # the same step again, in a later exchange of the round
            fit(client, ce)
            enter(client, 2)
            fit(client, ce)
            collect(client, lambda batch: None)
            runs.append(list(drawn))
            drawn.clear()
        assert runs[0] == runs[1]
        assert len(set(runs[0])) == len(runs[0]) == 16

    def test_only_streams_that_say_so_are_augmented(self):
        heard = []

        def prepare(x, generator):
            heard.append(generator is not None)
            return x

        source = Source(X, Y, prepare)
        streams = {
            "one": Stream(source, [np.arange(4)] * 2, augment=True),
            "two": Stream(source, [np.arange(4)] * 2),
        }
        fit(make_client(), lambda client, batch, two: ce(client, batch), streams=streams)
        assert heard == [True, False] * 2


class TestBatchNorm:
    def test_a_single_sample_left_over_makes_no_batch(self):
        """Five samples in batches of four: the fifth has no variance."""
        client = make_client(rows=5, parts={"model": network(norm=True)}, epochs=3, optimizer={"lr": 0.1})
        assert fit(client, ce).steps == 3
        model = network(norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain(model.train(), optimizer, order(rows=5, epochs=3)[::2])
        torch.testing.assert_close(
            client["model"]["1.running_mean"], model[1].running_mean, atol=1e-5, rtol=0
        )
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)

    @pytest.mark.parametrize(
        ("norm", "rows", "last", "steps"),
        [(False, 5, "keep", 2), (True, 6, "keep", 2), (True, 5, "wrap", 2), (True, 5, "drop", 1)],
    )
    def test_other_batches_stay(self, norm, rows, last, steps):
        client = make_client(rows=rows, parts={"model": network(norm=norm)}, epochs=1, last_batch=last)
        assert fit(client, ce).steps == steps

    def test_what_a_method_adds_does_not_change_the_order(self):
        parts = {"model": network(norm=False), "small": network(norm=True)}
        assert fit(make_client(rows=5, parts=parts, epochs=1), ce).steps == 2

    def test_batches_of_one_are_wanted(self):
        client = make_client(rows=3, parts={"model": network(norm=True)}, epochs=1, batch_size=1)
        assert fit(client, ce).steps == 3

    def test_a_single_sample_goes_through_in_evaluation_mode(self):
        """Of a stream of the method's own: the last batch moves no statistic, but trains."""
        client = make_client(parts={"model": network(norm=True)}, optimizer={"lr": 0.1})
        fit(client, ce, streams={"own": Stream.of(X[:5], Y[:5], 4)})
        model = network(norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain(model.train(), optimizer, [np.arange(4)])
        statistics = model[1].running_mean.clone()
        model[1].eval()
        plain(model, optimizer, [np.arange(4, 5)])
        torch.testing.assert_close(client["model"]["1.running_mean"], statistics, atol=1e-5, rtol=0)
        assert client["model"]["1.num_batches_tracked"] == 1
        torch.testing.assert_close(weights(client["model"].module), weights(model), atol=1e-5, rtol=0)

    def test_a_client_with_one_sample(self):
        client = make_client(rows=1, parts={"model": network(norm=True)})
        before = {name: value.clone() for name, value in client["model"].tensors().items()}
        assert fit(client, ce).steps == 2
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert torch.equal(client["model"][name], before[name]), name
        assert not torch.equal(client["model"]["0.weight"], before["0.weight"])
        assert client["model"].module[1].training

    def test_a_single_sample_in_another_stream(self):
        client = make_client(parts={"model": network(norm=True)})

        def loss(client, batch, public):
            return ce(client, batch) + client["model"](public.x).square().mean()

        fit(
            client,
            loss,
            streams={"private": Stream.of(X[:8], Y[:8], 4), "public": Stream.of(X[:3], batch_size=2)},
        )
        assert (
            client["model"]["1.num_batches_tracked"] == 2
        )  # two passes in the first step, none in the second

    def test_an_error_in_the_loss_leaves_the_mode_as_it_was(self):
        client = make_client(rows=1, parts={"model": network(norm=True)})

        def loss(client, batch):
            raise RuntimeError("no")

        with contextlib.suppress(RuntimeError):
            fit(client, loss)
        assert client["model"].module[1].training


class TestWhatIsTrained:
    def client(self):
        return make_client(
            parts={"model": network(norm=True), "other": network(norm=True, seed=3), "known": torch.zeros(2)},
            optimizer={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        )

    def loss(self, client, batch):
        return F.cross_entropy(client["model"](batch.x) + client["other"](batch.x), batch.y)

    @pytest.mark.parametrize(
        ("train", "moved"),
        [
            (["model"], "model/"),
            (["model/3"], "model/3."),
            (["model/3.weight"], "model/3.weight"),
            (["other"], "other/"),
            (["model/1"], "model/1."),
        ],
    )
    def test_only_what_is_below_the_prefix_moves(self, train, moved):
        client = self.client()
        before = client.snapshot()
        fit(client, self.loss, train=train)
        changed = {name for name, value in client.snapshot().items() if not torch.equal(value, before[name])}
        assert changed == {name for name in before if name.startswith(moved)}

    def test_several_prefixes(self):
        client = self.client()
        before = client.snapshot()
        fit(client, self.loss, train=["model/0", "other/3.bias"])
        changed = {name for name, value in client.snapshot().items() if not torch.equal(value, before[name])}
        assert changed == {"model/0.weight", "model/0.bias", "other/3.bias"}

    def test_a_number_is_no_prefix_of_a_longer_one(self):
        many = nn.Sequential(*(nn.Linear(4, 4) for _ in range(11)))
        client = make_client(parts={"model": many})
        before = client.snapshot()
        fit(client, lambda client, batch: client["model"](batch.x).square().mean(), train=["model/1"])
        changed = {name for name, value in client.snapshot().items() if not torch.equal(value, before[name])}
        assert changed == {"model/1.weight", "model/1.bias"}

    def test_everything_by_default_and_frozen_parameters_never(self):
        client = self.client()
        for parameter in client["other"].module.parameters():
            parameter.requires_grad_(False)
        before = client.snapshot()
        fit(client, self.loss)
        changed = {name for name, value in client.snapshot().items() if not torch.equal(value, before[name])}
        assert changed == {name for name in before if name.startswith("model/")}
        assert client["model"].module.training
        assert not client["other"].module.training

    def test_part_after_part_is_back_to_everything(self):
        client = self.client()
        fit(client, self.loss, train=["model/3"])
        before = client.snapshot()
        fit(client, self.loss)
        changed = {name for name, value in client.snapshot().items() if not torch.equal(value, before[name])}
        assert changed == set(before) - {"known"}

    def test_nothing_to_train(self):
        client = self.client()
        for parameter in client["other"].module.parameters():
            parameter.requires_grad_(False)
        with pytest.raises(ConfigError, match="nothing to train under other"):
            fit(client, self.loss, train=["other"])


class TestServer:
    def server(self):
        server = Server(TASK, {})
        server.declare({"head": network()})
        server.enter(1, Rng(1), {}, "round")
        return server

    def test_it_fits_on_what_it_received(self):
        server, model = self.server(), network()
        settings = OptimizerSettings(lr=0.1)
        streams = {"received": Stream.of(X, Y, batch_size=8)}
        done = fit(
            server,
            lambda server, batch: F.cross_entropy(server["head"](batch.x), batch.y),
            streams=streams,
            optimizer=settings,
        )
        batches = [torch.arange(20)[start : start + 8] for start in (0, 8, 16)]
        plain(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
        assert done.steps == 3
        torch.testing.assert_close(weights(server["head"].module), weights(model), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("name", ["sgd", "adam"])
    def test_what_it_sends_is_what_it_trained_last(self, name):
        """The server keeps the copy it sent last, and must see that an optimiser has written since."""
        server = Server(TASK, {})
        server.declare({"head": network()}, remember=True)
        sent = server["head"].state()
        for _ in range(2):
            server.enter(1, Rng(1), {}, "round")
            fit(
                server,
                lambda server, batch: F.cross_entropy(server["head"](batch.x), batch.y),
                streams={"received": Stream.of(X, Y)},
                optimizer=OptimizerSettings(name=name, lr=0.1),
            )
            newest = server["head"].state()
            for key, value in server["head"].wire().items():
                assert torch.equal(newest[key], value)
                assert not torch.equal(newest[key], sent[key])
            sent = newest

    def test_it_has_no_data_of_its_own(self):
        with pytest.raises(ConfigError, match="needs its streams named"):
            fit(self.server(), ce)


class TestCollect:
    def test_rows_in_order_in_evaluation_mode_without_gradient(self):
        client = make_client(parts={"model": network(norm=True)})
        client.rows = {"train": np.array([7, 2, 9, 4, 1]), "test": np.arange(0)}
        client["model"].module.train()
        before = client.snapshot()
        seen = []

        def look(batch):
            assert not torch.is_grad_enabled()
            assert not client["model"].module.training
            seen.append(batch.id.tolist())
            return client["model"](batch.x)

        parts = collect(client, look, batch_size=2)
        assert seen == [[7, 2], [9, 4], [1]]
        model = network(norm=True).eval()
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(parts), model(X[[7, 2, 9, 4, 1]]))
        assert all(torch.equal(value, before[name]) for name, value in client.snapshot().items())
        assert collect(client, look, "test") == []


def test_half_precision_changes_the_forward_pass_only():
    client = make_client()
    client.precision = "bfloat16"
    seen = []

    def loss(client, batch):
        scores = client["model"](batch.x)
        seen.append(scores.dtype)
        return F.cross_entropy(scores, batch.y)

    fit(client, loss)
    assert set(seen) == {torch.bfloat16}
    assert client["model"]["0.weight"].dtype == torch.float32
    assert client["model"]["0.weight"].grad.dtype == torch.float32
