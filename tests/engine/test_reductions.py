"""What is looked at of every answer: the numbers must be finite, whatever their type."""

import pytest
import torch

from potluck.core.message import Message
from potluck.core.state import Report
from potluck.engine.protocol import Answer
from potluck.engine.reductions import Reductions

TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


def unsound(value):
    seen = Reductions(torch.device("cpu"))
    for client, tensor in {"fine": torch.ones(3), "asked": value}.items():
        seen.add_largest(Answer(client, Message({"x": tensor}), Report()))
    seen.read()
    return seen.unsound


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 12, 70])
def test_one_number_among_many_that_is_not_finite(dtype, bad, place):
    value = torch.linspace(-3, 3, 71, dtype=dtype)
    assert not unsound(value)
    value[place] = bad
    assert unsound(value) == {"asked"}


@pytest.mark.parametrize("dtype", TYPES[:3])  # all are read as float32
def test_the_largest_numbers_of_a_type_are_finite(dtype):
    most = torch.finfo(dtype).max
    assert not unsound(torch.tensor([most, -most], dtype=dtype)[:, None].expand(2, 3).t())


def test_nothing_to_look_at():
    assert not unsound(torch.empty(0))
    assert not unsound(torch.tensor([1, 2]))
