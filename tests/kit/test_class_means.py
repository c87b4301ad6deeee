"""Class statistics against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.replies import Replies
from potluck.core.rng import Rng
from potluck.kit.class_means import ClassStats, merge_classes

labels = st.lists(st.integers(0, 4), min_size=1, max_size=20)


def vectors(count, seed=0):
    return torch.randn(count, 3, generator=Rng(seed).generator())


@settings(deadline=None, max_examples=50)
@given(labels, st.integers(1, 5))
def test_means_are_those_of_a_loop(y, batch):
    z, stats = vectors(len(y)), ClassStats(5, 3)
    for start in range(0, len(y), batch):
        stats.add(z[start : start + batch], torch.tensor(y[start : start + batch]))
    for label in range(5):
        rows = [z[i] for i, one in enumerate(y) if one == label]
        expected = torch.stack(rows).mean(0) if rows else torch.zeros(3)
        torch.testing.assert_close(stats.means()[label], expected, atol=1e-6, rtol=1e-5)
        assert stats.counts[label] == len(rows)
    held = sorted(set(y))
    assert torch.equal(stats.means(held), stats.means()[held])
    assert stats.counts[held].tolist() == [y.count(label) for label in held]


def test_statistics_carry_no_gradient_and_take_half_precision():
    stats = ClassStats(2, 3)
    stats.add(vectors(2).requires_grad_(), torch.tensor([0, 1]))
    stats.add(vectors(2).bfloat16(), torch.tensor([0, 1]))
    assert not stats.sums.requires_grad
    assert stats.sums.dtype == torch.float32


def test_gathering_into_declared_tensors_starts_from_zero():
    sums, counts = torch.ones(2, 3), torch.ones(2)
    stats = ClassStats.into(sums, counts)
    stats.add(torch.full((1, 3), 2.0), torch.tensor([1]))
    assert sums.tolist() == [[0.0] * 3, [2.0] * 3]
    assert counts.tolist() == [0.0, 1.0]
    assert stats.means([1]).tolist() == [[2.0, 2.0, 2.0]]


def replies(contents):
    made = {}
    for client, (held, counts) in contents.items():
        made[client] = {
            "prototypes": vectors(len(held), seed=ord(client)),
            "classes": torch.tensor(held, dtype=torch.long),
            "counts": torch.tensor(counts, dtype=torch.float32),
        }
    return Replies.of(made, samples=dict.fromkeys(contents, 1))


@pytest.mark.parametrize("weights", ["uniform", "count"])
def test_merged_means_are_those_of_a_loop(weights):
    given_replies = replies({"a": ([0, 2], [3, 1]), "b": ([2, 4], [5, 2]), "c": ([2], [1]), "d": ([], [])})
    means, held = merge_classes(given_replies, "prototypes", 5, weights)
    assert held.tolist() == [True, False, True, False, True]
    for label in (0, 2, 4):
        total, mass = torch.zeros(3), 0.0
        for message in given_replies.values():
            for vector, one, count in zip(
                message["prototypes"], message["classes"].tolist(), message["counts"].tolist(), strict=True
            ):
                if one == label:
                    share = count if weights == "count" else 1.0
                    total, mass = total + share * vector, mass + share
        torch.testing.assert_close(means[label], total / mass)
    assert not means[1].any()


def test_without_counts_every_holder_has_one_vote():
    contents = {
        client: {"z": torch.full((1, 2), value), "classes": torch.tensor([1])}
        for client, value in {"a": 1.0, "b": 2.0, "c": 6.0}.items()
    }
    means, held = merge_classes(Replies.of(contents, samples={"a": 9, "b": 1, "c": 1}), "z", 3)
    assert means[1].tolist() == [3.0, 3.0]
    assert held.tolist() == [False, True, False]
    with pytest.raises(KeyError, match="counts"):
        merge_classes(Replies.of(contents, samples={"a": 9, "b": 1, "c": 1}), "z", 3, "count")


@pytest.mark.parametrize("weights", ["uniform", "count"])
def test_a_client_that_counted_nothing_is_no_holder(weights):
    given_replies = replies({"a": ([0, 1], [2, 0]), "b": ([0, 1], [2, 4])})
    means, held = merge_classes(given_replies, "prototypes", 3, weights)
    torch.testing.assert_close(means[1], given_replies["b"]["prototypes"][1])
    only_empty = replies({"a": ([0, 1], [2, 0])})
    assert merge_classes(only_empty, "prototypes", 3, weights)[1].tolist() == [True, False, False]
    assert held.tolist() == [True, True, False]


def test_no_replies():
    with pytest.raises(ValueError, match="no replies"):
        merge_classes(Replies.of({}, samples={}), "prototypes", 3)
