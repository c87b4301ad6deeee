"""Streams: the order of batches, what becomes of the last one, where samples come from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.client import Client
from potluck.core.rng import Rng
from potluck.core.settings import ClientTraining
from potluck.core.streams import Source, Stream, several_each, shuffled_batches
from potluck.core.task import Task

sizes = st.tuples(st.integers(1, 25), st.integers(1, 30), st.integers(1, 3))


@pytest.mark.parametrize(
    ("count", "batch", "lengths"),
    [(7, 3, [3, 3]), (8, 3, [3, 3, 2]), (6, 3, [3, 3]), (1, 3, [1]), (2, 1, [1, 1])],
)
def test_a_single_sample_left_over_can_be_left_out(count, batch, lengths):
    order = shuffled_batches(np.arange(count), batch, 2, "keep", Rng(3))
    assert [len(rows) for rows in several_each(order)] == lengths * 2


@settings(deadline=None, max_examples=60)
@given(sizes, st.sampled_from(["keep", "drop", "wrap"]))
def test_every_epoch_is_a_permutation_cut_into_batches(size, last):
    count, batch, epochs = size
    rows = np.arange(100, 100 + count)
    order = shuffled_batches(rows, batch, epochs, last, Rng(3))
    width, rest = min(batch, count), count % min(batch, count)
    per_epoch = count // width + (1 if rest and last != "drop" else 0)
    assert len(order) == epochs * per_epoch
    for epoch in range(epochs):
        batches = order[epoch * per_epoch : (epoch + 1) * per_epoch]
        seen = np.concatenate(batches)
        assert all(len(one) == width for one in batches[:-1])
        if last == "keep":
            assert sorted(seen) == sorted(rows)
            assert len(batches[-1]) == (rest or width)
        elif last == "drop":
            assert len(set(seen)) == len(seen) == count - rest
        else:
            assert all(len(one) == width for one in batches)
            assert sorted(seen[:count]) == sorted(rows)
            assert list(seen[count:]) == list(seen[: len(seen) - count])


def test_no_rows_no_batches():
    assert shuffled_batches(np.arange(0), 4, 3, "keep", Rng(0)) == []


def test_epochs_differ_and_the_same_node_gives_the_same_order():
    order = shuffled_batches(np.arange(50), 50, 2, "keep", Rng(0))
    assert not np.array_equal(order[0], order[1])
    again = shuffled_batches(np.arange(50), 50, 2, "keep", Rng(0))
    assert all(np.array_equal(one, other) for one, other in zip(order, again, strict=True))
    longer = shuffled_batches(np.arange(50), 50, 3, "keep", Rng(0))
    assert all(np.array_equal(one, other) for one, other in zip(order, longer[:2], strict=True))


def test_a_source_gives_the_rows_asked_for_prepared():
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    batch = Source(x, y).take(torch.tensor([4, 1]))
    assert batch.x.tolist() == [[8.0, 9.0], [2.0, 3.0]]
    assert batch.y.tolist() == batch.id.tolist() == [4, 1]
    assert len(batch) == 2
    heard = []

    def prepare(x, generator):
        heard.append(generator)
        return x * 10

    generator = torch.Generator()
    assert Source(x, y, prepare).take(torch.tensor([1]), generator).x.tolist() == [[20.0, 30.0]]
    Source(x, y, prepare).take(torch.tensor([1]))
    assert heard == [generator, None]


def test_tensors_at_hand_keep_their_order():
    x, y = torch.arange(5.0), torch.arange(5)
    assert [rows.tolist() for rows in Stream.of(x, y, batch_size=2).order] == [[0, 1], [2, 3], [4]]
    assert [rows.tolist() for rows in Stream.of(x).order] == [[0, 1, 2, 3, 4]]
    assert Stream.of(x).source.y.tolist() == [0] * 5
    assert len(Stream.of(torch.zeros(0, 3))) == 0


class TestClient:
    def client(self, **training):
        x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
        client = Client(Task("classification", 10, (2,)), Source(x, y))
        client.rows = {"train": np.arange(7), "test": np.arange(7, 10), "validation": np.arange(0)}
        client.training = ClientTraining(**training)
        client.enter(1, Rng(8), {}, "train")
        return client

    def test_its_own_values_unless_asked_otherwise(self):
        client = self.client(batch_size=3, epochs=2)
        assert [len(rows) for rows in client.batches().order] == [3, 3, 1] * 2
        assert [len(rows) for rows in client.batches(epochs=1, batch_size=4).order] == [4, 3]
        assert client.batches().augment
        assert not client.batches("test").augment
        assert client.samples == 7

    @pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
    def test_the_last_batch(self, last):
        lengths = [len(rows) for rows in self.client(batch_size=3, last_batch=last).batches().order]
        assert lengths == {"keep": [3, 3, 1], "drop": [3, 3], "wrap": [3, 3, 3]}[last]

    def test_a_second_pass_of_the_round_has_another_order(self):
        client = self.client(batch_size=7)
        first, second = client.batches().order[0], client.batches().order[0]
        assert first.tolist() != second.tolist()
        assert self.client(batch_size=7).batches().order[0].tolist() == first.tolist()

    def test_the_order_is_the_same_whatever_the_step_or_the_draws(self):
        one, other = self.client(batch_size=7), self.client(batch_size=7)
        other.step = "another"
        other.draw("noise")
        other.batches("test")
        assert one.batches().order[0].tolist() == other.batches().order[0].tolist()
