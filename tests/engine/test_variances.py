"""Variances of batch norm are not negative: a message that says so is refused, and its client named."""

import pytest
import torch
from torch import nn

from potluck.core.message import Message
from potluck.core.state import Report
from potluck.engine.acceptance import Acceptance, Exchange
from potluck.engine.protocol import Answer
from potluck.testing import Bench


class Normed(nn.Module):
    """A model with batch norm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(6), nn.BatchNorm1d(6))
        self.fc = nn.LazyLinear(3)
        self(torch.zeros(2, 1, 8, 8))

    def forward(self, x):
        return self.fc(self.body(x))


@pytest.fixture(scope="module")
def refusals():
    federation = Bench("fedavg", models=[lambda task: Normed()]).build()
    acceptance = Acceptance(federation.method, federation.server())
    first, second, *_ = federation.population.ids

    def refusals(change):
        sent = [
            Message({"model": federation.clients.build_client(one)["model"].wire()})
            for one in (first, second)
        ]
        (name,) = [name for name in sent[0] if name.endswith("running_var")]
        sent[0] = Message({**sent[0], name: change(sent[0][name])})
        answers = [Answer(one, up, Report()) for one, up in zip((first, second), sent, strict=True)]
        return first, name, acceptance.refusals(Exchange(("train",)), answers)

    return refusals


@pytest.mark.parametrize("low", [-50.0, -1e-6])
def test_a_negative_variance_is_refused_and_nobody_else(refusals, low):
    client, name, found = refusals(lambda value: torch.full_like(value, low))
    assert found == {
        client: f"client {client}, step train: tensor {name!r} holds variances, and has negative numbers"
    }


def test_one_among_many_is_found(refusals):
    client, _, found = refusals(lambda value: value.index_fill(0, torch.tensor([3]), -1.0))
    assert [*found] == [client]


def test_variances_of_nought_are_taken(refusals):
    assert refusals(torch.zeros_like)[2] == {}


def test_a_variance_that_is_no_number_is_not_finite(refusals):
    client, name, found = refusals(lambda value: value * torch.nan)
    assert f"tensor {name!r} is not finite" in found[client]
