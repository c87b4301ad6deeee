"""Declared state: what may cross, what is copied, what comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.core.rng import Rng
from potluck.core.state import Holder, Moments, Part
from potluck.core.task import Task
from potluck.errors import ConfigError, MessageError

TASK = Task("classification", 3, (4,))


class Net(nn.Module):
    """A layer, batch norm, and a mask that the network makes itself."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)

    def features(self, x):
        return self.norm(self.fc(x))


def holder(**state):
    made = Holder(TASK)
    made.declare(state)
    return made


class TestPart:
    def test_parameters_and_statistics_may_cross_but_no_counts_and_no_tables(self):
        parameters = {"fc.weight", "fc.bias", "norm.weight", "norm.bias"}
        statistics = {"norm.running_mean", "norm.running_var"}
        assert Part(Net(), "average").wire().keys() == parameters | statistics
        assert Part(Net(), "local").wire().keys() == parameters
        counts = {"norm.num_batches_tracked", "mask"}
        assert Part(Net()).tensors().keys() == parameters | statistics | counts

    def test_a_state_is_a_copy(self):
        part = Part(Net())
        state = part.state()
        with torch.no_grad():
            part.fc.weight.add_(1)
            part.norm.running_mean.add_(1)
        assert not torch.equal(state["fc.weight"], part["fc.weight"])
        assert not torch.equal(state["norm.running_mean"], part["norm.running_mean"])
        assert not state["fc.weight"].requires_grad

    def test_loading_keeps_the_place_in_memory_and_the_rest(self):
        part = Part(Net())
        bias, place = part["fc.bias"].detach().clone(), part["fc.weight"].data_ptr()
        part.load({"fc.weight": torch.ones(3, 4)})
        assert torch.equal(part["fc.weight"], torch.ones(3, 4))
        assert part["fc.weight"].data_ptr() == place
        assert part["fc.weight"].requires_grad
        assert torch.equal(part["fc.bias"], bias)

    def test_loading_what_does_not_fit(self):
        with pytest.raises(MessageError, match=r"tensor 'fc\.wieght' does not belong"):
            Part(Net()).load({"fc.wieght": torch.ones(3, 4)})
        for wrong in (torch.tensor(1.0), torch.ones(4), torch.ones(3, 5)):
            with pytest.raises(MessageError, match=r"'fc.weight' .* shape .*, expected \(3, 4\)"):
                Part(Net()).load({"fc.weight": wrong})
        with pytest.raises(MessageError, match="expected"):
            Part(torch.zeros(3)).load(torch.tensor(1.0))

    def test_a_mapping_takes_new_names_and_new_shapes(self):
        part = Part({"a": torch.zeros(2)})
        given = torch.ones(3)
        part.load({"a": torch.ones(2), "b": given})
        given.add_(1)
        assert part["a"].tolist() == [1.0, 1.0]
        assert part["b"].tolist() == [1.0, 1.0, 1.0]
        part.load({"a": torch.zeros(5)})
        assert part["a"].shape == (5,)

    def test_a_single_tensor(self):
        part = Part(torch.zeros(3))
        part.load(torch.ones(3))
        assert part.value.tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(TypeError, match="is a Net, not one tensor"):
            _ = Part(Net()).value

    def test_a_module_is_reached_through_the_part(self):
        part, x = Part(Net()), torch.ones(2, 4)
        part.module.eval()
        assert torch.equal(part.features(x), part.content.features(x))
        with pytest.raises(AttributeError):
            _ = part.no_such_thing


class TestHolder:
    def test_a_snapshot_brings_everything_back(self):
        one = holder(model=Net(), known=torch.zeros(3), control={"w": torch.zeros(2)}, moments=Moments())
        places = {name: value.data_ptr() for name, value in one["model"].tensors().items()}
        before = one.snapshot()
        with torch.no_grad():
            for value in one["model"].tensors().values():
                value.add_(1)
        one["known"].value.add_(1)
        one["control"].load({"w": torch.ones(2), "new": torch.ones(1)})
        one["moments"].content["model/fc.weight:step"] = torch.ones(())
        assert len(one.snapshot()) == len(before) + 2
        one.restore(before)
        after = one.snapshot()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert {name: value.data_ptr() for name, value in one["model"].tensors().items()} == places

    def test_a_snapshot_is_not_touched_by_what_comes_later(self):
        one = holder(known=torch.zeros(3), control={"w": torch.zeros(2)})
        before = one.snapshot()
        one["known"].value.add_(1)
        one["control"]["w"].add_(1)
        assert not before["known"].any()
        one.restore(before)
        one["control"].content["w"].add_(5)
        one["known"].value.add_(5)
        assert not before["known"].any()
        assert not before["control/w"].any()

    def test_a_mapping_is_laid_out_as_after_a_journey(self):
        """Sums over memory in another order differ in their last bits."""
        image = torch.arange(48.0).view(2, 3, 4, 2).to(memory_format=torch.channels_last)
        one, other = holder(kept={}), holder(kept={})
        one["kept"].load({"w": image})
        other.restore({"kept/w": image})
        for found in (one, other):
            assert torch.equal(found["kept"]["w"], image)
            assert found["kept"]["w"].is_contiguous()

    @settings(deadline=None, max_examples=40)
    @given(
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
    )
    def test_names_come_and_go_in_a_mapping(self, first, second):
        one = holder(kept={name: torch.full((size,), 1.0) for name, size in first.items()})
        other = holder(kept={name: torch.full((size,), 2.0) for name, size in second.items()})
        one.restore(other.snapshot())
        found, wanted = one.snapshot(), other.snapshot()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_draws_of_a_purpose_differ_and_repeat_in_the_same_round(self):
        def draws(round_):
            one = holder()
            one.enter(round_, Rng(1).child("round", round_), {}, "train")
            return [
                torch.rand(2, generator=one.draw(purpose)).tolist() for purpose in ("noise", "noise", "mask")
            ]

        first = draws(1)
        assert first == draws(1)
        assert len({tuple(value) for value in first + draws(2)}) == 6

    def test_counters_go_on_in_the_next_exchange(self):
        one, counters = holder(), {}
        one.enter(1, Rng(1), counters, "train")
        first = torch.rand(2, generator=one.draw("noise")).tolist()
        one.enter(1, Rng(1), dict(one.counters), "train")
        assert torch.rand(2, generator=one.draw("noise")).tolist() != first


class TestPartOfAPart:
    def test_it_is_the_module_inside(self):
        made = holder(model=Net())
        made.pack()
        inner = made["model/fc"]
        assert inner is made["model/fc"]
        assert inner.state().keys() == {"weight", "bias"}
        inner.load({"bias": torch.full((3,), 5.0)})
        assert made["model"]["fc.bias"].tolist() == [5.0, 5.0, 5.0]
        assert made["model/norm"].wire().keys() == {"weight", "bias", "running_mean", "running_var"}
        assert "model/fc" in made
        assert "small/fc" not in made

    def test_buffers_follow_the_policy_of_the_whole(self):
        made = Holder(TASK)
        made.declare({"model": Net()}, "local")
        assert made["model/norm"].wire().keys() == {"weight", "bias"}

    @pytest.mark.parametrize("name", ["model/fcc", "model/", "model/fc.weight", "table/x"])
    def test_one_that_is_not_there(self, name):
        made = holder(model=Net(), table={"x": torch.zeros(2)})
        root, _, path = name.partition("/")
        with pytest.raises(ConfigError, match=f"the part '{root}' of the state has no module '{path}'; "):
            made[name]

    def test_an_unknown_part_is_a_key_error(self):
        with pytest.raises(KeyError):
            holder(model=Net())["small/fc"]


def test_a_mapping_may_hold_other_shapes_for_the_next_client():
    made = holder(model=Net(), kept={})
    made.pack()
    made["kept"].load({"w": torch.ones(3)})
    first = made.snapshot()
    made["kept"].load({"w": torch.full((5,), 2.0)})
    second = made.snapshot()
    made.restore(first)
    assert made["kept"]["w"].tolist() == [1.0] * 3
    made.restore(second)
    assert made["kept"]["w"].tolist() == [2.0] * 5


def test_parameters_that_are_not_packed_come_back_too():
    """Those of another type are beside the one piece of memory, and gradients are recorded of them."""
    made = holder(model=Net(), double=nn.Linear(2, 2).double())
    made.pack()
    before = made.snapshot()
    with torch.no_grad():
        for value in made.tensors().values():
            value.add_(1)
    made.restore(before)
    assert all(torch.equal(value, before[name]) for name, value in made.tensors().items())
