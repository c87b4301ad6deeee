"""ResNets with early exits: the levels are parts of one network, in their tensors and in what they compute."""

import pytest
import torch

from potluck.core.rng import Rng
from potluck.core.state import Part
from potluck.core.task import Task
from potluck.errors import ModelError
from potluck.models import build

TASK = Task("classification", 4, (1, 16, 16))


def level(number, **options):
    return build({"name": f"scalefl{number}", "width": 8, **options}, TASK)


@pytest.mark.parametrize("depth", [10, 50])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_level_computes_what_the_whole_does_with_all_other_channels_at_zero(number, depth):
    whole, part = level(4, depth=depth), level(number, depth=depth)
    kept = Part(part).wire()
    assert kept.keys() < Part(whole).wire().keys()
    with torch.no_grad():
        for name, value in Part(whole).wire().items():
            place = tuple(map(slice, kept[name].shape)) if name in kept else ()
            held = value[place].clone() if name in kept else None
            if not name.endswith("running_var"):
                value.zero_()
            if held is not None:
                value[place] = held
                kept[name].copy_(held)
    x = torch.randn(3, 1, 16, 16, generator=Rng(2).generator())
    mine, scores = part.eval().exit_scores(x), whole.eval().exit_scores(x)
    assert len(mine) == number
    assert len(scores) == 4
    for own, other in zip(mine, scores, strict=False):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(part(x), mine[-1])
    assert part.features(x).shape == (3, part.rep_dim)


@pytest.mark.parametrize(
    ("depth", "places"), [(10, (1, 2, 3, 4)), (18, (4, 6, 7, 8)), (152, (28, 35, 43, 50))]
)
def test_exits_stand_at_the_same_shares_of_the_blocks(depth, places):
    with torch.device("meta"):
        assert build({"name": "scalefl4", "depth": depth}, TASK, check=False).after == places
        assert build({"name": "scalefl2", "depth": depth}, TASK, check=False).after == places[:2]


def test_exits_stand_where_they_are_asked_for():
    assert level(4, depth=10, after=[1, 2, 3]).after == (1, 2, 3, 4)
    assert level(3, after=[2, 4, 5]).after == (2, 4, 5)
    assert len(level(3, after=[2, 4, 5]).layer4) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"after": [1, 2]}, "expected three numbers of blocks"),
        ({"after": [3, 3, 4]}, "expected rising numbers of blocks from 1 to 7"),
        ({"after": [3, 4, 8]}, "expected rising numbers of blocks from 1 to 7"),
        ({"depth": 19}, "there is no resnet of depth 19"),
        ({"ratio": 0.1}, "give a share of the width 8 that leaves a channel"),
        ({"ratio": 1.5}, "give a share of the width 8"),
        ({"width": 0}, "width is 0; give a whole number from 1 on"),
    ],
)
def test_what_cannot_be_built_is_refused(options, sentence):
    with pytest.raises(ModelError, match=sentence):
        level(2, **options)
