"""FedRE's ten architectures: published sizes, any image, widths, training. Large ones are built without memory."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.data import from_arrays
from potluck.errors import ModelError
from potluck.models import POOLS, build, check_model
from potluck.models.parts import FeaturePool
from potluck.models.zoo.cnn import FedAvgCNN
from potluck.models.zoo.googlenet import GoogLeNet, Inception
from potluck.models.zoo.mobilenet import MobileNetV2
from potluck.models.zoo.resnet import Bottleneck, ResNet
from potluck.models.zoo.transformer import EncoderLayer, VisionTransformer
from potluck.testing.bench import Bench
from potluck.testing.contract import a_captured_step_is_right

HTM10 = POOLS["htm10"]
IMAGENET = Task("classification", 1000, (3, 224, 224))
CIFAR10 = Task("classification", 10, (3, 32, 32))
CIFAR100 = Task("classification", 100, (3, 32, 32))

# Parameters, and billions of multiplications in one pass at 224×224 with 1000 classes, as torchvision lists them.
PUBLISHED = {
    "googlenet": (6_624_904, 1.498),
    "mobilenet-v2": (3_504_872, 0.301),
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.514),
    "vit-b16": (86_567_656, 17.564),
    "vit-b32": (88_224_232, 4.409),
}
WIDTHS = dict.fromkeys(HTM10, 512) | {
    "googlenet": 1024,
    "mobilenet-v2": 1280,
    "resnet50": 2048,
    "resnet101": 2048,
    "resnet152": 2048,
    "vit-b16": 768,
    "vit-b32": 768,
}


def bottleneck(task, rep_dim=None, adapter="linear"):
    """The blocks of ResNet-50 to 152, one of each width."""
    return ResNet(task, Bottleneck, (1, 1, 1, 1), rep_dim, adapter=adapter)


def vit16(task, rep_dim=None, adapter="linear"):
    """ViT-B/16 with one of its twelve layers."""
    return VisionTransformer(task, 16, rep_dim, adapter, layers=1)


SMALL = {
    "fedavg-cnn": FedAvgCNN,
    "googlenet": GoogLeNet,
    "mobilenet-v2": MobileNetV2,
    "bottleneck": bottleneck,
    "vit": vit16,
}


def weightless(name, task, rep_dim=None, **options):
    with torch.device("meta"):
        return build(name, task, rep_dim, check=False, **options).eval()


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def images(task, samples=3):
    return torch.randn(samples, *task.input, generator=Rng(0).generator())


def made(builder, task, **options):
    with Rng(1).as_default():
        return builder(task, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_size_and_cost_are_the_published_ones(name):
    model = weightless(name, IMAGENET)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, *IMAGENET.input, device="meta"))
    assert (size(model), round(counter.get_total_flops() / 2e9, 3)) == PUBLISHED[name]


def test_fedavg_cnn_has_the_sizes_fedre_counts():
    model = weightless("fedavg-cnn", CIFAR100)
    assert size(model) - size(model.head) == 873_408
    assert model.fc1.in_features == 1600
    assert size(weightless("fedavg-cnn", CIFAR100, 128, adapter="pool")) == 886_308
    assert weightless("fedavg-cnn", Task("classification", 200, (3, 64, 64))).fc1.in_features == 10_816


@pytest.mark.parametrize(
    "name", ["fedavg-cnn", "googlenet", "mobilenet-v2", "resnet50", "vit-b16", "vit-b32"]
)
@pytest.mark.parametrize("shape", [(1, 16, 16), (1, 28, 28), (3, 37, 50), (3, 64, 64)], ids=str)
def test_any_image_will_do(name, shape):
    model = weightless(name, Task("classification", 7, shape))
    with torch.no_grad():
        features = model.features(torch.empty(2, *shape, device="meta"))
    assert features.shape == (2, WIDTHS[name])


@pytest.mark.parametrize(("name", "smallest"), [("fedavg-cnn", 16), ("googlenet", 15)])
def test_images_that_would_vanish_are_refused(name, smallest):
    weightless(name, Task("classification", 2, (1, smallest, smallest)))(
        torch.empty(2, 1, smallest, smallest, device="meta")
    )
    with pytest.raises(ModelError, match=f"{name} takes images of {smallest}×{smallest} or larger"):
        build(name, Task("classification", 2, (1, smallest - 1, 40)))


@pytest.mark.parametrize("name", HTM10)
@pytest.mark.parametrize("adapter", ["linear", "pool", "max-pool"])
def test_every_width_comes_to_512(name, adapter):
    model = weightless(name, CIFAR10, 512, adapter=adapter)
    assert model.resize(torch.empty(2, WIDTHS[name], device="meta")).shape == (2, 512)
    assert {key: tuple(value.shape) for key, value in model.head.state_dict().items()} == {
        "weight": (10, 512),
        "bias": (10,),
    }
    wanted = nn.Identity if WIDTHS[name] == 512 else nn.Linear if adapter == "linear" else FeaturePool
    assert isinstance(model.resize, wanted)
    assert model.adapter == (None if WIDTHS[name] == 512 else adapter)


@pytest.mark.parametrize("name", SMALL)
def test_contract_and_gradients(name):
    model = made(SMALL[name], CIFAR10, rep_dim=512, adapter="pool")
    check_model(model, CIFAR10)
    model(images(CIFAR10)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_and_half_precision(name):
    model = made(SMALL[name], CIFAR10, rep_dim=512, adapter="pool").eval()
    x = images(CIFAR10)
    plain = model.features(x)
    model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model.features(x), plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())
    with torch.autocast("cpu", torch.bfloat16):
        scores = model.train()(x)
    assert scores.dtype == torch.bfloat16
    scores.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["googlenet", "mobilenet-v2"])
def test_dropout_falls_on_the_features_of_a_training_pass(name):
    model = made(SMALL[name], CIFAR10)
    x = images(CIFAR10, 8)
    with Rng(2).as_default():
        dropped = model.features(x)
    model.dropout.p = 0.0
    kept = model.features(x)
    left = dropped[kept > 0]
    assert (left == 0).float().mean().item() == pytest.approx(0.2, abs=0.03)
    torch.testing.assert_close(left[left > 0], kept[kept > 0][left > 0] / 0.8)
    assert made(SMALL[name], CIFAR10, dropout=0.1).dropout.p == 0.1


def test_an_encoder_layer_is_torch_s_own():
    ours = made(lambda _: EncoderLayer(), CIFAR10)
    theirs = nn.TransformerEncoderLayer(
        768, 12, 3072, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    names = {
        "norm1": "norm1", "norm2": "norm2", "mlp.0": "linear1", "mlp.2": "linear2",
        "attention.inputs.": "self_attn.in_proj_", "attention.output": "self_attn.out_proj",
    }  # fmt: skip
    state = {}
    for key, value in ours.state_dict().items():
        old = next(old for old in names if key.startswith(old))
        state[key.replace(old, names[old], 1)] = value
    theirs.load_state_dict(state)
    x = torch.randn(2, 5, 768, generator=Rng(0).generator(), dtype=torch.float64)
    torch.testing.assert_close(ours.double()(x), theirs.double()(x))


def test_a_small_image_is_padded_evenly():
    small, large = (Task("classification", 10, (3, side, side)) for side in (28, 32))
    model = made(vit16, small).eval()
    padded = vit16(large).eval()
    padded.load_state_dict(model.state_dict())
    x = images(small).double()
    torch.testing.assert_close(model.double()(x), padded.double()(nn.functional.pad(x, (2, 2, 2, 2))))


def test_first_weights_of_each_family():
    googlenet, mobilenet = made(GoogLeNet, CIFAR10), made(MobileNetV2, CIFAR10)
    residual, transformer = made(bottleneck, CIFAR10), made(vit16, CIFAR10)
    near = {"rel": 0.05}
    assert googlenet.conv3[0].weight.std().item() == pytest.approx(0.01, **near)
    assert mobilenet.last[0].weight.std().item() == pytest.approx((2 / 1280) ** 0.5, **near)
    assert residual.layer4[0].conv2.weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, **near)
    assert transformer.patches.weight.std().item() == pytest.approx((1 / 768) ** 0.5, **near)
    assert transformer.positions.std().item() == pytest.approx(0.02, rel=0.1)
    assert transformer.layers[0].mlp[0].weight.abs().max().item() == pytest.approx((6 / 3840) ** 0.5, **near)
    assert not transformer.token.any()
    assert not transformer.patches.bias.any()
    for model in (googlenet, mobilenet, residual, transformer):
        assert model.head.weight.abs().max().item() == pytest.approx(model.rep_dim**-0.5, **near)


def short_mobilenet(task, rep_dim=None, adapter="linear"):
    """MobileNetV2 with three of its seventeen blocks."""
    model = MobileNetV2(task, rep_dim, adapter)
    model.blocks = model.blocks[:3]
    model.last[0] = nn.Conv2d(24, 1280, 1, bias=False)
    return model


def short_googlenet(task, rep_dim=None, adapter="linear"):
    """GoogLeNet with two of its nine inception modules."""
    model = GoogLeNet(task, rep_dim, adapter)
    model.stage3, model.stage4 = model.stage3[:1], nn.Identity()
    model.stage5 = Inception(256, 384, (192, 384), (48, 128), 128)
    return model


def test_they_train_and_their_steps_can_be_captured():
    """Clients of 32×32 images with batch norm, dropout and attention; the last one has a single sample.

    Deep networks are cut short: with batch norm over a few values in dozens of layers the whole MobileNetV2 is
    chaotic. A change of its first weights by 1e-14 grows about 10⁵ times in every round.
    """
    models = {"0": short_mobilenet, "1": vit16, "2": "fedavg-cnn", "3": short_googlenet}
    training = {"batch_size": 8, "optimizer": {"lr": 0.01}}
    bench = Bench("fedproto", models={"pool": models, "rep_dim": 32}, training=training)
    large = bench.data.x.float().repeat_interleave(4, 2).repeat_interleave(4, 3)
    bench.data = from_arrays(large.numpy(), bench.data.y.numpy(), name="32×32")
    a_captured_step_is_right(bench)
