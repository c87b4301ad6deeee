"""What brings models of different widths to one: named once for the whole pool."""

import pytest
import torch
from torch import nn

from potluck.core.task import Task
from potluck.models import FeaturePool, ModelPool, build

DIGITS = Task("classification", 10, (1, 8, 8))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))


def test_it_is_for_entries_that_name_none_and_need_one():
    entries = [Net, "resnet10", {"name": "resnet10", "adapter": "linear"}, "mlp-small"]
    pool = ModelPool(entries, rep_dim=48, adapter="pool")
    found = [pool.build(key, DIGITS).adapter for key in pool.keys]
    assert found == ["pool", "pool", "linear", None]


@pytest.mark.parametrize(("adapter", "extra"), [(None, 512 * 48 + 48), ("pool", 0), ("max-pool", 0)])
def test_parameters(adapter, extra):
    plain = build("resnet10", DIGITS)
    body = sum(value.numel() for name, value in plain.named_parameters() if not name.startswith("head"))
    pool = ModelPool("resnet10", rep_dim=48, adapter=adapter)
    assert pool.parameters("resnet10", DIGITS) == body + extra + 49 * 10


def test_a_model_of_the_right_width_stays_as_it_is():
    pool = ModelPool("resnet10", rep_dim=512, adapter="max-pool")
    assert pool.build("resnet10", DIGITS).adapter is None


@pytest.mark.parametrize("width", [1024, 1280, 2048, 768])
def test_the_widths_of_fedre(width):
    """Windows of 2, 3 and 4 features; from 768 to 512 windows of two overlap in pairs: (0 1)(1 2)(3 4)(4 5)…"""
    features = torch.arange(width, dtype=torch.float32).expand(2, -1)
    pooled = FeaturePool(512)(features)
    starts = [place * width // 512 for place in range(512)]
    ends = [-(-(place + 1) * width // 512) for place in range(512)]
    expected = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    assert pooled[0].tolist() == expected
    assert FeaturePool(512, largest=True)(features)[0].tolist() == [end - 1.0 for end in ends]
    if width == 768:
        assert list(zip(starts, ends, strict=True))[:4] == [(0, 2), (1, 3), (3, 5), (4, 6)]
