"""Averaging against loops over single entries."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.kit.averaging import average, take_slice


def replies(values, samples, group="w"):
    """client → name → number or tensor."""
    return Replies.of(
        {
            client: {group: {name: torch.as_tensor(value) for name, value in held.items()}}
            for client, held in values.items()
        },
        samples=samples,
    )


class TestMeans:
    @pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
    def test_1_of_one_sample_and_4_of_two_give_3(self, order):
        values = {"a": {"x": 1.0}, "b": {"x": 4.0}}
        given_replies = replies({client: values[client] for client in order}, {"a": 1, "b": 2})
        assert average(given_replies, "w")["x"].item() == pytest.approx(3.0, rel=1e-5)
        assert average(given_replies, "w", "uniform")["x"].item() == 2.5
        assert average(given_replies, "w", {"a": 3.0, "b": 1.0})["x"].item() == 1.75

    def test_layer_wise_1_2_6_give_3_and_4_8_give_6(self):
        values = {"a": {"one": 1.0}, "b": {"one": 2.0, "two": 4.0}, "c": {"one": 6.0, "two": 8.0}}
        means = average(replies(values, {"a": 7, "b": 1, "c": 1}), "w", "uniform")
        found = {name: value.item() for name, value in means.items()}
        assert found == pytest.approx({"one": 3.0, "two": 6.0}, rel=1e-5)

    def test_one_client_is_exact(self):
        value = torch.randn(100, generator=Rng(0).generator()) * 1e-3
        for samples in (1, 3, 7, 1797):
            assert torch.equal(average(replies({"a": {"x": value}}, {"a": samples}), "w")["x"], value)

    def test_the_input_is_left_alone(self):
        first, second = torch.ones(3), torch.full((3,), 3.0)
        mean = average(replies({"a": {"x": first}, "b": {"x": second}}, {"a": 1, "b": 1}), "w")["x"]
        mean.add_(100)
        assert first.tolist() == [1.0] * 3
        alone = average(replies({"a": {"x": first}}, {"a": 1}), "w")["x"]
        alone.add_(100)
        assert first.tolist() == [1.0] * 3

    @settings(deadline=None, max_examples=60)
    @given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1), st.randoms())
    def test_against_numpy_in_any_order(self, samples, shuffle):
        draw = Rng(1).generator()
        values = {client: {"x": torch.randn(4, 2, generator=draw)} for client in samples}
        expected = np.average(
            [values[client]["x"].double().numpy() for client in samples],
            axis=0,
            weights=list(samples.values()),
        )
        order = list(samples)
        shuffle.shuffle(order)
        for clients in (list(samples), order):
            mean = average(replies({client: values[client] for client in clients}, samples), "w")["x"]
            np.testing.assert_allclose(mean, expected, atol=1e-5)

    def test_only_the_group_counts(self):
        both = Replies.of(
            {
                "a": {
                    "w": {"x": torch.tensor(1.0)},
                    "other": {"x": torch.tensor(9.0)},
                    "plain": torch.tensor(5.0),
                }
            },
            samples={"a": 1},
        )
        assert {name: value.item() for name, value in average(both, "w").items()} == {"x": 1.0}
        assert average(both, "nothing") == {}

    def test_who_weighs_nothing_does_not_count(self):
        values = {"a": {"x": 1.0, "y": 5.0}, "b": {"x": 3.0}}
        means = average(replies(values, {"a": 0, "b": 4}), "w")
        assert {name: value.item() for name, value in means.items()} == {"x": 3.0}
        assert average(replies(values, {"a": 0, "b": 0}), "w") == {}


@st.composite
def slices(draw):
    """A full shape, and for each of some clients an index per dimension (or None for all of it)."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))

    def axis(size):
        chosen = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
        return draw(st.none() | chosen)

    clients = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    return shape, {client: tuple(axis(size) for size in shape) for client in clients}


class TestSlices:
    @settings(deadline=None, max_examples=80)
    @given(slices(), st.sampled_from(["samples", "uniform"]))
    def test_against_a_loop_over_entries(self, case, weights):
        shape, axes = case
        draw = Rng(2).generator()
        base = torch.randn(shape, generator=draw)
        samples = {client: 1 + 3 * place for place, client in enumerate(axes)}
        index = {
            client: {"x": tuple(None if axis is None else torch.tensor(axis) for axis in held)}
            for client, held in axes.items()
        }
        places = {
            client: [range(size) if axis is None else axis for axis, size in zip(held, shape, strict=True)]
            for client, held in axes.items()
        }
        values = {
            client: {"x": torch.randn([len(axis) for axis in held], generator=draw)}
            for client, held in places.items()
        }
        total, mass = np.zeros(shape), np.zeros(shape)
        for client, held in places.items():
            share = samples[client] if weights == "samples" else 1
            for inner, outer in zip(
                itertools.product(*(range(len(axis)) for axis in held)), itertools.product(*held), strict=True
            ):
                total[outer] += share * values[client]["x"][inner].item()
                mass[outer] += share
        expected = np.where(mass > 0, total / np.maximum(mass, 1), base)
        mean = average(replies(values, samples), "w", weights, base={"x": base}, index=index)["x"]
        np.testing.assert_allclose(mean, expected, atol=1e-5)
        assert torch.equal(mean[torch.tensor(mass == 0)], base[torch.tensor(mass == 0)])

    def test_names_without_an_index_are_whole(self):
        given_replies = replies({"a": {"x": torch.ones(2), "s": 2.0}}, {"a": 1})
        base = {"x": torch.zeros(2), "s": torch.tensor(0.0)}
        means = average(given_replies, "w", base=base, index={"a": {}})
        assert means["x"].tolist() == [1.0, 1.0]
        assert means["s"].item() == 2.0

    def test_a_name_nobody_sent_does_not_appear_and_the_base_is_left_alone(self):
        base = {"x": torch.zeros(3), "y": torch.zeros(2)}
        index = {"a": {"x": (torch.tensor([2, 0]),)}}
        means = average(
            replies({"a": {"x": torch.tensor([5.0, 7.0])}}, {"a": 2}), "w", base=base, index=index
        )
        assert means.keys() == {"x"}
        assert means["x"].tolist() == [7.0, 0.0, 5.0]
        assert not base["x"].any()

    @settings(deadline=None, max_examples=40)
    @given(slices())
    def test_a_slice_taken_and_put_back_changes_nothing(self, case):
        shape, axes = case
        base = torch.randn(shape, generator=Rng(3).generator())
        for held in axes.values():
            index = tuple(None if axis is None else torch.tensor(axis) for axis in held)
            piece = take_slice(base, index)
            for axis, size, length in zip(held, shape, piece.shape, strict=True):
                assert length == (size if axis is None else len(axis))
            back = average(
                replies({"a": {"x": piece}}, {"a": 1}), "w", base={"x": base}, index={"a": {"x": index}}
            )
            assert torch.equal(back["x"], base)
            piece.add_(1)
            assert torch.equal(back["x"], base)
