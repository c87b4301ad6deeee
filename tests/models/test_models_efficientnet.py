"""EfficientNet-Lite: sizes, padding, scale and size of images, weights from a file and files that do not fit."""

import os
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.data.registry import load
from potluck.errors import ModelError
from potluck.models import ModelPool, build
from potluck.models.zoo.efficientnet import LITE, Block, Unit

ROOT = Path(__file__).parents[2]
IMAGENET = Task("classification", 1000, (3, 224, 224))
CIFAR10 = Task("classification", 10, (3, 32, 32))
FASHION = Task("classification", 10, (1, 28, 28))
SIZES = {
    "efficientnet-lite0": 4_652_008,
    "efficientnet-lite1": 5_416_680,
    "efficientnet-lite2": 6_092_072,
}
SHELF = Path(os.environ.get("POTLUCK_DATA") or ROOT.parent / "shared" / "data")
WEIGHTS = os.environ.get("POTLUCK_WEIGHTS", "")


def lite0(task=CIFAR10, **options):
    with Rng(0).as_default():
        return build({"name": "efficientnet-lite0", **options}, task).eval()


def images(task=CIFAR10, samples=2):
    return torch.randn(samples, *task.input, generator=Rng(1).generator())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A network with other values than a new one, in a folder as the converter writes it."""
    folder = tmp_path_factory.mktemp("weights")
    with Rng(5).as_default():
        model = build("efficientnet-lite0", IMAGENET)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    save_file(model.state_dict(), folder / "efficientnet-lite0.safetensors")
    return folder, model.eval()


@pytest.mark.parametrize("name", SIZES)
def test_sizes_with_the_layer_of_imagenet(name):
    assert ModelPool(name).parameters(name, IMAGENET) == SIZES[name]


def test_strides_of_lite0():
    with torch.device("meta"):
        model = build("efficientnet-lite0", CIFAR10, check=False)
    blocks = [part for part in model.blocks if isinstance(part, Block)]
    assert [block.depthwise.stride for block in blocks] == [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    norms = [part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    assert {norm.eps for norm in norms} == {1e-3}


@pytest.mark.parametrize(
    ("length", "size", "stride", "before", "after"),
    [(8, 3, 2, 0, 1), (7, 3, 2, 1, 1), (8, 5, 2, 1, 2), (7, 5, 2, 2, 2), (8, 5, 1, 2, 2), (1, 3, 2, 1, 1)],
)
def test_padding_is_tensorflows(length, size, stride, before, after):
    with Rng(2).as_default():
        unit = Unit(1, 2, size, stride, linear=True).eval()
    unit.norm.eps = 0.0
    x = torch.randn(1, 1, length, length, generator=Rng(3).generator())
    padded = F.pad(x, (before, after, before, after))
    torch.testing.assert_close(unit(x), F.conv2d(padded, unit.conv.weight, stride=stride))
    assert unit(x).shape[-1] == -(-length // stride)


@pytest.mark.parametrize("name", LITE)
@pytest.mark.parametrize("rep_dim", [None, 16])
def test_contract_and_gradients(name, rep_dim):
    with Rng(0).as_default():
        model = build(name, FASHION, rep_dim)
    x = images(FASHION, 4)
    features = model.features(x)
    assert features.shape == (4, rep_dim or 1280)
    model(x).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_a_grey_image_is_one_of_three_equal_colours():
    grey, colour = lite0(FASHION), lite0(Task("classification", 10, (3, 28, 28)))
    x = images(FASHION)
    torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)))


def test_side_enlarges_the_image():
    x = images()
    model = lite0(side=96)
    assert model.stem(x).shape == (2, 32, 48, 48)
    larger = F.interpolate(x, (96, 96), mode="bilinear")
    torch.testing.assert_close(model(x), lite0(Task("classification", 10, (3, 96, 96)))(larger))
    long = Task("classification", 10, (3, 20, 30))
    assert lite0(long, side=40).stem(images(long)).shape == (2, 32, 20, 30)


def test_mean_and_std_change_the_scale_of_the_input():
    raw = torch.rand(2, 3, 32, 32, generator=Rng(4).generator())
    mean, std = (0.4914, 0.4822, 0.4465), (0.2, 0.3, 0.4)
    normalised = (raw - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    wanted = lite0()((raw * 255 - 127) / 128)
    torch.testing.assert_close(lite0(mean=mean, std=std)(normalised), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lite0(mean=0.0, std=1.0)(raw), wanted, rtol=1e-4, atol=1e-5)
    assert not [name for name in lite0(mean=0.0, std=1.0).state_dict() if "rescale" in name]


def test_weights_from_a_file_or_a_folder(saved):
    folder, source = saved
    x = images()
    for path in (folder, folder / "efficientnet-lite0.safetensors"):
        model = lite0(weights=str(path))
        torch.testing.assert_close(model.features(x), source.features(x))
        assert model.head.weight.shape == (10, 1280)
    narrow = lite0(weights=str(folder), rep_dim=8)
    torch.testing.assert_close(narrow.features(x), narrow.resize(source.features(x)))
    torch.testing.assert_close(lite0(weights=str(folder)).head.weight, lite0().head.weight)


def test_the_head_is_taken_over_where_it_fits(saved):
    folder, source = saved
    model = lite0(Task("classification", 1000, (3, 32, 32)), weights=str(folder))
    torch.testing.assert_close(model(images()), source(images()))


def test_an_outline_does_not_need_the_values(saved):
    pool = ModelPool({"name": "efficientnet-lite0", "weights": str(saved[0])})
    assert pool.parameters(pool.keys[0], CIFAR10) == SIZES["efficientnet-lite0"] - 990 * 1281


def test_files_that_do_not_fit(saved, tmp_path):
    state = load_file(saved[0] / "efficientnet-lite0.safetensors")
    name = "blocks.3.depthwise.conv.weight"
    save_file({key: value for key, value in state.items() if key != name}, tmp_path / "missing.safetensors")
    save_file(state | {name: torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for file, sentence in {
        "missing": f"do not fit efficientnet-lite0: '{name}' is missing",
        "other": r"has shape \(1,\), expected \(144, 1, 5, 5\)",
        "text": "not a safetensors file",
        "absent": "the weights of efficientnet-lite0 are not at",
    }.items():
        with pytest.raises(ModelError, match=sentence):
            lite0(weights=str(tmp_path / f"{file}.safetensors"))
    with pytest.raises(ModelError, match="efficientnet-lite1 are not at"):
        build({"name": "efficientnet-lite1", "weights": str(saved[0])}, CIFAR10)
    with pytest.raises(ModelError, match=r"'first.conv.weight' has shape"):
        lite0(Task("classification", 10, (4, 32, 32)), weights=str(saved[0]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"side": 16}, "side is 16; give a whole number from 32"),
        ({"side": 64.0}, "side is 64.0"),
        ({"side": 1025}, "side is 1025; give at most 1,024"),
        ({"mean": 0.5}, "mean and std .* give both"),
        ({"mean": [0.5, 0.5], "std": 0.5}, "mean has 2 values, the images have 3 channels"),
        ({"weight": "x"}, "did you mean 'weights'"),
    ],
)
def test_bad_options_are_one_sentence(options, sentence):
    with pytest.raises(ModelError, match=sentence):
        lite0(**options)


PUBLISHED = {
    "first.conv": "_conv_stem",
    "first.norm": "_bn0",
    "last.conv": "_conv_head",
    "last.norm": "_bn1",
    "head": "_fc",
    "expand.conv": "_expand_conv",
    "expand.norm": "_bn0",
    "depthwise.conv": "_depthwise_conv",
    "depthwise.norm": "_bn1",
    "project.conv": "_project_conv",
    "project.norm": "_bn2",
}


def published(name):
    """What a tensor is called in the old files."""
    layer, _, leaf = name.rpartition(".")
    if not layer.startswith("blocks."):
        return f"{PUBLISHED[layer]}.{leaf}"
    _, number, inside = layer.split(".", 2)
    return f"_blocks.{number}.{PUBLISHED[inside]}.{leaf}"


@pytest.fixture(scope="module")
def convert():
    return runpy.run_path(str(ROOT / "tools" / "convert_efficientnet.py"))["convert"]


def test_the_converter_renames_every_tensor(saved, convert, tmp_path):
    state = saved[1].state_dict()
    old = {published(name): value for name, value in state.items()}
    torch.save(old, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    file = convert(tmp_path / "old.pth", tmp_path / "new")
    assert file == tmp_path / "new" / "efficientnet-lite0.safetensors"
    written = load_file(file)
    assert written.keys() == state.keys()
    assert all(torch.equal(written[key], value) for key, value in state.items())


def test_the_converter_refuses_another_network(convert, tmp_path):
    torch.save({"conv1.weight": torch.zeros(2)}, tmp_path / "old.pth")
    with pytest.raises(ModelError, match=r"'conv1.weight' is no tensor of an EfficientNet-Lite"):
        convert(tmp_path / "old.pth", tmp_path)
    torch.save({"_fc.bias": torch.zeros(2)}, tmp_path / "old.pth")
    with pytest.raises(ModelError, match=r"those of none of efficientnet-lite0"):
        convert(tmp_path / "old.pth", tmp_path)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS, reason="POTLUCK_WEIGHTS names no folder with published weights")
@pytest.mark.parametrize("name", LITE)
def test_a_linear_probe_on_published_weights(name):
    """A wrong layer, padding or scale costs far more than chance does on 600 images."""
    if not (SHELF / "cifar10").is_dir():
        pytest.skip("cifar10 is not in the data folder")
    dataset = load("cifar10", SHELF)
    options = {"weights": WEIGHTS, "side": 64, "mean": 0.0, "std": 1.0}
    model = build({"name": name, **options}, dataset.task).eval()
    with torch.no_grad():
        z = torch.cat([model.features(part.float() / 255) for part in dataset.x[:600].split(50)]).double()
    z = (z - z.mean(0)) / z.std(0)
    train, test, y = z[:400], z[400:], dataset.y[:600]
    dual = torch.linalg.solve(train @ train.T + 1e3 * torch.eye(400), F.one_hot(y[:400], 10).double() - 0.1)
    accuracy = ((test @ train.T @ dual).argmax(1) == y[400:]).double().mean()
    assert accuracy > 0.5
