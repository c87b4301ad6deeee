"""FedIN: the numbers of the paper's equations by hand, whole rounds against a plain loop, what crosses."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from potluck.core.contract import check
from potluck.core.message import Message
from potluck.core.model import Model
from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.streams import shuffled_batches
from potluck.core.task import Batch, Task
from potluck.core.trial import stem_shape
from potluck.data import from_arrays
from potluck.engine.protocol import Request
from potluck.errors import ConfigError, MessageError
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.kit.feature_exchange import blurred
from potluck.kit.shared_space import SharedSpace
from potluck.methods.fedin import FedIN
from potluck.methods.fedin_variants import FedINVariants
from potluck.models import build
from potluck.models.zoo.transformer import VisionTransformer
from potluck.runs.advice import advice
from potluck.testing.bench import Played

ROWS = {"a": range(0, 7), "b": range(7, 12)}
LR = 0.1
TRAINING = {"epochs": 2, "batch_size": 4, "last_batch": "drop", "optimizer": {"lr": LR}}
SITES = {"partition": {"kind": "iid", "clients": 2}, "models": "mlp-small", "engine": {"device": "cpu"}}
CIFAR = Task("classification", 10, (3, 32, 32))


class Three(Model):
    """Stem fc1, body fc, head."""

    has_stem = True
    wide = 5

    def __init__(self, task):
        super().__init__()
        self.rep_dim = 6
        self.fc1 = nn.Linear(task.input[0], self.wide)
        self.fc = nn.Linear(self.wide, 6)
        self.head = nn.Linear(6, task.classes)

    def stem(self, x):
        return torch.tanh(self.fc1(x))

    def body(self, s):
        return torch.tanh(self.fc(s))


class Four(Three):
    """A layer more in the body."""

    def __init__(self, task):
        super().__init__(task)
        self.mid = nn.Linear(self.wide, self.wide)

    def body(self, s):
        return super().body(torch.tanh(self.mid(s)))


class Narrow(Three):
    """A narrower stem."""

    wide = 3


class Tokens(Three):
    """A stem that gives two tokens of width 5, as transformers do."""

    def __init__(self, task):
        super().__init__(task)
        self.fc1 = nn.Linear(task.input[0], 2 * self.wide)

    def stem(self, x):
        return torch.tanh(self.fc1(x)).view(-1, 2, self.wide)

    def body(self, s):
        return super().body(s.mean(1))


class Bodiless(Three):
    """A body that has nothing to learn."""

    wide = 6

    def body(self, s):
        return torch.relu(s)


class Frozen(Three):
    """A body that may not learn."""

    def __init__(self, task):
        super().__init__(task)
        self.fc.requires_grad_(False)


class Normed(Three):
    """Batch norm in stem and body."""

    def __init__(self, task):
        super().__init__(task)
        self.norm1, self.norm = nn.BatchNorm1d(self.wide), nn.BatchNorm1d(6)

    def stem(self, x):
        return torch.tanh(self.norm1(self.fc1(x)))

    def body(self, s):
        return torch.tanh(self.norm(self.fc(s)))


def play(kit, rounds=2, models=(Three, Four), rows=ROWS, **options):
    batch = {"batch": 4} if options.get("intermediate", True) else {}
    options = {"name": "fedin", "noise": 0.0} | batch | options
    game = kit.Federation(options, list(models), rows, training=TRAINING)
    cohorts = [game.round(*rows) for _ in range(rounds)]
    return game, cohorts


def sizes(cohort):
    """Scalars by client, direction and name, of what was sent to train."""
    lines = [line for line in cohort.ledger.lines if line["purpose"] == "train"]
    return {(line["client"], line["direction"]): line["names"] for line in lines}


# --- the combined gradient ------------------------------------------------------------------------------

LOCAL = torch.tensor([1.0, 1.0])


def alleviate(local, features, config):
    return FedINVariants(config).alleviate(local, features)


def combined(features, **options):
    config = FedINVariants.Config(name="fedin", **options)
    return alleviate({"w": LOCAL}, {"w": torch.tensor(features)}, config)["w"]


@pytest.mark.parametrize(
    ("features", "exact", "simplified"),
    [((1.0, -3.0), (2.0, -2.0), (1.5, -2.5)), ((2.0, 1.0), (2.0, 1.0), (2.5, 1.5))],
)
def test_gradients_by_hand(features, exact, simplified):
    assert torch.equal(combined(features, alleviate="exact", combine="replace"), torch.tensor(exact))
    assert torch.equal(combined(features, alleviate="exact"), torch.tensor(exact) + LOCAL)
    assert torch.equal(combined(features), torch.tensor(simplified))
    assert torch.equal(combined(features, strength=4.0), torch.tensor(features) + 2 * LOCAL)
    assert torch.equal(combined(features, alleviate="none"), torch.tensor(features) + LOCAL)


def test_the_exact_step_obeys_its_constraint_and_the_simplified_one_need_not():
    assert combined((1.0, -3.0), alleviate="exact", combine="replace") @ LOCAL == 0
    assert combined((1.0, -3.0)) @ LOCAL == -1


def test_whole_or_tensor_by_tensor():
    """Two tensors that disagree with G_local one by one (b = −2 and 5) but not together (b = 3)."""
    local = {"v": LOCAL, "w": LOCAL}
    features = {"v": torch.tensor([1.0, -3.0]), "w": torch.tensor([2.0, 3.0])}
    options = {"name": "fedin", "alleviate": "exact", "combine": "replace"}
    each = alleviate(local, features, FedINVariants.Config(**options))
    whole = alleviate(local, features, FedINVariants.Config(**options, scope="whole"))
    assert torch.equal(each["v"], torch.tensor([2.0, -2.0]))
    assert torch.equal(each["w"], features["w"])
    assert torch.equal(whole["v"], features["v"])
    turned = alleviate(
        local,
        {name: -value for name, value in features.items()},
        FedINVariants.Config(**options, scope="whole"),
    )
    torch.testing.assert_close(turned["w"], torch.tensor([-2.0, -3.0]) + 3 / 4 * LOCAL)


def test_without_a_local_gradient_the_exact_step_is_the_features_own():
    config = FedINVariants.Config(name="fedin", alleviate="exact")
    found = alleviate({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, -2.0])}, config)
    assert torch.equal(found["w"], torch.tensor([1.0, -2.0]))


# --- whole rounds against a plain loop --------------------------------------------------------------------


def batches(game, client, number, call, size=4, epochs=2, last="drop"):
    rng = game.federation.seeds.tree("training").child(
        "round", number, "client", client, "batches", "train", call
    )
    return shuffled_batches(game.rows[client], size, epochs, last, rng)


def gradients(loss, model):
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: value for name, value in zip(named, found, strict=True) if value is not None}


def descend(model, step):
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in step:
                value -= LR * step[name]


def noisy(s, level, per="batch"):
    """Gaussian noise of `level` standard deviations; there is none to draw at level 0."""
    return (
        s + level * s.detach().std(() if per == "batch" else 0, correction=0) * torch.randn(s.shape)
        if level
        else s
    )


def noisy_pass(model, x, level, per):
    s_in = noisy(model.stem(x), level, per)
    return s_in, noisy(model.body(s_in), level, per)


def feature_gradients(model, s_in, s_out):
    """Of L_IN, with the statistics of these features, which are forgotten again."""
    before = {name: value.clone() for name, value in model.named_buffers()}
    found = gradients(F.mse_loss(model.body(s_in), s_out), model)
    for name, value in model.named_buffers():
        value.copy_(before[name])
    return found


def plain_client(game, client, number, start, received, level=0.0):
    """One client's round, on batches of others' features; gives its state and the features it sends."""
    config, model = game.method.config, game.federation.population.build_model(client)
    model.load_state_dict(start)
    training = level if config.noise_when == "training" else 0.0
    joint, calls = config.schedule == "joint", 0

    def local(rows, mu):
        x, y = torch.tensor(game.x[rows]), torch.tensor(game.y[rows])
        loss = F.cross_entropy(model.head(noisy_pass(model, x, training, config.noise_per)[1]), y)
        pull = sum((value - start[name]).square().sum() for name, value in model.named_parameters())
        return gradients(loss + mu / 2 * pull, model)

    if not received or not joint:
        for rows in batches(game, client, number, calls):
            descend(model, local(rows, config.mu))
        calls += 1
    if received:
        for step, rows in enumerate(batches(game, client, number, calls)):
            label = local(rows, config.mu if joint else 0.0)
            body = alleviate(label, feature_gradients(model, *received[step % len(received)]), config)
            descend(model, label | body if joint else body)
        calls += 1
    rows = batches(game, client, number, calls, epochs=1, last="keep")[0]
    with torch.no_grad():
        model.eval()
        return model.state_dict(), noisy_pass(model, torch.tensor(game.x[rows]), level, config.noise_per)


@pytest.mark.parametrize("schedule", ["joint", "alternate"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alleviate": "exact"},
        {"alleviate": "exact", "combine": "replace"},
        {"alleviate": "none", "mu": 0.0},
    ],
    ids=["simplified", "exact", "literal", "none"],
)
def test_three_rounds_are_those_of_a_plain_loop(kit, schedule, options):
    game, _ = play(kit, rounds=3, schedule=schedule, **options)
    pool = {}
    shared = game.initial("b")  # the larger model brings the start
    for number in (1, 2, 3):
        done = {}
        for client, other in (("a", "b"), ("b", "a")):
            start = {name: shared[name].clone() for name in game.initial(client)}
            done[client] = plain_client(game, client, number, start, [pool[other]] if pool else [])
        pool = {client: features for client, (_, features) in done.items()}
        held = {name: [state[name] for state, _ in done.values() if name in state] for name in shared}
        shared = {name: sum(values) / len(values) for name, values in held.items()}
    for client in ROWS:
        for name, value in game.method.downlink(game.server, client)["model"].items():
            torch.testing.assert_close(value, shared[name], atol=1e-5, rtol=1e-4, msg=f"{client} {name}")
        torch.testing.assert_close(game.server["s_in"][client], pool[client][0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(game.server["s_out"][client], pool[client][1], atol=1e-5, rtol=1e-4)


UNEQUAL = {"a": range(0, 5), "b": range(5, 12), "c": range(12, 25)}


def plain_rounds(game, rounds, level, weighted):
    """Clients with one architecture whose batch norm stays at home, each sent both batches of the others."""
    shared, pool = game.initial("a"), {}
    buffers = {
        client: dict(game.federation.population.build_model(client).named_buffers()) for client in game.rows
    }
    shares = {client: len(rows) if weighted else 1 for client, rows in game.rows.items()}
    for number in range(1, rounds + 1):
        done = {}
        for client in game.rows:
            others = [one for one in game.rows if one != client]
            order = game.federation.server_rng(number).child("features", client).numpy().permutation(2)
            received = [pool[others[place]] for place in order] if pool else []
            start = {name: value.clone() for name, value in (shared | buffers[client]).items()}
            secret = game.federation.seeds.secret(client).child("round", number, "train", "noise", 0)
            with secret.as_default():
                done[client] = plain_client(game, client, number, start, received, level)
        pool = {client: features for client, (_, features) in done.items()}
        buffers = {
            client: {name: state[name] for name in buffers[client]} for client, (state, _) in done.items()
        }
        shared = {
            name: sum(shares[client] * state[name] for client, (state, _) in done.items())
            / sum(shares.values())
            for name in shared
        }
    return shared, pool


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"noise_per": "channel"},
        {"noise_when": "upload"},
        {"schedule": "alternate"},
        {"weights": "samples"},
    ],
    ids=lambda options: "".join(options.values()) or "as published",
)
def test_noise_batch_norm_and_two_batches_are_those_of_a_plain_loop(kit, options):
    """The clients differ in their samples, and in what they are sent."""
    options = {"name": "fedin", "noise": 0.8, "batch": 4, "batches": 2} | options
    game = kit.Federation(options, [Normed] * 3, UNEQUAL, training=TRAINING)
    for _ in range(3):
        assert not game.round(*UNEQUAL).failures
    shared, pool = plain_rounds(game, 3, level=0.8, weighted=options.get("weights") == "samples")
    found = game.method.downlink(game.server, "a")["model"]
    for name, value in shared.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-5, rtol=1e-4, msg=lambda why, name=name: name + why
        )
    for client, features in pool.items():
        for name, value in zip(("s_in", "s_out"), features, strict=True):
            torch.testing.assert_close(game.server[name][client], value, atol=2e-5, rtol=1e-4)


def test_the_schedules_differ(kit):
    joint, alternate = (
        play(kit, schedule=kind)[0].server["weights"].tensors() for kind in ("joint", "alternate")
    )
    assert any(not torch.allclose(joint[key], alternate[key]) for key in joint)


def test_without_features_it_is_fedprox_bit_for_bit(kit):
    ablated, cohorts = play(kit, rounds=2, intermediate=False, mu=0.3)
    options = {"name": "fedprox", "mu": 0.3, "share": "layers", "weights": "uniform"}
    prox = kit.Federation(options, [Three, Four], ROWS, training=TRAINING)
    for cohort in cohorts:
        assert prox.round(*ROWS).ledger.lines == cohort.ledger.lines
    for key, value in prox.server["weights"].tensors().items():
        assert torch.equal(ablated.server["weights"][key], value), key


def test_without_features_the_noise_of_training_stays(kit):
    """The first round, in which nothing was received yet, is that of the whole method: one thing differs."""
    whole, without = (play(kit, rounds=1, noise=0.8, intermediate=there)[0] for there in (True, False))
    bare, _ = play(kit, rounds=1, intermediate=False)
    for key, value in whole.server["weights"].tensors().items():
        assert torch.equal(without.server["weights"][key], value), key
    assert any(
        not torch.equal(without.server["weights"][key], value)
        for key, value in bare.server["weights"].tensors().items()
    )


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 4},
        {"batches": 2},
        {"pool": "all"},
        {"strength": 2.0},
        {"alleviate": "exact"},
        {"schedule": "alternate"},
        {"noise": 0.8, "noise_when": "upload"},
        {"project": "fixed"},
    ],
    ids=lambda options: [*options][-1],
)
def test_without_features_options_about_them_are_refused(options):
    sentence = rf"method: {[*options][-1]} does nothing with intermediate: false; it is for true"
    with pytest.raises(ConfigError, match=sentence):
        Experiment.make(**SITES, method={"name": "fedin", "intermediate": False} | options)


@pytest.mark.parametrize("option", [{"noise_per": "channel"}, {"noise_when": "upload"}])
def test_without_noise_options_about_it_are_refused(option):
    with pytest.raises(ConfigError, match=rf"{next(iter(option))} does nothing at noise: 0"):
        Experiment.make(**SITES, method={"name": "fedin", **option})


@pytest.mark.parametrize("options", [{}, {"intermediate": False}, {"noise": 0.8, "noise_per": "channel"}])
def test_a_file_with_every_option_written_out_loads_again(tmp_path, options):
    whole = Experiment.make(**SITES, method={"name": "fedin", **options})
    (tmp_path / "whole.yaml").write_text(whole.to_yaml())
    assert Experiment.load(tmp_path / "whole.yaml").method == whole.method


def test_alone_it_is_the_paper_without_noise_and_advice_says_so():
    plain = Experiment.make(**SITES, method="fedin")
    assert plain.method.noise == 0
    assert any("features leave every client bare" in sentence for sentence in advice(plain.build()))
    for options in ({"noise": 0.8}, {"intermediate": False}):
        noisy = Experiment.make(**SITES, method={"name": "fedin", **options})
        assert not any("bare" in sentence for sentence in advice(noisy.build()))


@pytest.mark.parametrize(("options", "pull"), [({}, {"model": 0.1}), ({"mu": 0.0}, None)])
def test_the_pull_is_that_of_half_mu_0_05(kit, monkeypatch, options, pull):
    """`fit` adds (μ/2)·‖w − w⁰‖²; at (1, 2) that is 0.25 with gradient (0.1, 0.2): see FedProx."""
    asked = []
    monkeypatch.setattr("potluck.methods.fedin.fit", lambda *args, **options: asked.append(options["prox"]))
    play(kit, rounds=2, models=(Three,), rows={"a": range(4)}, **options)
    assert asked == [pull, pull]


# --- layers and groups ------------------------------------------------------------------------------------


def test_layer_wise_mean_of_known_numbers(kit):
    """1, 2, 6 give 3; two owners of another layer with 4, 8 give 6; a layer nobody sent stays put."""
    rows = {"a": range(0, 4), "b": range(4, 8), "c": range(8, 12)}
    game, _ = play(kit, models=[Three, Four, Four], rows=rows)
    before = game.method.downlink(game.server, "b")["model"]
    values = {"a": (1.0, None), "b": (2.0, 4.0), "c": (6.0, 8.0)}
    messages = {
        client: Message(
            {
                "model": {"fc1.bias": torch.full((5,), first)}
                | ({} if mid is None else {"mid.bias": torch.full((5,), mid)})
            }
        )
        for client, (first, mid) in values.items()
    }
    replies = Replies(messages, game.server.cards)
    game.server["weights"].load(game.method.mean(replies, "model", game.method.config.weights))
    after = game.method.downlink(game.server, "b")["model"]
    torch.testing.assert_close(after["fc1.bias"], torch.full((5,), 3.0))
    torch.testing.assert_close(after["mid.bias"], torch.full((5,), 6.0))
    for name in before.keys() - {"fc1.bias", "mid.bias"}:
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_groups_of_one_keep_their_own_values(kit, weights):
    game, _ = play(kit, share="groups", weights=weights)
    for client in ROWS:
        own = game.part(client, "model")
        for name, value in game.method.downlink(game.server, client)["model"].items():
            assert torch.equal(own[name], value), f"{client} {name}"


# --- where gradients go -----------------------------------------------------------------------------------


def live(kit, model=Three, **options):
    """A client of a game that has played a round, and a batch of its samples."""
    game, _ = play(kit, rounds=1, models=(model, model), **options)
    client = game.federation.clients.build_client("a")
    client.modules()["model"].train()
    rows = torch.arange(4)
    return game.method, client, client.source.take(rows)


def test_features_reach_the_body_alone(kit):
    method, client, batch = live(kit, Four)
    received = Batch(torch.randn(4, 5, generator=Rng(1).generator()), torch.zeros(4, 6))
    terms = method.loss(client, batch, received)
    assert gradients(terms["features"], client.modules()["model"]).keys() == {
        "fc.weight", "fc.bias", "mid.weight", "mid.bias"
    }  # fmt: skip
    assert (
        gradients(method.loss(client, batch)["local"], client.modules()["model"]).keys()
        == dict(client.modules()["model"].named_parameters()).keys()
    )


def test_a_frozen_model_has_nothing_to_learn_from_its_own_features(kit):
    method, client, batch = live(kit, Normed)
    client.modules()["model"].eval()
    with torch.no_grad():
        own = method.features(client, batch.x, noise=0.0)
    assert method.loss(client, batch, Batch(own["s_in"], own["s_out"]))["features"] == 0


def test_foreign_features_leave_no_trace_in_batch_norm(kit):
    method, client, batch = live(kit, Normed)
    model = client.modules()["model"]
    received = Batch(5 + torch.randn(4, 5, generator=Rng(1).generator()), torch.zeros(4, 6))
    start = {name: value.clone() for name, value in model.named_buffers()}
    method.loss(client, batch)
    alone = {name: value.clone() for name, value in model.named_buffers()}
    assert not torch.equal(alone["norm.running_mean"], start["norm.running_mean"])
    for name, value in model.named_buffers():
        value.copy_(start[name])
    terms = method.loss(client, batch, received)
    for name, value in model.named_buffers():
        assert torch.equal(value, alone[name]), name
    assert model.norm.track_running_stats
    s = F.batch_norm(model.fc(received.x), None, None, model.norm.weight, model.norm.bias, training=True)
    torch.testing.assert_close(terms["features"], torch.tanh(s).square().mean())  # its batch's own statistics


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_batch_norm_statistics_stay_or_are_averaged(kit, buffers):
    game, _ = play(kit, models=(Normed, Normed), buffers=buffers)
    names = game.method.downlink(game.server, "a")["model"].keys()
    assert ("norm.running_var" in names) == (buffers == "average")
    assert "norm.num_batches_tracked" not in names


def test_looking_for_the_shape_leaves_the_model_as_it_was():
    model = Normed(Task("classification", 4, (3,))).train()
    model.norm1.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert stem_shape(model, Task("classification", 4, (3,))) == (5,)
    assert [part.training for part in (model, model.norm1, model.norm)] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- noise ------------------------------------------------------------------------------------------------


def test_noise_has_the_level_of_the_features_deviation():
    generator = Rng(2).generator()
    scale = torch.tensor([1.0, 4.0]).view(1, 2, 1, 1)
    features = 3 + scale * torch.randn(64, 2, 16, 16, generator=generator)
    with Rng(3).as_default():
        whole, channel = blurred(features, 0.8) - features, blurred(features, 0.8, "channel") - features
    expected = 0.8 * features.std()
    torch.testing.assert_close(whole.std((0, 2, 3)), expected.expand(2), rtol=0.03, atol=0)
    torch.testing.assert_close(channel.std((0, 2, 3)), 0.8 * features.std((0, 2, 3)), rtol=0.03, atol=0)
    assert whole.mean().abs() < 0.05
    assert blurred(features, 0.0) is features


def test_the_channels_of_tokens_are_their_last_axis():
    scale = torch.tensor([1.0, 4.0, 9.0])
    features = 3 + scale * torch.randn(512, 7, 3, generator=Rng(2).generator())
    with Rng(3).as_default():
        noise = blurred(features, 0.8, "channel") - features
    torch.testing.assert_close(noise.std((0, 1)), 0.8 * scale, rtol=0.05, atol=0)


@pytest.mark.parametrize("rows", [1, 16])
def test_channels_without_a_deviation_are_hidden_too(rows):
    features = torch.randn(1, 200, generator=Rng(2).generator()).expand(rows, 200)
    with Rng(3).as_default():
        noise = blurred(features, 0.8, "channel") - features
    torch.testing.assert_close(noise.std(), 0.8 * features.std(correction=0), rtol=0.2, atol=0)


def test_one_channel_without_a_deviation_leaves_the_others_theirs():
    features = torch.randn(4096, 2, generator=Rng(2).generator()) * torch.tensor([5.0, 0.0])
    with Rng(3).as_default():
        noise = blurred(features, 0.8, "channel") - features
    expected = torch.stack([features[:, 0].std(), features.std()])
    torch.testing.assert_close(noise.std(0), 0.8 * expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("per", ["batch", "channel"])
def test_noise_on_rounded_features_is_not_rounded(per):
    assert blurred(torch.randn(8, 5).bfloat16(), 0.8, per).dtype == torch.float32


@pytest.mark.parametrize("per", ["batch", "channel"])
def test_copies_of_a_sample_carry_the_same_noise(kit, per):
    """Or their mean would be the sample without it."""
    rows = {"a": range(0, 1), "b": range(1, 12)}
    noisy, clean = (
        play(kit, rounds=1, rows=rows, batch=8, **options)[0]
        for options in ({"noise": 0.8, "noise_per": per, "noise_when": "upload"}, {})
    )
    for name in ("s_in", "s_out"):
        sent = noisy.server[name]["a"]
        assert len(torch.unique(sent, dim=0)) == 1
        assert (sent - clean.server[name]["a"]).abs().mean() > 0.05


def test_the_deviation_is_a_constant_to_the_gradient():
    features = torch.randn(3, 4, generator=Rng(2).generator(), requires_grad=True)
    blurred(features, 0.8).sum().backward()
    assert torch.equal(features.grad, torch.ones(3, 4))


def test_noise_comes_from_the_clients_secret(kit):
    game, _ = play(kit, rounds=1, noise=0.8)

    def uploaded(secret):
        client = game.federation.clients.build_client("a")
        game.federation.clients.enter(client, 1, {})
        client.step, client.secret = "train", secret
        return game.method.train(client, Message())

    own, again = uploaded(game.federation.seeds.secret("a")), uploaded(game.federation.seeds.secret("a"))
    other = uploaded(Rng(99))
    assert torch.equal(own["s_in"], again["s_in"])
    assert not torch.equal(own["s_in"], other["s_in"])
    assert not torch.equal(own["model"]["fc.weight"], other["model"]["fc.weight"])


def test_noise_on_upload_leaves_training_alone(kit):
    (quiet, _), (upload, _), (always, _) = (
        play(kit, rounds=1, **options)
        for options in ({}, {"noise": 0.8, "noise_when": "upload"}, {"noise": 0.8})
    )
    for key, value in quiet.server["weights"].tensors().items():
        assert torch.equal(upload.server["weights"][key], value), key
    assert any(
        not torch.equal(always.server["weights"][key], value)
        for key, value in quiet.server["weights"].tensors().items()
    )
    assert not torch.equal(upload.server["s_in"]["a"], quiet.server["s_in"]["a"])
    assert not torch.equal(upload.server["s_out"]["a"], quiet.server["s_out"]["a"])


# --- what crosses -----------------------------------------------------------------------------------------

COHORT = {"a": range(0, 3), "b": range(3, 6), "c": range(6, 9), "d": range(9, 12)}


def test_features_of_others_from_the_second_round_on(kit):
    game, (first, second) = play(kit)
    weights = {client: sum(value.numel() for value in game.initial(client).values()) for client in ROWS}
    for client in ROWS:
        up = {"model": weights[client], "s_in": 4 * 5, "s_out": 4 * 6}
        assert sizes(first)[client, "up"] == sizes(second)[client, "up"] == up
        assert sizes(first)[client, "down"] == {"model": weights[client]}
        assert sizes(second)[client, "down"] == up
    assert game.method.downlink(game.server, "a").keys() == {
        "model"
    }  # who is only evaluated gets no features


def test_nobody_gets_its_own_features(kit):
    game, _ = play(kit, models=[Three] * 4, rows=COHORT, batches=3)
    for client in COHORT:
        lent = game.method.exchange.lend(game.server, client)["s_in"].reshape(3, 4, 5)
        others = [game.server["s_in"][one] for one in COHORT if one != client]
        assert all(any(torch.equal(batch, other) for batch in lent) for other in others)
    _, cohorts = play(kit, models=[Three], rows={"a": range(4)})
    assert sizes(cohorts[1])["a", "down"].keys() == {"model"}


def test_every_other_client_is_drawn_sooner_or_later(kit):
    game, _ = play(kit, models=[Three] * 4, rows=COHORT, rounds=1)
    found = set()
    for number in range(20):
        game.server.enter(number, game.federation.server_rng(number), {}, "round")
        lent = game.method.exchange.lend(game.server, "b")["s_in"]
        found |= {one for one in COHORT if torch.equal(game.server["s_in"][one], lent)}
    assert found == {"a", "c", "d"}


@pytest.mark.parametrize(("pool", "held"), [("round", {"a", "b"}), ("all", {"a", "b", "c", "d"})])
def test_the_pool_holds_the_last_round_or_everyone(kit, pool, held):
    game, _ = play(kit, models=[Three] * 4, rows=COHORT, rounds=1, pool=pool)
    game.round("a", "b")
    assert game.server["s_in"].tensors().keys() == game.server["s_out"].tensors().keys() == held


def test_fewer_batches_than_asked_for_come_up_again(kit):
    game, _ = play(kit, models=[Three] * 4, rows=COHORT, rounds=0, batches=3)
    _, cohort = (game.round("a", "b") for _ in range(2))
    assert sizes(cohort)["a", "down"]["s_in"] == 4 * 5  # the only other client's, once
    received = game.part("a", "received")["s_in"].reshape(3, 4, 5)
    assert torch.equal(received[0], received[1])
    assert torch.equal(received[0], received[2])


def test_a_client_with_fewer_samples_repeats_them(kit):
    game, _ = play(kit, rows={"a": range(0, 3), "b": range(3, 12)}, batch=8)
    rows = game.server["s_in"]["a"]
    assert rows.shape == (8, 5)
    assert torch.equal(rows[:3], rows[3:6])
    assert len(torch.unique(rows, dim=0)) == 3


def test_a_batch_may_be_of_any_size(kit, monkeypatch):
    """Also of more than the client has; those it has go through the model at once, as their deviation is one."""
    seen, original = [], FedIN.features
    monkeypatch.setattr(
        FedIN,
        "features",
        lambda self, client, x, noise: seen.append(len(x)) or original(self, client, x, noise),
    )
    game, _ = play(kit, batch=600, noise=0.8)
    assert [size for size in seen if size > 4] == [7, 5, 7, 5]
    for client in ROWS:
        assert game.server["s_in"][client].shape == (600, 5)
        assert game.server["s_out"][client].shape == (600, 6)
        assert game.part(client, "received")["s_out"].abs().sum() > 0


def test_features_of_another_size_are_refused_on_both_sides(kit):
    game, _ = play(kit)
    method, card = game.method, game.federation.population.card("a")
    assert method.symbols(card)["p"] == 5
    assert method.symbols(card)["q"] == 6
    contract = {name: field for name, field in method.up_contract("train").items() if name != "model"}
    wrong = Message({"s_in": torch.zeros(4, 6), "s_out": torch.zeros(4, 6)})
    with pytest.raises(MessageError, match="'s_in' has shape"):
        check(wrong, contract, method.symbols(card), lambda part: None, "client a")
    [outcome] = game.engine.run([request(game, {"s_in": torch.zeros(4, 6), "s_out": torch.zeros(4, 6)})])
    assert "'s_in' has shape" in outcome.reason


def request(game, features):
    game.number += 1
    down = Message({**game.method.downlink(game.server, "a"), **features})
    return Request("a", ("train",), down, game.stamp("a", 1), "train")


def federation_of(task, models, method, samples=2):
    x = Rng(0).numpy().standard_normal((4 * samples, *task.input)).astype(np.float32)
    data = from_arrays(x, np.arange(4 * samples) % task.classes, classes=task.classes)
    return Experiment.make(
        data=data,
        partition={"kind": "iid", "clients": 2, "test": 0.5},
        models=models,
        method=method,
        engine={"device": "cpu"},
    ).build()


@pytest.mark.parametrize(("side", "channels", "s_in"), [(32, 3, 65_536), (28, 1, 50_176)])
def test_the_papers_message_sizes(side, channels, s_in):
    federation = federation_of(Task("classification", 10, (channels, side, side)), ["resnet10"], "fedin")
    explained = explain(federation)
    [step] = [step for step in explained["steps"] if step["name"] == "train"]
    for direction in ("up", "down"):
        found = {entry["name"]: entry["scalars"] for entry in step[direction]}
        assert found["s_in"] == s_in
        assert found["s_out"] == 8_192
        whence = {entry["name"]: entry["meaning"] for entry in step[direction]}["s_in"]
        assert ("from the second round on" in whence) == (direction == "down")
    assert [entry["name"] for entry in explained["card"]] == ["samples", "task", "names", "width", "stem"]


def test_what_explain_promises_is_what_a_resnet_sends():
    federation = federation_of(CIFAR, ["resnet10"], "fedin")
    played = Played(federation)
    cohorts = [played.round(federation.population.ids) for _ in range(2)]
    explained = explain(federation)
    totals = {line["direction"]: line["scalars"] for line in cohorts[1].ledger.lines}
    assert totals == {"up": explained["up_scalars"], "down": explained["down_scalars"]}
    assert totals["up"] == 4_910_922 + 73_728


def test_resnet_sizes_and_their_mean():
    names = ["resnet10", "resnet14", "resnet18", "resnet22", "resnet26"]
    with torch.device("meta"):
        counts = [sum(p.numel() for p in build(name, CIFAR, check=False).parameters()) for name in names]
    assert counts == [4_910_922, 10_812_234, 11_181_642, 17_082_954, 17_452_362]
    assert round(sum(counts) / 5e6, 3) == 12.288
    assert round((sum(counts) / 5 + 73_728) / 1e6, 2) == pytest.approx(
        12.35, abs=0.011
    )  # the paper's Table 2


# --- features of different shapes -------------------------------------------------------------------------

SPACE = {"project_in": (4, 1, 1), "project_out": 8}


@pytest.mark.parametrize("kind", ["fixed", "averaged", "private"])
def test_projected_features_have_the_shared_size(kit, kind):
    game, (_, second) = play(kit, models=(Three, Narrow), project=kind, **SPACE)
    maps = {"maps": 4 * 5 + 8 * 6} if kind == "averaged" else {}
    up = sizes(second)["a", "up"]
    assert {name: size for name, size in up.items() if name != "model"} == {"s_in": 16, "s_out": 32} | maps
    shapes = [(4, 4), (4, 4)] if kind == "averaged" else [(4, 5), (4, 3)]  # maps that learn come after it
    assert [game.part(client, "received")["s_in"].shape for client in ROWS] == shapes
    assert game.part("b", "received")["s_in"].abs().sum() > 0


def sent_and_received(kit, kind, **options):
    """What b sent in round 1 and what a made of it, both with the same model and the same first weights."""
    space = {"project_in": (6, 1, 1), "project_out": 8} | options
    game, _ = play(kit, rounds=1, models=(Three, Three), project=kind, **space)
    sent = game.server["s_in"]["b"].clone()
    game.round("a", "b")
    return sent, game.part("a", "received")["s_in"], game


def test_a_wide_enough_fixed_space_gives_back_what_was_sent(kit):
    _, received, _ = sent_and_received(kit, "fixed")
    plain, _ = play(kit, rounds=1, models=(Three, Three))
    torch.testing.assert_close(received, plain.server["s_in"]["b"], atol=1e-5, rtol=1e-5)
    _, private, _ = sent_and_received(kit, "private")
    assert not torch.allclose(private, plain.server["s_in"]["b"], atol=0.1)


def test_channels_keep_their_numbers_between_widths_that_fit():
    """What one sends as its n-th channel another receives as its n-th, and without a common seed as anything."""
    space, wide, narrow = SharedSpace("fixed", {"s_in": (8, 1, 1)}), {"s_in": (7,)}, {"s_in": (3,)}
    value = torch.randn(4, 3, generator=Rng(1).generator())
    sent = space.to_wire({"s_in": value}, space.draw(narrow))
    received = space.from_wire(sent, space.draw(wide), wide)["s_in"]
    torch.testing.assert_close(received, F.pad(value, (0, 4)), atol=1e-5, rtol=1e-5)
    both = SharedSpace("fixed", {"s_in": (8, 1, 1), "s_out": (8, 1, 1)}).draw({"s_in": (8,), "s_out": (8,)})
    assert not torch.allclose(both["s_in:8"], both["s_out:8"], atol=0.1)
    secret = SharedSpace("private", space.shapes)
    lost = secret.from_wire(
        secret.to_wire({"s_in": value}, secret.draw(narrow, Rng(1))), secret.draw(wide, Rng(2)), wide
    )["s_in"]
    assert not torch.allclose(lost, F.pad(value, (0, 4)), atol=0.3)


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize(
    "options", [{"strength": 0.5}, {"alleviate": "exact", "scope": "whole", "combine": "replace"}], ids=str
)
def test_maps_step_along_the_sum_and_do_not_bend_the_body(kit, options, everything):
    """Also in the phase of `alternate` that trains on features alone."""
    game, _ = play(kit, rounds=0, models=(Three, Narrow), project="averaged", **SPACE, **options)
    maps = torch.tensor([30.0, 0.0])
    terms = {
        "local": {"model/head.bias": torch.ones(1), "model/fc.bias": torch.ones(2)},
        "maps": {"maps/s_in:5": 2 * maps},
        "features": {"model/fc.bias": torch.tensor([1.0, -3.0]), "maps/s_in:5": -maps},
    }
    step = game.method.steer(terms) if everything else game.method.steer_body(terms)
    assert torch.equal(step["maps/s_in:5"], maps)
    expected = [2.0, -2.0] if "scope" in options else [1.25, -2.75]
    assert step["model/fc.bias"].tolist() == expected
    assert ("model/head.bias" in step) == everything


def test_averaged_maps_learn_to_make_foreign_features_fit(kit):
    """Also in a space that loses nothing, where there is nothing else to learn."""
    game, _ = play(
        kit, rounds=1, models=(Three, Narrow), project="averaged", project_in=(8, 1, 1), project_out=8
    )
    exchange, client = game.method.exchange, game.federation.clients.build_client("a")
    rows = exchange.take(client, Message(exchange.lend(game.server, "a"))).source.take(torch.arange(4))
    terms = game.method.loss(client, client.source.take(torch.arange(4)), rows)
    assert terms["maps"] < 1e-6
    assert gradients(terms["features"], client.modules()["maps"]).keys() == {"s_in:5", "s_out:6"}
    before = {name: value.clone() for name, value in game.server["maps"].tensors().items()}
    assert torch.equal(client["maps"]["s_out:6"], before["s_out:6"])  # the mean of both clients', taken
    game.round(*ROWS)
    for name, value in game.server["maps"].tensors().items():
        assert (value - before[name]).norm() > 1e-3 * value.norm(), name


def test_fixed_maps_depend_on_a_seed_that_all_share(kit):
    one, _, _ = sent_and_received(kit, "fixed")
    two, _, _ = sent_and_received(kit, "fixed", project_seed=1)
    assert not torch.allclose(one, two)


def test_averaged_maps_learn_to_lose_less_and_are_shared_by_width(kit):
    game, _ = play(
        kit, rounds=1, models=(Three, Narrow), project="averaged", project_in=(2, 1, 1), project_out=3
    )
    space, maps = game.method.exchange.space, game.server["maps"].tensors()
    assert {name: tuple(value.shape) for name, value in maps.items()} == {
        "s_in:5": (2, 5), "s_in:3": (2, 3), "s_out:6": (3, 6)
    }  # fmt: skip
    own = {client: game.part(client, "maps") for client in ROWS}
    torch.testing.assert_close(maps["s_out:6"], (own["a"]["s_out:6"] + own["b"]["s_out:6"]) / 2)
    assert torch.equal(maps["s_in:5"], own["a"]["s_in:5"])
    client = game.federation.clients.build_client("a")
    features = game.method.features(client, client.source.take(torch.arange(7)).x, 0.0)
    before = space.loss(features, client["maps"].tensors())
    assert gradients(before, client.modules()["maps"]).keys() == own["a"].keys()
    assert gradients(before, client.modules()["model"]) == {}
    assert space.loss(features, own["a"]) < before


def test_a_map_takes_channels_and_grid_to_the_shared_space_and_back():
    space = SharedSpace("fixed", {"s_in": (8, 4, 4)})
    image = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    vector = torch.arange(2 * 5.0).view(2, 5)
    for value in (image, vector):
        own = {"s_in": tuple(value.shape[1:])}
        there = space.to_wire({"s_in": value}, space.draw(own))
        assert there["s_in"].shape == (2, 8 * 4 * 4)
        torch.testing.assert_close(
            space.from_wire(there, space.draw(own), own)["s_in"], value, atol=1e-4, rtol=1e-5
        )
    coarse = SharedSpace("fixed", {"s_in": (8, 2, 2)})
    own = {"s_in": (3, 4, 4)}
    back = coarse.from_wire(coarse.to_wire({"s_in": image}, coarse.draw(own)), coarse.draw(own), own)["s_in"]
    torch.testing.assert_close(
        back, F.interpolate(F.avg_pool2d(image, 2), scale_factor=2.0), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("model", "channels"),
    [(lambda: build("resnet10", CIFAR), 64), (lambda: VisionTransformer(CIFAR, patch=16, layers=1), 768)],
    ids=["resnet", "vit"],
)
def test_a_space_with_enough_channels_and_places_loses_nothing(model, channels):
    """Tokens are places and their width the channels; five of them do not fill 64 places evenly."""
    made, space = model().eval(), SharedSpace("fixed", {"s_in": (channels, 8, 8)})
    with torch.no_grad():
        features = {"s_in": made.stem(torch.randn(4, *CIFAR.input, generator=Rng(1).generator()))}
    own = {"s_in": stem_shape(made, CIFAR)}
    maps = space.draw(own)
    assert space.matrices(own) == {f"s_in:{channels}": (channels, channels)}
    there = space.to_wire(features, maps)
    assert there["s_in"].shape == (4, space.sizes(own)["s_in"])
    gap = space.from_wire(there, maps, own)["s_in"] - features["s_in"]
    assert gap.norm() < 1e-5 * features["s_in"].norm()
    assert space.loss(features, maps) < 1e-6


@pytest.mark.parametrize("shape", [(3, 7, 5), (9, 3), (3, 1, 4)])
def test_too_few_places_keep_the_means(shape):
    """What came back once comes back whole a second time, and with its mean of every channel."""
    space, own = SharedSpace("fixed", {"s_in": (4, 2, 3)}), {"s_in": shape}
    maps, value = space.draw(own), torch.randn(2, *shape, generator=Rng(1).generator())
    once = space.from_wire(space.to_wire({"s_in": value}, maps), maps, own)["s_in"]
    twice = space.from_wire(space.to_wire({"s_in": once}, maps), maps, own)["s_in"]
    torch.testing.assert_close(once, twice)
    places = [axis for axis in range(1, value.dim()) if axis != (2 if len(shape) == 2 else 1)]
    torch.testing.assert_close(once.mean(places), value.mean(places))


@pytest.mark.parametrize("kind", ["fixed", "averaged"])
def test_tokens_and_vectors_meet_in_a_shared_space(kit, kind):
    game, (_, second) = play(kit, models=(Three, Tokens), project=kind, project_in=(5, 1, 2), project_out=6)
    assert not second.failures
    client, exchange = game.federation.clients.build_client("b"), game.method.exchange
    own = exchange.take(client, Message(exchange.lend(game.server, "b"))).source.take(torch.arange(4))
    like = game.method.features(client, client.source.take(torch.arange(4)).x, 0.0)
    received = exchange.seen(client, own, like)["s_in"]
    assert received.shape == (4, 2, 5)
    torch.testing.assert_close(received[:, 0], received[:, 1])  # a vector is at all places


# --- bad input --------------------------------------------------------------------------------------------


def test_a_model_without_a_stem_is_refused(kit):
    with pytest.raises(ConfigError, match=r"client b \(Linear\) has a model without a stem"):
        play(kit, rounds=0, models=(Three, kit.Linear))
    play(kit, rounds=1, models=(kit.Linear, kit.Linear), intermediate=False)


def test_without_features_noise_needs_a_stem_all_the_same(kit):
    with pytest.raises(ConfigError, match=r"client b \(Linear\) has a model without a stem"):
        play(kit, rounds=0, models=(Three, kit.Linear), intermediate=False, noise=0.8)


def test_a_named_model_without_a_stem_is_told_of_the_others():
    text = from_arrays(np.arange(32).reshape(8, 4) % 5, np.arange(8) % 2, vocabulary=5)
    values = {"data": text, "partition": {"kind": "iid", "clients": 2}, "engine": {"device": "cpu"}}
    sentence = r"\(text-mean\) has a model without a stem; choose one with stem and body \(docs/models.md"
    with pytest.raises(ConfigError, match=sentence):
        Experiment.make(**values, models=["text-mean"], method="fedin").build()


@pytest.mark.parametrize("model", [Bodiless, Frozen])
@pytest.mark.parametrize("options", [{}, {"alleviate": "exact", "scope": "whole"}, {"project": "fixed"}])
def test_a_body_that_cannot_learn_is_refused(kit, model, options):
    with pytest.raises(
        ConfigError, match=rf"client b \({model.__name__}\) has a body without parameters to train"
    ):
        play(kit, rounds=0, models=(Three, model), **options)
    play(kit, rounds=1, models=(Three, model), intermediate=False)


def test_more_batches_than_other_clients_are_refused(kit):
    with pytest.raises(ConfigError, match=r"method.batches is 1000000, but a client has 3 others; lower it"):
        play(kit, rounds=0, models=[Three] * 4, rows=COHORT, batches=1_000_000)
    play(kit, rounds=0, models=[Three] * 4, rows=COHORT, batches=3)
    values = {"partition": {"kind": "iid", "clients": 4}, "models": "mlp-small", "engine": {"device": "cpu"}}
    half = functools.partial(Experiment.make, **values, training={"participation": 0.5})
    with pytest.raises(ConfigError, match=r"is 3, but with training.participation 0.5 a round leaves 2;"):
        half(method={"name": "fedin", "batches": 3}).build()
    half(method={"name": "fedin", "batches": 2}).build()  # who was not in the last round finds two
    half(method={"name": "fedin", "batches": 3, "pool": "all"}).build()


def test_stems_of_different_shape_need_a_projection(kit):
    with pytest.raises(
        ConfigError, match=r"client b \(Narrow\) has features of shape \(3,\) and 6, client a .*project"
    ):
        play(kit, rounds=0, models=(Three, Narrow))


def test_a_client_without_samples_is_refused(kit):
    with pytest.raises(ConfigError, match=r"client b .* has no training samples"):
        play(kit, rounds=0, rows={"a": range(4), "b": []})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"noise": -0.1}, "method.noise: must be greater than or equal to 0"),
        ({"noise": float("inf")}, "method.noise"),
        ({"mu": -1}, "method.mu"),
        ({"strength": -1}, "method.strength"),
        ({"batch": 1}, "method.batch"),
        ({"batches": 0}, "method.batches"),
        ({"alleviate": "some"}, "method.alleviate: must be 'simplified', 'exact' or 'none'"),
        ({"schedule": "both"}, "method.schedule"),
        ({"combine": "subtract"}, "method.combine"),
        ({"noise_per": "pixel"}, "method.noise_per"),
        ({"project": "public"}, "method.project"),
        ({"project_in": [64, 8]}, "method.project_in: give channels, height and width"),
        ({"project_in": 64}, "method.project_in: give channels, height and width"),
        (
            {"project_in": [64, 8, 0], "project": "fixed"},
            "method.project_in.2: must be greater than 0",
        ),
        ({"combine": "replace"}, "combine does nothing with alleviate: simplified; it is for exact"),
        ({"scope": "whole", "alleviate": "none"}, "scope does nothing with alleviate: none"),
        ({"strength": 2, "alleviate": "exact"}, "strength does nothing with alleviate: exact"),
        ({"strength": 2, "alleviate": "none"}, "it is for simplified"),
        (
            {"project_in": [8, 4, 4]},
            "project_in does nothing with project: none; it is for fixed, averaged or private",
        ),
        ({"project_out": 8}, "project_out does nothing"),
        ({"project_seed": 1}, "project_seed does nothing"),
        ({"project_seed": 1, "project": "private"}, "it is for fixed or averaged"),
        ({"lambda": 1}, "unknown key 'method.lambda'"),
    ],
)
def test_wrong_options_are_told_in_one_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        federation_of(CIFAR, ["resnet10"], {"name": "fedin"} | options)


@pytest.mark.parametrize(
    "options", [{}, {"alleviate": "exact", "combine": "replace"}, {"project": "private"}]
)
def test_an_experiment_written_out_with_every_default_can_be_read_again(tmp_path, options):
    """A run folder and a site get every option, also those that do nothing there."""
    values = {"data": "digits", "partition": {"kind": "iid", "clients": 2}, "models": "mlp-small"}
    asked = Experiment.make(**values, method={"name": "fedin"} | options)
    (tmp_path / "again.yaml").write_text(asked.to_yaml())
    assert Experiment.load(tmp_path / "again.yaml").method == asked.method
