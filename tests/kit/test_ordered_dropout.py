"""Masks against slices: scores, gradients and running statistics of one network at several widths."""

import math

import pytest
import torch
import torch.nn.functional as F

from potluck.core.contract import shapes_of
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.kit.ordered_dropout import OrderedDropout, WidthStatistics
from potluck.kit.static_norm import norms_in
from potluck.kit.width_slices import WidthSlices
from potluck.models import build
from potluck.models.zoo.transformer import VisionTransformer

DIGITS = Task("classification", 3, (1, 8, 8))
PICTURES = Task("classification", 3, (1, 16, 16))
FAMILIES = {
    "mlp": (DIGITS, lambda scale: build({"name": "mlp-large", "scale": scale}, DIGITS), (0.05, 0.1, 0.2)),
    "norms": (DIGITS, lambda scale: build({"name": "conv-large", "scale": scale}, DIGITS), (0.1, 0.2, 0.3)),
    "cnn": (PICTURES, lambda scale: build({"name": "cnn1", "scale": scale}, PICTURES), (0.01, 0.02, 0.04)),
    "resnet": (DIGITS, lambda width: build({"name": "resnet10", "width": width}, DIGITS), (1, 2, 3)),
    "bottlenecks": (DIGITS, lambda width: build({"name": "resnet50", "width": width}, DIGITS), (1, 2)),
    "vit": (DIGITS, lambda scale: VisionTransformer(DIGITS, 4, layers=2, scale=scale), (0.02, 0.04, 0.07)),
}


def gradients(model, x, y):
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(F.cross_entropy(model(x), y), [*parameters.values()])
    return dict(zip(parameters, found, strict=True))


def shapes(model):
    return dict(shapes_of(Part(model).wire()))


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_give_the_scores_and_gradients_of_slices(family, in_double):
    """In training mode, with the batch's own statistics: entries outside a slice get no gradient."""
    task, make, sizes = FAMILIES[family]
    whole, parts = make(sizes[-1]), [make(size) for size in sizes]
    slices = WidthSlices(shapes(whole), whole.channel_blocks)
    dropout = OrderedDropout(whole, [shapes(part) for part in parts], whole.channel_blocks)
    x, y = torch.sin(torch.arange(5.0 * math.prod(task.input))).view(5, *task.input), torch.arange(5) % 3
    for number, part in enumerate(parts):
        index = slices.index(shapes(part), None, x.device)
        Part(part).load(slices.cut(Part(whole).wire(), index))
        with dropout.at(torch.tensor([number])):
            scores, found = whole(x), gradients(whole, x, y)
        torch.testing.assert_close(scores, part(x), rtol=1e-5, atol=1e-6)
        for name, expected in gradients(part, x, y).items():
            own = slices.cut({name: found[name]}, index)[name]
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6, msg=f"{name} differs")
            assert int(found[name].count_nonzero()) == int(own.count_nonzero()), name
    torch.testing.assert_close(whole(x), parts[-1](x))  # outside `at` it is itself


@pytest.fixture
def in_double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_a_batch_moves_the_statistics_of_its_width_alone():
    model = build({"name": "conv-large", "scale": 0.25}, DIGITS)
    narrow = build({"name": "conv-large", "scale": 0.1}, DIGITS)
    statistics = WidthStatistics(2, norms_in(model).values())
    dropout = OrderedDropout(model, [shapes(narrow), shapes(model)], model.channel_blocks, statistics)
    x = torch.sin(torch.arange(5.0 * 64)).view(5, 1, 8, 8)
    first = norms_in(model)["conv1.1"]
    made = model.conv1[0](x)
    with dropout.at(torch.tensor([0])):
        model(x)
    kept = next(statistics.children())
    torch.testing.assert_close(kept.running_mean[0], 0.1 * made.mean((0, 2, 3)))
    torch.testing.assert_close(kept.running_var[0], 0.9 + 0.1 * made.var((0, 2, 3)))
    assert kept.running_mean[1].tolist() == [0.0] * 4
    assert first.running_mean.tolist() == [0.0] * 4  # the model's own are left alone
    model(x)  # at its own width
    torch.testing.assert_close(kept.running_mean[1], 0.1 * made.mean((0, 2, 3)))
    held = statistics.at_the_widest([*norms_in(model)])
    assert held.keys() == {name for name in shapes(model) if "running" in name}
    assert torch.equal(held["conv1.1.running_mean"], kept.running_mean[1])
    model.eval()
    before = kept.running_mean.clone()
    model(x)
    assert torch.equal(kept.running_mean, before)
