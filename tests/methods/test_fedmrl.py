"""FedMRL: the fusion by hand, who gets gradient from whom, the mean, the size of the wire."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from potluck.core.client import Client
from potluck.core.contract import check as check_message
from potluck.core.message import Message
from potluck.core.model import Model
from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.core.state import Part
from potluck.core.streams import Source
from potluck.core.task import Batch, Task
from potluck.engine.protocol import Engine
from potluck.errors import ConfigError, MessageError, RoundFailed
from potluck.experiment.schema import Experiment
from potluck.federation.explain import explain
from potluck.kit.averaging import average
from potluck.kit.loss_weights import weigh
from potluck.methods.fedmrl import FedMRL
from potluck.methods.fedmrl_variants import FedMRLVariants, make_projector

TASK = Task("classification", 10, (5,))
D1, D2 = 2, 3
GRID = (100, 200, 300, 400, 500)  # d1 in the paper


class Cut(Model):
    """The features are some columns of the sample, times a trained factor of one."""

    def __init__(self, first, width, zero_head=False):
        super().__init__()
        self.first, self.rep_dim = first, width
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 10)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def features(self, x):
        return x[:, self.first : self.first + self.rep_dim] * self.scale


def tiny_client(zero_head=False):
    """r_g = columns 0–1, r_f = columns 2–4, P with the rows e0+e2, e1+e3, e4."""
    projector = nn.Linear(D1 + D2, D2)
    with torch.no_grad():
        projector.weight.copy_(torch.tensor([[1.0, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1]]))
        projector.bias.zero_()
    x, y = torch.tensor([[1.0, 2, 3, 4, 5]]), torch.tensor([7])
    client = Client(TASK, Source(x, y))
    with Rng(0).as_default():
        model, small = Cut(2, D2, zero_head), Cut(0, D1, zero_head)
    client.declare({"model": model, "small": small, "projector": projector})
    return client, Batch(x, y)


def method(**options):
    return FedMRLVariants(FedMRLVariants.Config(name="fedmrl", d1=D1, **options))


def test_fused_representation_and_loss_by_hand():
    client, batch = tiny_client(zero_head=True)
    fused = method().fuse(client, batch.x)
    assert fused.tolist() == [[4.0, 6.0, 5.0]]
    terms = method().loss(client, batch)
    assert sum(terms.values()).item() == pytest.approx(2 * math.log(10), abs=2e-5)
    assert 2 * math.log(10) == pytest.approx(4.605170, abs=1e-6)


def test_the_small_head_sees_the_first_columns_and_the_large_head_all():
    client, batch = tiny_client()
    fused = torch.tensor([[4.0, 6.0, 5.0]])
    expected = {
        "mix-small": client["small"].head(fused[:, :2]),
        "mix-large": client["model"].head(fused),
        "single-small": client["small"].head(torch.tensor([[1.0, 2.0]])),
        "single-large": client["model"].head(torch.tensor([[3.0, 4.0, 5.0]])),
    }
    assert FedMRL.modes[0] == "mix-large"
    assert set(FedMRL.modes) == set(expected)
    for mode, scores in expected.items():
        assert torch.equal(method().predict(client, batch, mode), scores), mode
    terms = method().loss(client, batch)
    assert torch.equal(terms["small"], TASK.loss(expected["mix-small"], batch.y))
    assert torch.equal(terms["large"], TASK.loss(expected["mix-large"], batch.y))


def gradients(**weights):
    client, batch = tiny_client()
    sum(method(**weights).loss(client, batch).values()).backward()
    return {name: client[name].module for name in ("model", "small", "projector")}


def is_zero(parameter):
    return parameter.grad is None or not parameter.grad.any()


def test_gradient_of_the_small_loss_alone():
    parts = gradients(weight_large=0.0)
    assert is_zero(parts["model"].head.weight)
    assert is_zero(parts["model"].head.bias)
    assert not parts["projector"].weight.grad[D1:].any()
    assert not parts["projector"].bias.grad[D1:].any()
    assert parts["projector"].weight.grad[:D1].any()
    assert not is_zero(parts["model"].scale)
    assert not is_zero(parts["small"].scale)
    assert not is_zero(parts["small"].head.weight)


def test_gradient_of_the_large_loss_alone():
    parts = gradients(weight_small=0.0)
    assert is_zero(parts["small"].head.weight)
    assert is_zero(parts["small"].head.bias)
    assert not is_zero(parts["small"].scale)
    assert not is_zero(parts["model"].scale)
    assert not is_zero(parts["model"].head.weight)
    assert parts["projector"].weight.grad[D1:].any()


def test_both_losses_add_up():
    both, small, large = gradients(), gradients(weight_large=0.0), gradients(weight_small=0.0)
    for part in both:
        for name, parameter in both[part].named_parameters():
            alone = [parts[part].get_parameter(name).grad for parts in (small, large)]
            expected = sum(value for value in alone if value is not None)
            torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_clients_with_1_and_4_of_one_and_two_samples_give_3(order):
    values = {"a": 1.0, "b": 4.0}
    contents = {client: {"small": {"w": torch.full((2, 2), values[client])}} for client in order}
    mean = average(Replies.of(contents, samples={"a": 1, "b": 2}), "small")
    torch.testing.assert_close(mean["w"], torch.full((2, 2), 3.0))


class Listener(Engine):
    """Hears everything that crosses."""

    def __init__(self, engine):
        self.engine, self.down, self.up = engine, [], []

    def run(self, requests):
        outcomes = self.engine.run(requests)
        self.down += [request.down for request in requests]
        self.up += [outcome.up for outcome in outcomes]
        return outcomes

    def examine(self, examinations):
        return self.engine.examine(examinations)

    def settle(self, round_, cohort, accepted):
        self.engine.settle(round_, cohort, accepted)


@pytest.fixture(scope="module")
def official(kit):
    """CNN-1, CNN-2 and CNN-5 clients on 32×32 images, the shared small model a CNN-5 with d1 = 100."""
    x = Rng(0).numpy().random((9, 3, 32, 32), dtype=np.float32)
    rows = {"a": range(0, 3), "b": range(3, 7), "c": range(7, 9)}
    options = {"name": "fedmrl", "d1": 100}
    training = {"batch_size": 4, "optimizer": {"lr": 0.01, "momentum": 0.9}}
    game = kit.Federation(
        options,
        ["cnn1", "cnn2", "cnn5"],
        rows,
        x=x,
        y=np.array([0, 1, 2, 3, 4, 5, 6, 7, 9]),
        training=training,
    )
    before = {client: game.state(client) for client in rows}
    heard = Listener(game.engine)
    cohort = game.round("a", "b", engine=heard)
    return game, before, heard, cohort


def test_465658_scalars_up_and_down_and_no_private_key(official):
    game, _, heard, cohort = official
    assert game.federation.population.task.classes == 10
    lines = cohort.ledger.lines
    assert [(line["direction"], line["scalars"]) for line in lines] == [("down", 465_658)] * 2 + [
        ("up", 465_658)
    ] * 2
    assert all(line["names"] == {"small": 465_658} for line in lines)
    wire = {
        f"small/{name}"
        for name, _ in game.method.build_small(game.federation.population.task).named_parameters()
    }
    assert len(heard.up) == len(heard.down) == 2
    for message in heard.up + heard.down:
        assert set(message) == wire
        assert message.scalars == 465_658


def test_only_what_was_sampled_changes(official):
    game, before, _, _ = official
    assert all(torch.equal(value, before["c"][name]) for name, value in game.state("c").items())
    moved = game.state("a")
    for name in ("model/conv1.weight", "model/head.weight", "projector/weight", "small/head.weight"):
        assert not torch.equal(moved[name], before["a"][name]), name
    assert game.engine.store.peek("c") is None


def test_the_server_holds_the_mean_of_what_came_up(official):
    game, _, heard, _ = official
    a, b = heard.up
    for name, value in game.server["small"].wire().items():
        expected = (3 * a[f"small/{name}"].double() + 4 * b[f"small/{name}"].double()) / 7
        torch.testing.assert_close(value.detach().double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("own", "common"), [({"clip": 0.05}, None), ({"clip": None}, 0.05), ({}, 0.05), ({"clip": 0.05}, 0.5)]
)
def test_a_round_is_three_plain_optimisers_with_a_clip_each(kit, own, common):
    """The official recipe: clip ω, θ and φ each on their own, then step; fresh momentum every round."""
    rows = {"a": range(0, 7), "b": range(7, 12)}
    training = {"epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}}
    options = {"name": "fedmrl", "d1": 4, "small": kit.Narrow, **own}
    game = kit.Federation(options, kit.Shallow, rows, training=training | {"clip": common})
    client = game.federation.clients.build_client("a")
    model, projector = client["model"].module, client["projector"].module
    small = client["small"].module
    for number in (1, 2):
        start = {
            name: value.detach().clone() for name, value in game.server["small"].module.state_dict().items()
        }
        small.load_state_dict(start)
        game.round("a", "b")
        parts = [model, small, projector]
        optimisers = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3) for part in parts
        ]
        for batch in game.steps("a", number):
            x, y = torch.tensor(game.x[batch]), torch.tensor(game.y[batch])
            fused = projector(torch.cat([small.features(x), model.features(x)], 1))
            loss = nn.functional.cross_entropy(small.head(fused[:, :4]), y)
            loss = loss + nn.functional.cross_entropy(model.head(fused), y)
            for part in parts:
                part.zero_grad()
            loss.backward()
            norms = [nn.utils.clip_grad_norm_(part.parameters(), 0.05) for part in parts]
            assert min(norms) > 0.05
            for optimiser in optimisers:
                optimiser.step()
    for name, part in (("model", model), ("projector", projector), ("small", small)):
        for key, value in part.named_parameters():
            np.testing.assert_allclose(
                game.part("a", name)[key], value.detach(), atol=1e-5, err_msg=f"{name}/{key}"
            )


# --- the sizes of the spec, and of the options that change what crosses ---------------------------------

SIZES = {
    ("cnn5", 10): (465_658, 516_758, 567_858, 618_958, 670_058),
    ("cnn5", 100): (474_748, 534_848, 594_948, 655_048, 715_148),
    ("cnn1", 10): (1_817_158, 2_018_258, 2_219_358, 2_420_458, 2_621_558),
    ("cnn1", 100): (1_826_248, 2_036_348, 2_246_448, 2_456_548, 2_666_648),
}
OFFICIAL = [(*net, d1, size) for net, row in SIZES.items() for d1, size in zip(GRID, row, strict=True)]


def crossing(small, classes, d1, **options):
    """How many scalars the small model has on the wire."""
    made = FedMRLVariants(FedMRLVariants.Config(name="fedmrl", small=small, **options))
    made.d2 = 500
    part = Part(made.build_small(Task("classification", classes, (3, 32, 32)), d1))
    return sum(value.numel() for value in part.wire().values())


@pytest.mark.parametrize(("small", "classes", "d1", "size"), OFFICIAL)
def test_size_of_the_small_model(small, classes, d1, size):
    assert crossing(small, classes, d1) == size


@pytest.mark.parametrize(
    ("d1", "size"), [*zip(GRID, (300_500, 350_500, 400_500, 450_500, 500_500), strict=True)]
)
def test_size_of_the_projector(d1, size):
    linear, deep, none = (make_projector(kind, d1, 500) for kind in ("linear", "deep", "none"))
    sizes = [sum(value.numel() for value in module.parameters()) for module in (linear, deep, none)]
    assert sizes == [size, size + 250_500, 0]
    assert all(module(torch.zeros(2, d1 + 500)).shape == (2, 500) for module in (linear, deep, none))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 465_658),
        ({"tie_headers": True}, 465_658),
        ({"global_header": False}, 464_648),
        ({"mrl": "local_only"}, 464_648),
        ({"mrl": "full"}, 464_648 + 500 * 10 + 10),
    ],
)
def test_what_each_option_leaves_on_the_wire(kit, options, size):
    x = Rng(0).numpy().random((4, 3, 32, 32), dtype=np.float32)
    options = {"name": "fedmrl", "small": "cnn5", "d1": 100, **options}
    game = kit.Federation(options, "cnn5", {"a": range(0, 4)}, x=x, y=np.array([0, 1, 2, 9]))
    explained = explain(game.federation)
    assert (explained["up_scalars"], explained["down_scalars"]) == (size, size)
    assert (
        crossing(
            "cnn5", 10, 100, **{key: options[key] for key in options if key not in ("name", "small", "d1")}
        )
        == size
    )
    lines = game.round("a").ledger.lines
    assert [line["scalars"] for line in lines] == [size, size]


# --- gradient routing under every option ----------------------------------------------------------------


def fused_client(small_head=None, projector=None):
    """As `tiny_client`, with another header of the small model or another projector."""
    client, batch = tiny_client()
    parts = {name: client[name].module for name in ("model", "small", "projector")}
    if small_head is not None:
        parts["small"].head = small_head
    if projector is not None:
        parts["projector"] = projector
    client.declare(parts)
    return client, batch


def backward(term, client, batch, **options):
    """The modules after the backward pass of one term."""
    method(**options).loss(client, batch)[term].backward()
    return {name: client[name].module for name in ("model", "small", "projector")}


def test_under_full_both_headers_see_all_of_r():
    client, batch = fused_client(small_head=nn.Linear(D2, 10))
    scores = client["small"].head(torch.tensor([[4.0, 6.0, 5.0]]))
    assert torch.equal(method(mrl="full").predict(client, batch, "mix-small"), scores)
    parts = backward("small", client, batch, mrl="full")
    assert parts["projector"].weight.grad[D1:].any()
    assert is_zero(parts["model"].head.weight)
    assert not is_zero(parts["small"].head.weight)
    assert not is_zero(parts["small"].scale)
    assert not is_zero(parts["model"].scale)


def test_local_only_has_one_loss_that_reaches_everything_but_the_small_header():
    client, batch = fused_client(small_head=nn.Identity())
    assert set(method(mrl="local_only").loss(client, batch)) == {"large"}
    parts = backward("large", client, batch, mrl="local_only")
    assert not is_zero(parts["small"].scale)
    assert not is_zero(parts["model"].scale)
    assert not is_zero(parts["model"].head.weight)
    assert parts["projector"].weight.grad.any(dim=1).all()


@pytest.mark.parametrize("options", [{"global_header": False}, {"tie_headers": True}])
def test_the_first_columns_of_the_private_header_stand_in_for_the_small_one(options):
    client, batch = fused_client(small_head=None if "tie_headers" in options else nn.Identity())
    head = client["model"].head
    by_hand = torch.tensor([[4.0, 6.0]]) @ head.weight[:, :D1].T + head.bias
    torch.testing.assert_close(method(**options).predict(client, batch, "mix-small"), by_hand)
    parts = backward("small", client, batch, **options)
    assert parts["model"].head.weight.grad[:, :D1].any()
    assert not parts["model"].head.weight.grad[:, D1:].any()
    assert parts["model"].head.bias.grad.any()
    assert not parts["projector"].weight.grad[D1:].any()
    assert not is_zero(parts["small"].scale)
    assert all(is_zero(value) for value in parts["small"].head.parameters())


def test_without_a_projector_the_small_representation_is_added_to_the_first_columns():
    client, batch = fused_client(projector=make_projector("none", D1, D2))
    assert method(projector="none").fuse(client, batch.x).tolist() == [[4.0, 6.0, 5.0]]
    parts = backward("small", client, batch, projector="none")
    assert parts["small"].scale.grad.all()
    assert parts["model"].scale.grad.tolist()[D1:] == [0.0]


def test_further_widths_use_the_small_header_up_to_d1_and_the_private_one_beyond():
    client = Client(TASK, Source(torch.ones(1, 9), torch.tensor([7])))
    with Rng(0).as_default():
        parts = {"model": Cut(4, 5), "small": Cut(0, 3), "projector": nn.Linear(8, 5)}
    client.declare(parts)
    batch = Batch(torch.ones(1, 9), torch.tensor([7]))
    made = FedMRLVariants(FedMRLVariants.Config(name="fedmrl", widths=[2, 4], weight_widths=0.5))
    terms, fused = made.loss(client, batch), made.fuse(client, batch.x)
    assert set(terms) == {"small", "large", "width-2", "width-4"}
    for width, head in ((2, parts["small"].head), (4, parts["model"].head)):
        scores = fused[:, :width] @ head.weight[:, :width].T + head.bias
        torch.testing.assert_close(terms[f"width-{width}"], 0.5 * TASK.loss(scores, batch.y))


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        ({}, ("mix-large", "mix-small", "single-large", "single-small")),
        ({"tie_headers": True}, ("mix-large", "mix-small", "single-large", "single-small")),
        ({"global_header": False}, ("mix-large", "mix-small", "single-large")),
        ({"mrl": "full"}, ("mix-large", "mix-small", "single-large")),
        ({"mrl": "local_only"}, ("mix-large", "single-large")),
    ],
)
def test_only_defined_modes_are_offered(options, modes):
    assert method(**options).modes == modes


# --- rounds under the options ---------------------------------------------------------------------------

ROWS = {"a": range(0, 6), "b": range(6, 10), "c": range(10, 12)}
ONE_STEP = {"batch_size": 8, "optimizer": {"lr": 0.1}}


def federation(kit, models=None, rows=ROWS, training=ONE_STEP, per_client=False, **options):
    return kit.Federation(
        {"name": "fedmrl", "small": kit.Narrow, "d1": 4, **options},
        models or kit.Shallow,
        rows,
        training=training,
        per_client=per_client,
        test=(0, 1),
    )


class Sized(Model):
    """One hidden layer, as wide as the representation."""

    def __init__(self, task, rep_dim=6):
        super().__init__()
        self.rep_dim = rep_dim
        self.fc1 = nn.Linear(task.input[0], rep_dim)
        self.head = nn.Linear(rep_dim, task.classes)

    def features(self, x):
        return torch.relu(self.fc1(x))


def sized(task, rep_dim=6):
    return Sized(task, rep_dim)


def test_private_models_of_different_width(kit):
    game = federation(kit, models=[kit.Shallow, kit.Narrow, kit.Deep])
    shapes = {client: tuple(game.part(client, "projector")["weight"].shape) for client in ROWS}
    assert shapes == {"a": (6, 10), "b": (4, 8), "c": (6, 10)}
    before = {client: game.part(client, "projector")["weight"] for client in ROWS}
    assert not game.round(*ROWS).failures
    for client in ROWS:
        assert not torch.equal(game.part(client, "projector")["weight"], before[client])


@pytest.mark.parametrize("d1", [{"a": 5, "b": 2, "c": 3}, [5, 2, 3]], ids=["by name", "in turn"])
def test_a_client_with_a_smaller_d1_trains_a_nested_slice(kit, d1):
    """θ is averaged entry by entry over those who hold the entry; what nobody holds stays."""
    game = federation(kit, small=sized, d1=d1)
    heard = Listener(game.engine)
    before = {name: value.detach().clone() for name, value in game.server["small"].wire().items()}
    assert before["fc1.weight"].shape == (5, kit.inputs)
    game.round("b", "c", engine=heard)
    (down_b, down_c), (up_b, up_c) = heard.down, heard.up
    assert torch.equal(down_b["small/fc1.weight"], before["fc1.weight"][:2])
    assert torch.equal(down_c["small/head.weight"], before["head.weight"][:, :3])
    sizes = [width * kit.inputs + width + width * kit.classes + kit.classes for width in (2, 3)]
    assert [message.scalars for message in (down_b, down_c, up_b, up_c)] == sizes * 2
    assert [explain(game.federation, client)["up_scalars"] for client in ("b", "c")] == sizes
    after = {name: value.detach() for name, value in game.server["small"].wire().items()}
    both = (4 * up_b["small/head.weight"] + 2 * up_c["small/head.weight"][:, :2]) / 6
    torch.testing.assert_close(after["head.weight"][:, :2], both)
    torch.testing.assert_close(after["head.weight"][:, 2:3], up_c["small/head.weight"][:, 2:])
    assert torch.equal(after["head.weight"][:, 3:], before["head.weight"][:, 3:])
    torch.testing.assert_close(after["fc1.bias"][2], up_c["small/fc1.bias"][2])
    assert torch.equal(after["fc1.weight"][3:], before["fc1.weight"][3:])
    torch.testing.assert_close(
        after["head.bias"], (4 * up_b["small/head.bias"] + 2 * up_c["small/head.bias"]) / 6
    )


def test_a_slice_of_the_wrong_width_is_refused(kit):
    game = federation(kit, small=sized, d1={"a": 5, "b": 2, "c": 3})
    wide = Message({"small": game.server["small"].state()})
    with pytest.raises(
        MessageError, match=r"client b.*fc1.*\(5, 3\).*declared \(2, 3\)|client b.*\(5,\).*\(2,\)"
    ):
        check_message(
            wide,
            game.method.up_contract("train"),
            {},
            lambda part: game.method.expected(game.federation.population.card("b"), part),
            "client b",
        )


def test_every_part_has_its_learning_rate(kit):
    rates = {"small": 0.5, "projector": 0.01}
    game = federation(kit, lr=rates, clip=None, rows={"a": range(0, 6)})
    parts = {
        name: game.federation.clients.build_client("a")[name].module
        for name in ("model", "small", "projector")
    }
    parts["small"].load_state_dict(game.server["small"].module.state_dict())
    x, y = torch.tensor(game.x[:6]), torch.tensor(game.y[:6])
    fused = parts["projector"](torch.cat([parts["small"].features(x), parts["model"].features(x)], 1))
    scores = parts["small"].head(fused[:, :4]), parts["model"].head(fused)
    sum(nn.functional.cross_entropy(value, y) for value in scores).backward()
    game.round("a")
    for part, module in parts.items():
        for name, value in module.named_parameters():
            expected = value.detach() - {"model": 0.1, **rates}[part] * value.grad
            np.testing.assert_allclose(
                game.part("a", part)[name], expected, atol=1e-5, err_msg=f"{part}/{name}"
            )


def test_a_weight_may_follow_what_the_client_reported_last(kit):
    """No weight before the first report, then twice the private loss over one that starts at zero."""
    game = federation(
        kit, rows={"a": range(0, 6)}, weight_small=lambda report: 2 * report["large"] / (report["small"] + 1)
    )
    before = game.part("a", "small")["head.weight"]
    game.round("a")
    first = game.part("a", "small")["head.weight"]
    assert torch.equal(first, game.server["small"]["head.weight"])
    assert torch.equal(first, federation(kit).server["small"]["head.weight"])
    assert not torch.equal(before, first)
    seen = {
        name.removeprefix("report/"): value for name, value in game.state("a").items() if "report/" in name
    }
    assert seen["small"] == 0
    assert seen["large"] > 0
    client = game.federation.clients.build_client("a")
    client.restore(game.state("a"))
    weight = 2 * float(seen["large"])
    twin = federation(kit, rows={"a": range(0, 6)}, weight_small=weight)
    expected = twin.method.loss(client, Batch(torch.tensor(game.x[:6]), torch.tensor(game.y[:6])))
    game.round("a")
    reported = game.state("a")
    torch.testing.assert_close(reported["report/small"], expected["small"].detach())
    torch.testing.assert_close(reported["report/large"], expected["large"].detach())


@pytest.mark.parametrize(("weights", "share"), [("samples", 0.6), ("uniform", 0.5)])
def test_the_mean_weighs_clients_by_their_samples_or_alike(kit, weights, share):
    game = federation(kit, weights=weights)
    heard = Listener(game.engine)
    game.round("a", "b", engine=heard)
    a, b = (up["small/head.weight"] for up in heard.up)
    torch.testing.assert_close(game.server["small"]["head.weight"], share * a + (1 - share) * b)
    assert not torch.allclose(a, b)


def test_a_deep_projector_has_a_layer_with_a_relu_between():
    projector = make_projector("deep", 1, 2)
    first, last = (layer for layer in projector if isinstance(layer, nn.Linear))
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, -1.0]]))
        last.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        first.bias.zero_()
        last.bias.zero_()
    found = projector(torch.tensor([[2.0, 1.0, 3.0], [-2.0, 3.0, 1.0]]))
    assert found.tolist() == [[2.0, 0.0], [2.0, 4.0]]


def test_tied_headers_are_sent_but_what_comes_back_is_not_used(kit):
    game = federation(kit, tie_headers=True)
    heard = Listener(game.engine)
    game.round("a", "b", engine=heard)
    for client, up in zip(("a", "b"), heard.up, strict=True):
        header = game.part(client, "model")
        assert torch.equal(up["small/head.weight"], header["head.weight"][:, :4])
        assert torch.equal(up["small/head.bias"], header["head.bias"])
    before = game.part("a", "model")["head.weight"]
    expected = game.measure("a", "mix-small")
    game.server["small"].load({"head.weight": torch.full((kit.classes, 4), 9.0)})
    assert game.measure("a", "mix-small") == expected
    assert game.measure("a", "single-small") != expected
    assert torch.equal(game.part("a", "model")["head.weight"], before)


@pytest.mark.parametrize("per_client", [False, True])
def test_initial_models_are_shared_per_architecture_or_independent(kit, per_client):
    game = federation(kit, models=[kit.Shallow, kit.Shallow, kit.Deep], per_client=per_client)
    for part in ("model", "projector"):
        a, b = game.part("a", part), game.part("b", part)
        assert all(torch.equal(a[name], b[name]) for name in a) is not per_client
    assert all(
        torch.equal(value, game.server["small"][name])
        for client in ROWS
        for name, value in game.method.downlink(game.server, client)["small"].items()
    )


# --- what is refused ------------------------------------------------------------------------------------


class Bent(Sized):
    """A header that is not linear."""

    def __init__(self, task, rep_dim=6):
        super().__init__(task, rep_dim)
        self.head = nn.Sequential(nn.Linear(rep_dim, 5), nn.ReLU(), nn.Linear(5, task.classes))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"d1": 7},
            r"d1 is 7, but client a \(Shallow\) has representation width 6; set method.d1 to at most 4 \(where "
            r"methods are compared: fedmrl.d1\)",
        ),
        ({"d1": [4, 5]}, r"d1 is 5, but client b \(Narrow\) has representation width 4"),
        ({"d1": {"a": 4, "b": 4}}, "leaves out client 'c'"),
        ({"d1": {"a": 4, "b": 4, "c": 4, "z": 4}}, "names client 'z', which does not exist"),
        ({"d1": "auto"}, r"no client has validation rows; set partition\.validation"),
        (
            {"widths": [2, 4]},
            r"widths is 4, but client b \(Narrow\) has .* width 4; set method.widths to at most 3",
        ),
        ({"mrl": "full"}, r"mrl: full needs one representation width, but client b"),
        (
            {"weight_small": lambda report: report["tiny"]},
            "method.weight_small: the function fails .KeyError",
        ),
        ({"weight_large": lambda report: -1}, r"method.weight_large: the function gives -1\.0"),
        ({"weight_large": lambda report: -report["small"]}, r"method.weight_large: the function gives -1\.0"),
        ({"d1": 2, "widths": [2, 3]}, "widths has 2, which is d1 of client a already; leave it out"),
        (
            {"weight_small": 0, "weight_large": 0.0},
            "method.weight_small and method.weight_large are 0: nothing is learned",
        ),
        ({"mrl": "local_only", "weight_large": 0}, "method.weight_large is 0: nothing is learned"),
        (
            {"mrl": "local_only", "weight_large": lambda report: report["large"]},
            "method.weight_large is 0 before the first report",
        ),
        (
            {"d1": 3, "widths": [2], "weight_small": 0, "weight_large": 0, "weight_widths": 0},
            "method.weight_small and method.weight_large and method.weight_widths are 0",
        ),
        (
            {"weight_small": lambda report: report["small"], "weight_large": 0},
            "method.weight_small and method.weight_large are 0 before the first report: nothing is learned",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_told_before_anything_runs(kit, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        federation(kit, models=[kit.Shallow, kit.Narrow, kit.Deep], **options)


def test_further_widths_alone_can_be_learned(kit):
    federation(kit, d1=4, widths=[2], weight_small=0, weight_large=0)


class Pooled(Sized):
    """As wide as it is told to be by averaging neighbours: a narrower one is no slice of a wider one."""

    def __init__(self, task, rep_dim=6):
        super().__init__(task, rep_dim)
        self.fc1 = nn.Linear(task.input[0], 12)

    def features(self, x):
        return nn.functional.adaptive_avg_pool1d(torch.relu(self.fc1(x)), self.rep_dim)


def test_a_small_model_whose_columns_mean_something_else_at_another_width_is_refused(kit):
    federation(kit, small=Pooled, d1=4)
    with pytest.raises(
        ConfigError, match=r"method\.small: the representation of width 3 is not the beginning"
    ):
        federation(kit, small=Pooled, d1=[6, 3])


def test_a_function_must_give_one_number_and_what_is_below_zero_counts_as_zero(kit):
    game = federation(kit, rows={"a": range(0, 6)}, weight_small=lambda report: 1.2 - report["large"])
    game.round("a")
    before = game.part("a", "small")["head.weight"]
    assert game.state("a")["report/large"] > 1.2
    assert not game.round("a").failures
    assert torch.equal(game.part("a", "small")["head.weight"], before)
    assert game.state("a")["report/small"] == 0
    with pytest.raises(ConfigError, match="gives 3 numbers; return one"):
        weigh({"small": lambda report: torch.ones(3)}, {}, torch.device("cpu"))


def test_a_function_that_gives_no_number_later_is_named(kit):
    game = federation(kit, weight_small=lambda report: torch.sqrt(1.2 - report["large"]))
    failures = [reason for _ in range(3) for reason in _failures(game)]
    assert failures
    assert "look at what the functions of method.weight_* give" in failures[0]


def _failures(game):
    try:
        return game.round("a").failures.values()
    except RoundFailed as error:
        return [str(error)]


def test_tied_headers_must_be_linear(kit):
    with pytest.raises(ConfigError, match=r"tie_headers needs linear headers .*client b \(Bent\)"):
        federation(kit, models=[kit.Shallow, Bent, kit.Shallow], tie_headers=True)
    with pytest.raises(ConfigError, match=r"tie_headers needs linear headers .*the shared model"):
        federation(kit, small=Bent, tie_headers=True)


def test_a_small_model_without_slices_cannot_have_several_widths(kit):
    with pytest.raises(ConfigError, match=r"method\.small: the tensor .* only one of the widths"):
        federation(kit, small=kit.Narrow, d1=[4, 3])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"d1": 0}, r"method\.d1: give a whole number from 1"),
        ({"d1": []}, r"method\.d1: give a whole number from 1"),
        ({"d1": {"0": 1.5}}, r"method\.d1: give a whole number from 1"),
        ({"d1": "wide"}, r"method\.d1: give a whole number from 1"),
        ({"widths": [8, 4]}, r"method\.widths: the widths must grow"),
        ({"widths": [8, 8]}, r"method\.widths: the widths must grow"),
        ({"widths": [2, "a"]}, r"method\.widths"),
        ({"widths": [[1], [2]]}, r"method\.widths"),
        ({"d1": "auto", "tune": {"candidates": ["a", 2]}}, r"method\.tune\.candidates"),
        ({"mrl": "local_only", "weight_small": 5}, "weight_small does nothing with mrl: local_only"),
        ({"projector": "none", "lr": {"projector": 0.1}}, "nothing that lr.projector could train"),
        ({"weight_widths": math.inf}, r"method\.weight_widths"),
        ({"lr": {"small": math.inf}}, r"method\.lr\.small"),
        ({"mrl": "full", "tie_headers": True}, "goes with none of"),
        ({"mrl": "local_only", "global_header": False}, "goes with none of"),
        ({"tie_headers": True, "global_header": False}, "choose one"),
        ({"weight_small": [1]}, r"method\.weight_small: give a number from 0, a function"),
        ({"weight_large": -1}, r"method\.weight_large: give a number from 0, a function"),
        ({"weight_small": "math"}, r"method\.weight_small: 'math' names no function"),
        ({"weight_small": "math:tau"}, r"method\.weight_small: .*there is no function 'tau' in math"),
        ({"weight_small": "nowhere_at_all:f"}, r"method\.weight_small: nowhere_at_all cannot be imported"),
        ({"lr": {"header": 0.1}}, r"method\.lr\.header"),
        ({"lr": {"small": 0}}, r"method\.lr\.small"),
        ({"projector": "wide"}, r"method\.projector"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_cannot_be_are_told_by_their_name(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Experiment.make(
            partition={"kind": "iid", "clients": 2}, models="mlp-small", method={"name": "fedmrl", **options}
        )
