"""The tree of randomness: a path decides, and nothing else does."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.core.rng import Rng, Seeds, new_secret

keys = st.one_of(st.integers(-2, 20), st.text("a1:str\x1f", max_size=5))
paths = st.lists(keys, max_size=4).map(tuple)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 3), paths, st.integers(0, 3), paths)
def test_two_nodes_are_one_only_if_seed_and_path_are(seed, path, other_seed, other_path):
    one, other = Rng(seed, path), Rng(other_seed, other_path)
    equal = (seed, [(type(key), key) for key in path]) == (
        other_seed,
        [(type(key), key) for key in other_path],
    )
    assert (one.integer == other.integer) == equal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        ((1,), ("1",)),
        ((1, 1), (11,)),
        (("a",), ("a", "")),
        ((), ("",)),
        ((-1,), ("-1",)),
        (("a", "b"), ("a\x1fstr:b",)),
    ],
)
def test_near_misses(one, other):
    assert Rng(0).child(*one).integer != Rng(0).child(*other).integer


def test_children_of_children():
    assert Rng(1).child("a").child("b", 2) == Rng(1).child("a", "b", 2)
    assert 0 <= Rng(1).child("a").integer < 2**63


def test_drawing_leaves_no_trace():
    node = Rng(4).child("client", 3)
    first = node.numpy().random(5)
    node.child("other").numpy().random(100)
    node.generator()
    assert np.array_equal(node.numpy().random(5), first)
    assert torch.equal(torch.rand(3, generator=node.generator()), torch.rand(3, generator=node.generator()))


def test_siblings_are_independent():
    draws = np.stack([Rng(0).child("client", client).numpy().standard_normal(4000) for client in range(12)])
    correlations = np.corrcoef(draws)[~np.eye(12, dtype=bool)]
    assert np.abs(correlations).max() < 0.08
    assert abs(draws.mean()) < 0.02
    bits = {Rng(0).child("client", client).integer for client in range(2000)}
    assert len(bits) == 2000


def test_reseeding_keeps_the_generator():
    generator = torch.Generator()
    assert Rng(0).child("a").reseed(generator) is generator
    assert torch.equal(
        torch.rand(3, generator=generator), torch.rand(3, generator=Rng(0).child("a").generator())
    )


class TestDefaultGenerator:
    def test_inside_it_is_the_node_outside_as_before(self):
        before = torch.get_rng_state()
        with Rng(0).child("init").as_default():
            first = nn.Linear(3, 2).weight.detach().clone()
            torch.rand(10)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(7)
        with Rng(0).child("init").as_default():
            assert torch.equal(nn.Linear(3, 2).weight, first)
        with Rng(0).child("other").as_default():
            assert not torch.equal(nn.Linear(3, 2).weight, first)

    def test_an_error_inside_restores_too(self):
        before = torch.get_rng_state()
        with contextlib.suppress(RuntimeError), Rng(0).as_default():
            torch.rand(3)
            raise RuntimeError("stop")
        assert torch.equal(torch.get_rng_state(), before)

    def test_one_inside_another(self):
        with Rng(0).as_default():
            torch.rand(1)
            expected = torch.rand(2)
        with Rng(0).as_default():
            torch.rand(1)
            with Rng(1).as_default():
                torch.rand(50)
            assert torch.equal(torch.rand(2), expected)


def test_four_seeds_are_four_trees_and_secrets_a_fifth():
    seeds = Seeds(split=7, init=7, cohort=7, training=7)
    roots = [seeds.tree(name) for name in ("split", "init", "cohort", "training")]
    nodes = [*roots, seeds.secret("0"), seeds.secret("1"), Rng(7)]
    assert all(one.integer != other.integer for one, other in itertools.combinations(nodes, 2))
    varied = Seeds(split=7, init=8, cohort=7, training=7)
    assert varied.tree("split") == seeds.tree("split")
    assert varied.tree("init") != seeds.tree("init")
    assert varied.secret("0") == seeds.secret("0")


def test_a_real_secret_is_new_each_time():
    assert len({new_secret() for _ in range(10)}) == 10
