"""The named models: sizes from the papers' tables, shapes, gradients, names that meet across depths."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from potluck.core.model import Model
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models import ModelPool, build, names, register, registry

CIFAR10 = Task("classification", 10, (3, 32, 32))
CIFAR100 = Task("classification", 100, (3, 32, 32))
FASHION = Task("classification", 10, (1, 28, 28))
DIGITS = Task("classification", 10, (1, 8, 8))
VECTORS = Task("classification", 4, (13,))
NEWS = Task("text-classification", 20, (12,), vocabulary=50)

CNNS = ["cnn1", "cnn2", "cnn3", "cnn4", "cnn5"]
RESNETS = ["resnet10", "resnet14", "resnet18", "resnet22", "resnet26"]
SMALL = ["mlp-small", "mlp-large", "conv-small", "conv-large"]
TEXTS = ["text-mean", "text-conv"]

CNN_SIZES = {
    CIFAR10: [2_621_558, 1_815_142, 1_320_558, 1_060_358, 670_058],
    CIFAR100: [2_666_648, 1_860_232, 1_365_648, 1_105_448, 715_148],
}
SMALL_CNN_SIZES = {
    ("cnn5", CIFAR10): [465_658, 516_758, 567_858, 618_958, 670_058],
    ("cnn5", CIFAR100): [474_748, 534_848, 594_948, 655_048, 715_148],
    ("cnn1", CIFAR10): [1_817_158, 2_018_258, 2_219_358, 2_420_458, 2_621_558],
    ("cnn1", CIFAR100): [1_826_248, 2_036_348, 2_246_448, 2_456_548, 2_666_648],
}
RESNET_SIZES = [4_910_922, 10_812_234, 11_181_642, 17_082_954, 17_452_362]


def size(entry, task, rep_dim=None):
    pool = ModelPool([entry])
    return pool.parameters(pool.keys[0], task, rep_dim)


def inputs(task, samples=3):
    generator = Rng(0).generator()
    if task.kind == "text-classification":
        return torch.randint(1, task.vocabulary, (samples, *task.input), generator=generator)
    return torch.randn(samples, *task.input, generator=generator)


@pytest.mark.parametrize("task", [CIFAR10, CIFAR100], ids=["10", "100"])
def test_cnn_sizes(task):
    assert [size(name, task) for name in CNNS] == CNN_SIZES[task]


@pytest.mark.parametrize(("name", "task"), list(SMALL_CNN_SIZES))
def test_small_cnn_sizes(name, task):
    assert [size(name, task, width) for width in range(100, 501, 100)] == SMALL_CNN_SIZES[name, task]


def test_a_built_cnn_has_the_size_of_its_outline():
    model = build("cnn5", CIFAR10, rep_dim=100)
    assert sum(p.numel() for p in model.parameters()) == 465_658
    assert not list(model.buffers())


def test_resnet_sizes():
    sizes = [size(name, CIFAR10) for name in RESNETS]
    assert sizes == RESNET_SIZES
    assert round(sum(sizes) / 5 / 1e6, 3) == 12.288


@pytest.mark.parametrize(("task", "side"), [(CIFAR10, 8), (FASHION, 7)])
def test_resnet_parts_have_the_shapes_of_fedin(task, side):
    model = build("resnet10", task).eval()
    s_in = model.stem(inputs(task, 16))
    assert s_in.shape == (16, 64, side, side)
    assert model.body(s_in).shape == (16, 512)


def test_cifar_stem_keeps_the_resolution():
    model = build({"name": "resnet10", "stem": "cifar"}, CIFAR10).eval()
    assert model.stem(inputs(CIFAR10)).shape == (3, 64, 32, 32)
    assert model.conv1.kernel_size == (3, 3)


def test_a_narrow_resnet_is_narrow_throughout():
    model = build({"name": "resnet10", "width": 16}, CIFAR10).eval()
    stages = [14_528, 57_728, 230_144]  # 9ab + 9b² + ab + 6b from a to b = 2a channels, by hand
    assert sum(p.numel() for p in model.parameters()) == 2352 + 32 + 4672 + sum(stages) + 1290
    assert model.stem(inputs(CIFAR10)).shape == (3, 16, 8, 8)
    assert model.rep_dim == 128
    assert build({"name": "resnet50", "width": 8}, CIFAR10).features(inputs(CIFAR10)).shape == (3, 256)


def test_resnet_names_and_shapes_agree_across_depths():
    pool = ModelPool(RESNETS)
    signatures = [pool.signature(key, CIFAR10) for key in pool.keys]
    for signature in signatures:
        assert {"conv1.weight", "layer1.0.conv1.weight", "layer4.0.downsample.1.running_var"} < set(signature)
        assert signature.items() <= signatures[-1].items()
        assert signature["head.weight"] == (10, 512)


@pytest.mark.parametrize("pair", [("mlp-small", "mlp-large"), ("conv-small", "conv-large")])
def test_small_pairs_differ_in_depth_only(pair):
    pool = ModelPool(pair)
    first, second = (pool.signature(key, DIGITS) for key in pair)
    assert first.items() < second.items()


CASES = (
    [(name, Task("classification", 3, (3, 16, 21))) for name in CNNS]
    + [("cnn1", FASHION), ("cnn2", CIFAR10), ("cnn5", CIFAR100)]
    + [("resnet10", DIGITS), ("resnet10", CIFAR10), ("resnet14", FASHION)]
    + [(name, task) for name in SMALL for task in (DIGITS, FASHION, CIFAR100)]
    + [("mlp-small", VECTORS), ("mlp-large", VECTORS)]
    + [(name, NEWS) for name in TEXTS]
)


@pytest.mark.parametrize(("name", "task"), CASES)
@pytest.mark.parametrize("rep_dim", [None, 24])
def test_contract_and_gradients(name, task, rep_dim):
    with Rng(1).as_default():
        model = build(name, task, rep_dim)
    x = inputs(task)
    features = model.features(x)
    assert features.shape == (3, rep_dim or model.rep_dim)
    assert model.rep_dim == features.shape[1]
    assert model.head(features).shape == (3, task.classes)
    model(x).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    model.eval()
    torch.testing.assert_close(model(x), model.head(model.features(x)))
    if model.has_stem:
        torch.testing.assert_close(model.body(model.stem(x)), model.features(x))


def test_default_widths():
    assert {build(name, DIGITS).rep_dim for name in SMALL} == {64}
    assert {build(name, FASHION).rep_dim for name in CNNS} == {500}
    assert build("resnet10", DIGITS).rep_dim == 512


@pytest.mark.parametrize(
    ("adapter", "extra"), [("linear", 512 * 64 + 64), ("pool", 0), ("max-pool", 0)], ids=lambda v: str(v)
)
def test_resnet_adapters(adapter, extra):
    entry = {"name": "resnet10", "rep_dim": 64, "adapter": adapter}
    model = build(entry, DIGITS)
    assert (model.adapter, model.rep_dim) == (adapter, 64)
    assert size(entry, DIGITS) - size("resnet10", DIGITS) == extra - (512 - 64) * 10
    assert build({**entry, "rep_dim": 512}, DIGITS).adapter is None


def test_pool_adapter_is_the_mean_of_neighbouring_features():
    model = build({"name": "resnet10", "rep_dim": 256, "adapter": "pool"}, DIGITS).eval()
    native = build("resnet10", DIGITS).eval()
    native.load_state_dict({k: v for k, v in model.state_dict().items() if "head" not in k}, strict=False)
    x = inputs(DIGITS)
    torch.testing.assert_close(model.features(x), native.features(x).view(3, 256, 2).mean(2))


@pytest.mark.parametrize("name", TEXTS)
def test_padding_does_not_count(name):
    model = build(name, NEWS).eval()
    x = inputs(NEWS, 2)
    x[:, 5:] = 0
    longer = torch.cat([x, torch.zeros(2, 30, dtype=torch.long)], 1)
    torch.testing.assert_close(model.features(longer), model.features(x))
    assert model(torch.zeros_like(x)).isfinite().all()


def test_conv_large_is_the_one_with_batch_norm():
    normed = [n for n in SMALL if any(isinstance(m, nn.BatchNorm2d) for m in build(n, DIGITS).modules())]
    assert normed == ["conv-large"]


def test_initialisation_follows_the_default_generator():
    def weights(seed):
        with Rng(seed).as_default():
            return build("conv-small", DIGITS).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("name", ["conv-small", "mlp-small"])
def test_digits_can_be_learned(name):
    data = load_digits()
    x = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=Rng(0).generator())
    train, test = order[:1400], order[1400:]
    with Rng(0).as_default():
        model = build(name, DIGITS)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(8):
        for rows in train.split(50):
            optimiser.zero_grad()
            DIGITS.loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
    assert (model(x[test]).argmax(1) == y[test]).float().mean() > 0.9


def test_names_are_registered():
    assert set(CNNS + RESNETS + SMALL + TEXTS) <= set(names())


@pytest.mark.parametrize(
    ("entry", "task", "sentence"),
    [
        ("cnn6", CIFAR10, r"client 7: unknown model 'cnn6'; did you mean 'cnn\d'\?"),
        ("cnn", CIFAR10, "client 7: 'cnn' is a pool, one model is needed here: cnn1, cnn2, cnn3, cnn4, cnn5"),
        ("cnn1", DIGITS, r"client 7: cnn1 takes images of 16×16 or larger, the task's samples have shape "
         r"\(1, 8, 8\); models that fit: conv-large, conv-small, "),
        ("resnet18", NEWS, "resnet18 takes images, .* models that fit: .*text-conv, text-mean$"),
        ("text-mean", DIGITS, "text-mean takes token ids"),
        ("conv-small", VECTORS, "models that fit: mlp-large, mlp-small$"),
        ("text-mean", Task("text-classification", 2, (5,)), "client 7: .*needs a task with a vocabulary"),
        ({"name": "resnet10", "stem": "cifer"}, DIGITS, "unknown stem 'cifer'.*did you mean 'cifar'"),
        ({"name": "resnet10", "width": 0}, DIGITS, "client 7: width is 0; give a whole"),
        ({"name": "mlp-small", "scale": 0}, DIGITS, "client 7: scale is 0; give a number above 0"),
        ({"name": "resnet10", "stemm": "cifar"}, DIGITS, "resnet10 has no option 'stemm'; did you mean 'stem'"),
        ({"name": "resnet10", "adapter": "poll"}, DIGITS, "unknown adapter 'poll'; did you mean 'pool'"),
        ({"name": "cnn1", "adapter": "pool"}, CIFAR10, "cnn1 has no option 'adapter'"),
        ({"name": "cnn1", "rep_dim": 0}, CIFAR10, "client 7: rep_dim is 0; give a whole number from 1 on"),
        ({"names": "cnn1"}, CIFAR10, "needs one of 'name' and 'model'"),
        (3, CIFAR10, "client 7: a model is a name, a mapping, a callable or a module, not 3"),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(entry, task, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        build(entry, task, who="client 7")
    assert "\n" not in str(caught.value)


def test_a_scale_is_the_share_of_every_width_rounded_up():
    narrow = build({"name": "cnn3", "scale": 0.3}, CIFAR10)
    widths = [narrow.conv1, narrow.conv2, narrow.fc1, narrow.fc2]
    assert [len(layer.weight) for layer in widths] == [5, 10, 300, 150]
    assert build({"name": "mlp-small", "scale": 0.5}, DIGITS).rep_dim == 32
    assert build({"name": "mlp-small", "scale": 0.5}, DIGITS, rep_dim=9).rep_dim == 9
    assert build({"name": "conv-large", "scale": 2}, DIGITS).rep_dim == 128
    vit = build({"name": "vit-b16", "scale": 0.05}, DIGITS)
    assert vit.layers[0].attention.inputs.weight.shape == (3 * 12 * 4, 12 * 4)


def test_register_and_its_refusal(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))

    @register("test-only-linear")
    def linear(input, classes):
        return nn.Linear(input[0], classes)

    register("test-only-linear")(linear)
    model = build("test-only-linear", VECTORS, rep_dim=7)
    assert isinstance(model, Model)
    assert model.features(inputs(VECTORS)).shape == (3, 7)
    assert model(inputs(VECTORS)).shape == (3, 4)
    with pytest.raises(ModelError, match="'cnn1' is already registered"):
        register("cnn1")(linear)
