"""Modules a user brings: split, adapted, refused, and never changed by it."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.core.model import Model
from potluck.core.rng import Rng
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models import FeaturePool, adapt, build, check_model
from potluck.models.unwrap import own_module

TASK = Task("classification", 10, (3, 8, 8))
WHO = "client 7"


def inputs(samples=3):
    return torch.randn(samples, *TASK.input, generator=Rng(0).generator())


class Net(nn.Module):
    """Laid out like a torchvision network: parts in a row, a head called fc, batch norm inside."""

    def __init__(self, classes=10, width=12):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU()
        self.layer1 = nn.Conv2d(6, width, 3, padding=1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def trunk(self, x):
        return torch.flatten(self.avgpool(self.layer1(self.relu(self.bn1(self.conv1(x))))), 1)

    def forward(self, x):
        return self.fc(self.trunk(x))


class Softmax(Net):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class Unbatched(Net):
    """Gives the scores of the first sample alone."""

    def forward(self, x):
        return super().forward(x)[0]


class Faulty(Net):
    """Hands an array on to its last layer."""

    def forward(self, x):
        return self.fc(self.trunk(x).numpy())


class Sliced(Net):
    """Shows its post-processing only where the width differs from the number of classes."""

    def forward(self, x):
        return self.fc(self.trunk(x))[:, :10]


class Clamped(Net):
    """Leaves small scores as they are."""

    def forward(self, x):
        return self.fc(self.trunk(x)).clamp(min=-1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(4 * 36, 10))

    def forward(self, x):
        return self.classifier(self.body(x).flatten(1))


class TwoLinears(nn.Module):
    """The last linear layer by registration is not the one that gives the output."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 10)
        self.first = nn.Linear(192, 16)

    def forward(self, x):
        return self.out(self.first(x.flatten(1)))


def sequential():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def snapshot(module):
    return copy.deepcopy(module.state_dict()), [part.training for part in module.modules()]


def same_state(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(
    ("make", "head", "found", "width"),
    [
        (Net, "fc", "fc", 12),
        (Net, None, "fc", 12),
        (Classifier, "classifier", "classifier", 144),
        (Classifier, None, "classifier.1", 144),
        (TwoLinears, None, "out", 16),
        (sequential, None, "4", 144),
        (sequential, "4", "4", 144),
        (lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(192, 10))), None, "1.0", 192),
    ],
)
def test_split_computes_what_the_module_computes(make, head, found, width):
    module = make()
    before = snapshot(module)
    model = adapt(module, head, task=TASK)
    assert (model.head_path, model.rep_dim, model.adapter) == (found, width, None)
    x = inputs()
    module.eval()
    model.eval()
    torch.testing.assert_close(model(x), module(x))
    torch.testing.assert_close(model.head(model.features(x)), module(x))
    module.train()
    assert same_state(before[0], module.state_dict())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in module.parameters())


def test_a_lone_linear_layer_is_a_model_too():
    task = Task("classification", 4, (13,))
    model = adapt(nn.Linear(13, 4), task=task)
    assert model.rep_dim == 13
    assert model(torch.ones(2, 13)).shape == (2, 4)


def test_probing_leaves_no_trace():
    module = sequential()
    module[1].eval()
    state, modes = snapshot(module)
    random_state = torch.get_rng_state()
    model = adapt(module, task=TASK)
    check_model(model, TASK)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert same_state(state, module.state_dict())
    assert [part.training for part in module.modules()] == modes
    assert [part.training for part in model.trunk.modules()][:5] == modes[:5]
    assert same_state(
        {k: v for k, v in state.items() if not k.startswith("4.")},
        {k.removeprefix("trunk."): v for k, v in model.state_dict().items() if not k.startswith("head.")},
    )


class Counter(nn.Module):
    """Changes a buffer and draws random numbers even in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 10)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.fc(F.dropout(x.flatten(1)))


def test_even_a_restless_module_keeps_its_buffers():
    module = Counter()
    random_state = torch.get_rng_state()
    model = adapt(module, task=TASK)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert float(model.trunk.passes) == float(module.passes) == 0


@pytest.mark.parametrize(
    ("adapter", "kind"), [("linear", nn.Linear), ("pool", FeaturePool), ("max-pool", FeaturePool)]
)
def test_another_width_brings_adapter_and_new_head(adapter, kind):
    module = Net()
    model = adapt(module, rep_dim=5, task=TASK, adapter=adapter)
    assert model.adapter == adapter
    assert isinstance(model.resize, kind)
    assert model.head.weight.shape == (10, 5)
    model(inputs()).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in module.parameters())
    assert adapt(module, rep_dim=12, task=TASK, adapter=adapter).adapter is None


@settings(deadline=None, max_examples=30)
@given(native=st.integers(1, 40), width=st.integers(1, 40))
def test_feature_pool_keeps_the_range_of_each_row(native, width):
    features = torch.randn(3, native, generator=Rng(native).generator())
    mean, largest = FeaturePool(width)(features), FeaturePool(width, largest=True)(features)
    assert mean.shape == largest.shape == (3, width)
    assert (mean <= largest + 1e-6).all()
    assert torch.equal(largest.amax(1), features.amax(1))


def test_new_head_only_when_asked_for():
    with pytest.raises(ModelError, match="client 7: the head gives 8 scores, the task has 10 classes"):
        adapt(Net(classes=8), task=TASK, who=WHO)
    assert adapt(Net(classes=8), task=TASK, classes=10).head.weight.shape == (10, 12)
    assert adapt(Net(classes=8), rep_dim=5, task=TASK).head.weight.shape == (10, 5)
    with pytest.raises(ModelError, match="classes=8 was asked for, the task has 10 classes"):
        adapt(Net(), task=TASK, classes=8)


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        (Net(), {"head": "fcc"}, "client 7: layer 'fcc' not found in Net; did you mean 'fc'"),
        (Net(), {"head": "zzz"}, "client 7: layer 'zzz' not found in Net; known: avgpool, bn1, conv1, fc,"),
        (Net(), {"head": "fc", "stem": "conv2"}, "layer 'conv2' not found in Net; did you mean 'conv1'"),
        (Softmax(), {"head": "fc"}, r"client 7: Softmax changes the scores after layer 'fc' \(a softmax"),
        (Softmax(), {}, "client 7: no linear layer of Softmax gives its output; name the last layer with head="),
        (Sliced(), {"head": "fc"}, "Sliced changes the scores after layer 'fc'"),
        (Clamped(), {}, "Clamped changes the scores after layer 'fc'"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.Softmax(1)), {}, "no linear layer of Sequential"),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.ReLU()), {"head": "1"}, "changes the scores after"),
        (nn.Sequential(nn.Flatten(), nn.Linear(99, 10)), {}, "layer '1' of Sequential failed on .*; build it for"),
        (Faulty(), {}, r"layer 'fc' of Faulty failed .*: TypeError: .*ndarray; correct its forward\(x\)"),
        (Unbatched(), {}, r"Unbatched gave shape \(10,\) for a batch of 2, expected \(2, 10\); return that"),
        (nn.Sequential(nn.Conv2d(3, 10, 8)), {}, "Sequential has no linear layer; name its last layer with head="),
        (Net(), {"head": "relu"}, "client 7: Net changes the scores after layer 'relu'"),
        (Net(), {"stem": "conv1", "body": ["layer1", "avgpool"]}, r"body\(stem\(x\)\) differs from features"),
        (Net(), {"body": "layer1"}, "client 7: stem= names no layer"),
        (Net(), {"adapter": "lines"}, "client 7: unknown adapter 'lines'; did you mean 'linear'"),
        (Net(), {"rep_dim": -1}, "client 7: rep_dim is -1; give a whole number from 1 on"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), {}, "Sequential has lazy layers"),
    ],
)  # fmt: skip
def test_refusals_name_client_layer_and_shape(module, options, sentence):
    with pytest.raises(ModelError, match=sentence) as caught:
        adapt(module, task=TASK, who=WHO, **options)
    assert "\n" not in str(caught.value)


def test_a_head_that_is_used_twice_or_never_is_refused():
    class Twice(Net):
        def forward(self, x):
            return self.fc(self.trunk(x)) + 0 * self.fc(self.trunk(x))

    class Never(Net):
        def forward(self, x):
            return F.linear(self.trunk(x), self.fc.weight)

    with pytest.raises(ModelError, match="layer 'fc' ran 2 times in one pass of Twice, expected once"):
        adapt(Twice(), "fc", task=TASK)
    with pytest.raises(ModelError, match="layer 'fc' ran 0 times in one pass of Never, expected once"):
        adapt(Never(), "fc", task=TASK)


def test_a_module_that_gives_no_tensor_is_refused():
    class Pair(Net):
        def forward(self, x):
            return super().forward(x), None

    with pytest.raises(ModelError, match="Pair gave a tuple, expected one tensor"):
        adapt(Pair(), "fc", task=TASK)


@pytest.mark.parametrize("body", [None, ["relu", "layer1", "avgpool"]])
def test_stem_and_body_by_name(body):
    model = adapt(Net(), rep_dim=5, task=TASK, stem=["conv1", "bn1"], body=body).eval()
    x = inputs()
    assert model.has_stem
    assert model.stem(x).shape == (3, 6, 8, 8)
    torch.testing.assert_close(model.body(model.stem(x)), model.features(x))


def test_without_names_there_is_no_stem():
    model = adapt(Net(), task=TASK)
    assert not model.has_stem
    with pytest.raises(ModelError, match=r"Net has no stem\(x\) and body\(s\)"):
        model.stem(inputs())


def test_without_a_task_shapes_are_checked_when_built():
    model = adapt(Net(), "fc", rep_dim=5)
    assert model.head.weight.shape == (10, 5)
    assert build(model, TASK).rep_dim == 5
    late = adapt(Softmax(), "fc")
    with pytest.raises(ModelError, match="client 7: Softmax changes the scores after layer 'fc'"):
        build(late, TASK, who=WHO)
    with pytest.raises(ModelError, match="client 7: layer 'conv1' of Net failed on a batch"):
        build(model, Task("classification", 10, (1, 8, 8)), who=WHO)


class Wrong(Model):
    def __init__(self, rep_dim=512, classes=10, value=1.0):
        super().__init__()
        self.rep_dim = rep_dim
        self.value = value
        self.head = nn.Linear(768, classes)

    def features(self, x):
        return torch.full((len(x), 768), self.value)


class Probabilities(Wrong):
    def forward(self, x):
        return super().forward(x).softmax(1)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Wrong(), r"client 7: features\(\) gave \(2, 768\), expected \(2, 512\)"),
        (Wrong(768, 8), "client 7: the head gives 8 scores, the task has 10 classes"),
        (Wrong(768, 10, float("nan")), r"client 7: features\(\) gave values that are not finite"),
        (Probabilities(768), r"client 7: forward\(x\) differs from head\(features\(x\)\) in Probabilities"),
        (Model(), r"client 7: Model must set rep_dim \(a whole number\) and head"),
    ],
)
def test_probe_says_what_is_wrong_with_a_model(model, sentence):
    with pytest.raises(ModelError, match=sentence):
        check_model(model, TASK, WHO)
    with pytest.raises(ModelError, match=sentence):
        build(model, TASK, who=WHO)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Wrong(), r"client 7: features\(\) of Wrong gave 768 columns, expected 512"),
        (Probabilities(768), "client 7: Probabilities changes the scores after layer 'head'"),
    ],
)
def test_a_wrong_model_is_not_hidden_by_an_adapter(model, sentence):
    with pytest.raises(ModelError, match=sentence):
        build({"model": model, "adapter": "pool"}, TASK, rep_dim=64, who=WHO)


def test_a_model_keeps_its_stem_behind_an_adapter():
    digits = Task("classification", 10, (1, 8, 8))
    native = build("conv-small", digits)
    model = build(native, digits, rep_dim=9)
    x = torch.randn(2, 1, 8, 8, generator=Rng(0).generator())
    assert (model.rep_dim, model.adapter, model.has_stem) == (9, "linear", True)
    torch.testing.assert_close(model.stem(x), native.stem(x))
    torch.testing.assert_close(model.body(model.stem(x)), model.features(x))
    assert type(adapt(native, task=digits)) is type(native)


class Sized(Net):
    """Takes what `build` offers, and an option of its own."""

    def __init__(self, classes, rep_dim=12, *, input=(1,), slope=0.0):
        super().__init__(classes, rep_dim)
        self.given = (input, slope)


@pytest.mark.parametrize(
    ("entry", "rep_dim", "width", "adapter"),
    [
        (Net, None, 12, None),
        (Net, 7, 7, "linear"),
        (Sized, 7, 7, None),
        (lambda: Net(), 7, 7, "linear"),
        (lambda task: Net(task.classes), None, 12, None),
        (partial(Net, width=9), None, 9, None),
        ({"model": Net, "adapter": "pool", "rep_dim": 6}, None, 6, "pool"),
        ({"model": Net, "rep_dim": 6}, 7, 7, "linear"),
        ({"model": Net(), "head": "fc"}, None, 12, None),
        ({"model": Net, "width": 20}, None, 20, None),
    ],
)
def test_build_from_callables_and_instances(entry, rep_dim, width, adapter):
    model = build(entry, TASK, rep_dim)
    assert (model.rep_dim, model.adapter) == (width, adapter)
    assert model(inputs()).shape == (3, 10)


def test_a_callable_gets_what_its_signature_takes():
    model = build({"model": Sized, "slope": 0.5}, TASK, rep_dim=4)
    assert model.trunk.given == ((3, 8, 8), 0.5)


def test_options_reach_a_builder_with_open_arguments():
    def open_builder(weights=None, **options):
        assert set(options) == {"width"}
        return Net(**options)

    assert build({"model": open_builder, "width": 5, "head": "fc"}, TASK).rep_dim == 5


def test_modules_and_what_callables_keep_are_copied():
    kept, kept_model = Net(), build("conv-small", TASK)
    for entry, own in ((kept, kept.fc), (lambda: kept, kept.fc), (lambda: kept_model, kept_model.head)):
        first, second = build(entry, TASK), build(entry, TASK)
        first.head.weight.data.zero_()
        assert torch.equal(second.head.weight, own.weight)
        assert second.head.weight.data_ptr() != own.weight.data_ptr()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (lambda size: Net(size), "client 7: <lambda> needs 'size'; give it as an option"),
        (lambda rep_dim: Net(), "client 7: <lambda> needs 'rep_dim'; set it"),
        (lambda task, /: Net(), "client 7: <lambda> takes 'task' by position only"),
        (lambda: 3, "client 7: <lambda> gave a int, expected a torch.nn.Module"),
        (lambda: 1 / 0, "client 7: <lambda> could not be built .ZeroDivisionError: division by zero.; check"),
        ({"model": Net, "heat": "fc"}, "client 7: Net has no option 'heat'; did you mean 'head'"),
        ({"model": Net, "name": "cnn1"}, "client 7: a model given as a mapping needs one of"),
        (Model, r"client 7: Model must set rep_dim"),
    ],
)
def test_callables_that_cannot_be_used(entry, sentence):
    with pytest.raises(ModelError, match=sentence):
        build(entry, TASK, who=WHO)


# --- a class for every pixel ----------------------------------------------------------------------------

PIXELS = Task("segmentation", 3, (1, 8, 8))


def segmenter(classes=3):
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, classes, 1))


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"task": PIXELS}, 6),
        ({"task": PIXELS, "head": "2"}, 6),
        ({}, 6),
        ({"head": "2"}, 6),
        ({"task": PIXELS, "rep_dim": 4}, 4),
    ],
)
def test_a_module_that_segments_ends_in_a_convolution(options, width):
    net = segmenter()
    model = adapt(net, **options)
    check_model(model, PIXELS)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(model(x), net(x))
    assert (model.head_path, model.rep_dim, tuple(model.features(x).shape)) == ("2", width, (2, width))
    if width == 6:
        assert torch.equal(model.features(x), net[:2](x).mean((2, 3)))
    assert torch.equal(own_module(model)(x), net(x))


def test_a_module_that_segments_other_classes_gets_a_new_convolution():
    assert adapt(segmenter(5), task=PIXELS, classes=3).head.weight.shape == (3, 6, 1, 1)
    with pytest.raises(ModelError, match="the head gives 5 scores, the task has 3 classes"):
        adapt(segmenter(5), task=PIXELS)
    larger = nn.Sequential(nn.MaxPool2d(2), *segmenter(), nn.Upsample(scale_factor=2))
    with pytest.raises(
        ModelError, match=r"no convolution of Sequential .* derive the class from potluck\.Model"
    ):
        adapt(larger, task=PIXELS)
    with pytest.raises(ModelError, match="changes the scores after layer '3'"):
        adapt(larger, "3", task=PIXELS)
