"""The optimisers against those of PyTorch, bit for bit; whole training loops are compared in test_fit."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from potluck.core.rng import Rng
from potluck.core.settings import OptimizerSettings
from potluck.training.optimizers import Optimizer, ParameterGroup

RATES, DECAYS = (0.1, 0.02), (0.0, 0.3)
SETTINGS = (
    OptimizerSettings(),
    OptimizerSettings(momentum=0.9),
    OptimizerSettings(momentum=0.5, nesterov=True),
    OptimizerSettings(name="adam", betas=(0.8, 0.9)),
    OptimizerSettings(name="adamw"),
)


def parameters() -> list[nn.Parameter]:
    """Three of float32, two of float64."""
    draw = Rng(3).child("values").generator()
    shapes = ((3, 2), (5,), (2, 2, 2), (4,), (1,))
    return [
        nn.Parameter(torch.randn(shape, generator=draw).to(torch.float64 if number > 2 else torch.float32))
        for number, shape in enumerate(shapes)
    ]


def theirs(settings: OptimizerSettings, values: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": values[start::2], "lr": torch.tensor(rate), "weight_decay": decay}
        for start, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True))
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=True)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=settings.betas, fused=True)


def ours(settings: OptimizerSettings, values: list[nn.Parameter]) -> Optimizer:
    return Optimizer(
        settings,
        [
            ParameterGroup(values[start::2], torch.tensor(rate), decay)
            for start, (rate, decay) in enumerate(zip(RATES, DECAYS, strict=True))
        ],
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: f"{one.name}-{one.momentum}-{one.nesterov}")
def test_steps_are_those_of_torch(settings: OptimizerSettings) -> None:
    one, other = parameters(), parameters()
    expected, found = theirs(settings, one), ours(settings, other)
    draw = Rng(3).child("gradients").generator()
    for missing in (None, 4, 0, 2, None):  # a parameter without a gradient stays where it is
        for number, pair in enumerate(zip(one, other, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=draw).to(pair[0].dtype)
            for value in pair:
                value.grad = None if number == missing else gradient.clone()
        expected.step()
        found.step()
    assert all(torch.equal(value, like) for value, like in zip(other, one, strict=True))


def test_zeroed_memory_is_a_new_optimiser() -> None:
    settings = OptimizerSettings(name="adam")
    found = ours(settings, parameters())
    torch._foreach_add_(found.memory, 1.0)
    assert all(value.eq(1).all() for state in found.state.values() for value in state.values())


FIRST_STEPS = """
import sys, torch
from torch import nn
from potluck.core.settings import OptimizerSettings
from potluck.training.optimizers import Optimizer, ParameterGroup
before = len(sys.modules)
weight = nn.Parameter(torch.ones(1))
weight.square().backward()
for name in ("sgd", "adam", "adamw"):
    Optimizer(OptimizerSettings(name=name), [ParameterGroup([weight], torch.tensor(0.1), 0.0)]).step()
print(len(sys.modules) - before)
"""


def test_the_first_step_loads_nothing() -> None:
    """Those of `torch.optim` load 800 modules."""
    told = subprocess.run([sys.executable, "-c", FIRST_STEPS], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 20
