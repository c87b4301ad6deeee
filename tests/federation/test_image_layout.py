"""Images and weights are stored the way a CPU's convolutions like best, unless a model cannot live with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck import from_arrays
from potluck.core.task import Task
from potluck.engine.rounds import Rounds
from potluck.engine.serial import SerialEngine
from potluck.experiment.schema import Experiment
from potluck.federation.federation import Federation
from potluck.models import registry


class Viewer(nn.Module):
    """Reshapes as most code does, which only works on images stored channel by channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = self.conv(x)
        made: Tensor = self.head(x.view(len(x), -1))
        return made


def viewer(task: Task) -> nn.Module:
    return Viewer(task.classes)


def federate(model: Any, method: Any = "fedavg") -> Federation:
    draw = np.random.default_rng(0)
    data = from_arrays(draw.random((80, 3, 8, 8), dtype="float32"), draw.integers(0, 4, 80), classes=4)
    return Experiment.make(
        data=data,
        partition={"kind": "iid", "clients": 2},
        models=[model],
        method=method,
        training={"rounds": 1, "batch_size": 8},
    ).build()


@pytest.mark.parametrize(("model", "last"), [("conv-small", True), (viewer, False)])
def test_the_layout_is_one_the_model_runs_on(model: Any, last: bool) -> None:
    place = federate(model)
    weights = [
        value for value in place.clients.build_client("0")["model"].tensors().values() if value.dim() == 4
    ]
    assert weights
    assert all(value.is_contiguous(memory_format=torch.channels_last) == last for value in weights)
    cohort = Rounds(place, SerialEngine(place.clients)).play(1, place.population.ids)
    assert not cohort.failures


def test_a_model_that_cannot_read_them_is_handed_images_channel_by_channel() -> None:
    place = federate(viewer)
    stored = place.clients.sources[0].prepared(channels_last=True)
    place.clients.sources = [stored]
    batch = place.clients.build_client("0").source.take(torch.arange(4))
    assert batch.x.is_contiguous()
    torch.testing.assert_close(batch.x, stored.take(torch.arange(4)).x)
    assert not stored.take(torch.arange(4)).x.is_contiguous()


@pytest.mark.parametrize(
    ("model", "precision", "last"),
    [
        ("cnn5", "tf32", False),  # two convolutions
        ("cnn5", "bfloat16", True),
        ("resnet10", "tf32", True),
        ("resnet10", "float32", False),
        ("mobilenet-v2", "tf32", False),  # depthwise convolutions
        ("mobilenet-v2", "bfloat16", True),
    ],
)
def test_on_a_gpu_it_depends_on_precision_and_depth(model: str, precision: Any, last: bool) -> None:
    draw = np.random.default_rng(0)
    data = from_arrays(draw.random((20, 3, 32, 32), dtype="float32"), draw.integers(0, 4, 20), classes=4)
    clients = (
        Experiment.make(
            data=data,
            partition={"kind": "iid", "clients": 2},
            models=[model],
            method="local",
            engine={"device": "cpu"},
        )
        .build()
        .clients
    )
    made = clients.build_model("0")
    clients.device, clients.precision = torch.device("cuda"), precision  # nothing is placed there
    assert clients._takes_channels_last("0", made) == last


def test_images_come_as_convolutions_read_them_unless_nothing_would_gain() -> None:
    for model, last in (("conv-small", True), ("mlp-small", False), (viewer, False)):
        client = federate(model).clients.build_client("0")
        x = client.source.take(torch.arange(4)).x
        assert x.is_contiguous(memory_format=torch.channels_last) == last, model
        torch.testing.assert_close(x, federate("mlp-small").clients.sources[0].take(torch.arange(4)).x)


class Flattener(nn.Module):
    """A convolution beside a layer that reshapes the images themselves."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 8), nn.Linear(3 * 64 + 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        made: Tensor = self.head(torch.cat([x.view(len(x), -1), self.conv(x).flatten(1)], 1))
        return made


def flattener(task: Task) -> nn.Module:
    return Flattener(task.classes)


@pytest.mark.parametrize(
    ("model", "method"),
    [(flattener, "fedavg"), ("conv-small", {"name": "fedmrl", "small": "flattener", "d1": 8})],
)
def test_a_model_that_reshapes_images_gets_them_channel_by_channel(
    model: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registry, "flattener", registry.Registered("flattener", flattener, (), 1))
    place = federate(model, method)
    assert place.clients.build_client("0").source.take(torch.arange(4)).x.is_contiguous()
    cohort = Rounds(place, SerialEngine(place.clients)).play(1, place.population.ids)
    assert not cohort.failures
