"""Slices by width: where channels are, and that a slice computes what the parent computes on them alone."""

import pytest
import torch
from torch import nn

from potluck.core.contract import shapes_of
from potluck.core.model import Model
from potluck.core.rng import Rng
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.kit.width_slices import WidthSlices, is_slice, mixes_channels, scale_outputs
from potluck.methods.fedrolex import Rolling, Shuffled
from potluck.models import build

DIGITS = Task("classification", 3, (1, 8, 8))
PICTURES = Task("classification", 3, (1, 16, 16))
CPU = torch.device("cpu")
FAMILIES = [
    (DIGITS, "mlp-small", {"scale": 0.1}, {"scale": 0.04}),
    (DIGITS, "conv-large", {"scale": 0.25}, {"scale": 0.1}),
    (PICTURES, "cnn1", {"scale": 0.02}, {"scale": 0.01}),
    (PICTURES, "fedavg-cnn", {"scale": 0.1}, {"scale": 0.05}),
    (DIGITS, "resnet10", {"width": 6, "stem": "cifar"}, {"width": 2, "stem": "cifar"}),
    (DIGITS, "resnet50", {"width": 3}, {"width": 2}),
]


def made(name, options, task=DIGITS):
    with Rng(0, (name,)).as_default():  # a net of a few channels may be dead from the start
        return build({"name": name, **options}, task)


def slices_of(parent):
    return WidthSlices(shapes_of(Part(parent).wire()), parent.channel_blocks)


def index(own, whole, blocks=None, window=None):
    slices = WidthSlices({"w": whole}, {"w": blocks or {}})
    assert slices.misfit({"w": own}) == ""
    found = slices.index({"w": own}, window, CPU)["w"]
    return [list(range(size))[axis] if isinstance(axis, slice) else None if axis is None else axis.tolist()
            for axis, size in zip(found, whole, strict=True)]  # fmt: skip


def test_the_first_channels():
    assert index((2, 3), (4, 3)) == [[0, 1], None]
    assert index((2, 6), (4, 12), {1: (1, 3)}) == [[0, 1], [0, 1, 2, 3, 4, 5]]  # two channels of three pixels


def test_inside_each_head():
    """Two heads of three channels, of which two are held: not the first four of six."""
    assert index((4,), (6,), {0: (2, 1)}) == [[0, 1, 3, 4]]


def test_a_window_rolls_by_one_and_begins_again():
    for start, expected in ((0, [0, 1]), (1, [1, 2]), (3, [3, 0]), (5, [1, 2])):
        assert index((2,), (4,), window=Rolling(start)) == [expected]
    assert index((4,), (8,), {0: (1, 2)}, Rolling(3)) == [[6, 7, 0, 1]]  # pixels stay together
    assert index((4,), (6,), {0: (2, 1)}, Rolling(2)) == [[2, 0, 5, 3]]
    assert index((4,), (4,), window=Rolling(3)) == [None]  # whoever holds everything holds it in its order


def test_a_drawn_window_is_one_for_all_axes_of_a_round():
    window = Shuffled(Rng(0))
    [first], [second] = index((3,), (9,), window=window), index((6,), (18,), {0: (1, 2)}, window)
    assert len(set(first)) == 3
    assert second[::2] == [2 * channel for channel in first]
    assert index((3,), (9,), window=Shuffled(Rng(1))) != [first]


@pytest.mark.parametrize("window", [None, Rolling(1), Shuffled(Rng(0))], ids=["first", "rolling", "random"])
@pytest.mark.parametrize(("task", "name", "wide", "narrow"), FAMILIES, ids=[one[1] for one in FAMILIES])
def test_a_slice_is_the_parent_with_the_other_channels_at_zero(task, name, wide, narrow, window):
    parent, part = made(name, wide, task), made(name, narrow, task)
    assert slices_of(parent).misfit(shapes_of(Part(part).wire())) == ""
    assert is_slice(parent, part, slices_of(parent), window, task)


def test_a_window_over_flattened_pixels_is_not_a_window_over_channels():
    """What goes wrong where a model does not say its blocks; the first channels are right even then."""
    parent, part = made("conv-large", {"scale": 0.25}), made("conv-large", {"scale": 0.1})
    parent.channel_blocks = None
    assert not is_slice(parent, part, slices_of(parent), Rolling(1), DIGITS)
    assert is_slice(made("conv-large", {"scale": 0.25}), part, slices_of(parent), None, DIGITS)


class Joined(Model):
    """Two branches side by side: the first half of the channels is not the first half of each."""

    def __init__(self, task, width):
        super().__init__()
        self.rep_dim = 2 * width
        self.left, self.right = nn.Linear(64, width), nn.Linear(64, width)
        self.head = nn.Linear(2 * width, task.classes)

    def features(self, x):
        return torch.cat([self.left(x.flatten(1)), self.right(x.flatten(1))], 1).relu()


def test_branches_side_by_side_are_found_whatever_the_first_weights():
    """A batch of two samples was too small: in one of ten draws all units that differ were off."""
    for seed in range(64):
        with Rng(seed).as_default():
            parent, part = Joined(DIGITS, 4), Joined(DIGITS, 2)
        assert not is_slice(parent, part, slices_of(parent), None, DIGITS), seed


def test_branches_side_by_side_need_their_blocks_said():
    part = Joined(DIGITS, 2)
    parent = Joined(DIGITS, 4)
    parent.channel_blocks = {"head.weight": {1: (2, 1)}}
    for window in (None, Rolling(3)):
        assert is_slice(parent, part, slices_of(parent), window, DIGITS)


def test_what_is_no_slice_is_said():
    slices = WidthSlices({"w": (4, 6), "b": (4,)}, {"w": {1: (1, 3)}})
    assert slices.misfit({"w": (2, 3), "b": (2,)}) == ""
    assert slices.misfit({"w": (4, 6)}) == "has no tensor 'b', unlike the parent"
    assert "has a tensor 'c'" in slices.misfit({"w": (4, 6), "b": (4,), "c": (1,)})
    assert slices.misfit({"w": (5, 6), "b": (4,)}) == "has 'w' of shape (5, 6), and the parent's is (4, 6)"
    assert "no whole number of channels" in slices.misfit({"w": (4, 4), "b": (4,)})
    assert "the parent's is (4, 6)" in slices.misfit({"w": (4,), "b": (4,)})


def test_outputs_are_divided_by_the_share_of_channels_in_training_alone():
    parent, part = made("mlp-small", {"scale": 0.5}), made("mlp-small", {"scale": 0.125})
    before = part.features(torch.ones(2, 1, 8, 8))
    scale_outputs(part, slices_of(parent).rate)
    hidden = part.fc1(torch.ones(2, 64))
    assert torch.equal(hidden, 4 * nn.functional.linear(torch.ones(2, 64), part.fc1.weight, part.fc1.bias))
    scores = part.head(torch.ones(2, 8))
    assert torch.equal(scores, nn.functional.linear(torch.ones(2, 8), part.head.weight, part.head.bias))
    part.eval()
    assert torch.equal(part.features(torch.ones(2, 1, 8, 8)), before)


def test_layers_across_channels_are_found():
    assert mixes_channels(made("resnet10", {"width": 2})) == ""
    assert mixes_channels(made("vit-b16", {"scale": 0.02})) == "LayerNorm"


def test_a_slice_is_cut_once_until_something_is_written():
    slices, whole = WidthSlices({"w": (4,)}), {"w": torch.arange(4.0)}
    index = slices.index({"w": (2,)}, None, CPU)
    first = slices.cut(whole, index)["w"]
    assert slices.cut(whole, index)["w"] is first
    whole["w"].add_(1)
    assert slices.cut(whole, index)["w"].tolist() == [1.0, 2.0]
    assert first.tolist() == [0.0, 1.0]
    assert slices.cut({"w": torch.zeros(4)}, index)["w"].tolist() == [0.0, 0.0]
    rolled = slices.index({"w": (2,)}, Rolling(3), CPU)
    assert slices.cut(whole, rolled)["w"].tolist() == [4.0, 1.0]
