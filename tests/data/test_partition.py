from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import PartitionConfig, Split, from_arrays, make_split
from potluck.data.partition import ShareTable
from potluck.data.split import PARTS
from potluck.errors import DataError

KINDS: list[dict[str, Any]] = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 0.5},
    {"kind": "dirichlet", "alpha": 0.5, "variant": "fedin"},
    {"kind": "dirichlet", "alpha": 0.1, "variant": "fedre"},
    {"kind": "pathological", "classes_per_client": 2},
    {"kind": "pathological", "classes_per_client": 2, "variant": "fedre"},
    {"kind": "pathological", "classes_per_client": 2, "variant": "fedmrl"},
    {"kind": "shards", "shards_per_client": 2},
    {"kind": "quantity", "alpha": 1.0},
]
COVERING = ("iid", "dirichlet", "shards", "quantity")


def labelled(rows: int, classes: int, test: int = 0, seed: int = 0) -> Dataset:
    """Rows with random labels and no features to speak of."""
    y = Rng(seed).numpy().integers(0, classes, rows + test)
    y[:classes] = np.arange(classes)
    x = torch.zeros(rows + test, 1)
    held_back = (x[rows:], y[rows:]) if test else None
    return from_arrays(x[:rows], y[:rows], test=held_back, classes=classes)


def balanced(per_class: int, classes: int, test_per_class: int = 0) -> Dataset:
    """Equally many rows of every class."""
    y, held_back = (np.tile(np.arange(classes), n) for n in (per_class, test_per_class))
    test = (torch.zeros(len(held_back), 1), held_back) if test_per_class else None
    return from_arrays(torch.zeros(len(y), 1), y, test=test, classes=classes)


def all_rows(split: Split) -> np.ndarray:
    return np.concatenate([rows for client in split.clients for rows in client.parts])


def table(split: Split, dataset: Dataset, part: str) -> np.ndarray:
    y = dataset.y.numpy()
    rows = [np.bincount(y[getattr(c, part)], minlength=dataset.task.classes) for c in split.clients]
    return np.stack(rows)


@settings(deadline=None, max_examples=120)
@given(
    kind=st.sampled_from(KINDS),
    clients=st.integers(1, 12),
    rows=st.integers(12, 200),
    test=st.sampled_from([0, 30]),
    classes=st.integers(2, 6),
    validation=st.sampled_from([0.0, 0.2]),
    min_size=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_splits_are_disjoint_complete_and_repeatable(
    kind: dict[str, Any],
    clients: int,
    rows: int,
    test: int,
    classes: int,
    validation: float,
    min_size: int,
    seed: int,
) -> None:
    dataset = labelled(rows, classes, test, seed)
    config = PartitionConfig(clients=clients, validation=validation, min_size=min_size, redraws=50, **kind)
    try:
        split = make_split(dataset, config, Rng(seed))
    except DataError:  # asked for more than this data can give; what it says is tested below
        return
    used = all_rows(split)
    assert len(np.unique(used)) == len(used)
    assert used.min(initial=0) >= 0
    assert used.max(initial=0) < len(dataset)
    separate = test > 0 and config.variant != "fedre"
    if separate:
        assert all((c.train < rows).all() and (c.validation < rows).all() for c in split.clients)
        assert all((c.test >= rows).all() for c in split.clients)
    partitioned = np.array(
        [len(c.train) + (0 if config.variant == "fedmrl" else len(c.validation)) for c in split.clients]
    )
    if not separate and config.variant != "fedmrl":
        partitioned += [len(c.test) for c in split.clients]
    assert partitioned.min() >= min_size
    if config.kind in COVERING:
        assert partitioned.sum() == (rows if separate else len(dataset))
    assert make_split(dataset, config, Rng(seed)) == split


def test_another_seed_gives_another_split() -> None:
    dataset = labelled(500, 5)
    for kind in KINDS:
        config = PartitionConfig(clients=5, **kind)
        assert make_split(dataset, config, Rng(0)) != make_split(dataset, config, Rng(1)), kind


def test_fedmrl_uses_one_table_of_shares_for_all_parts() -> None:
    dataset = balanced(5000, 10, 1000)
    config = PartitionConfig(
        kind="pathological", variant="fedmrl", clients=100, classes_per_client=2, validation=0.2
    )
    split = make_split(dataset, config, Rng(3))
    train, validation, test = (table(split, dataset, part) for part in PARTS)
    assert ((train > 0) == (test > 0)).all()
    assert ((train > 0) == (validation > 0)).all()
    assert ((train > 0).sum(axis=1) <= 2).all()
    # 20 shares a class from U(0.4, 0.6), normalised; a client may hold two shares of one class.
    share = test[test > 0] / 1000
    assert share.min() >= 0.4 / (0.4 + 19 * 0.6) - 0.001
    assert share.max() <= 2 * 0.6 / (0.6 + 18 * 0.4)
    assert np.abs(train / 4000 - test / 1000).max() < 0.006
    assert np.abs(validation / 1000 - test / 1000).max() < 0.015
    for part, rows in ((train, 40_000), (validation, 10_000), (test, 10_000)):
        assert rows - 200 <= part.sum() <= rows  # 200 shares, each rounded down


def test_fedmrl_table_is_spent_exactly() -> None:
    config = PartitionConfig(kind="pathological", variant="fedmrl", clients=50, classes_per_client=4)
    drawn = ShareTable.draw(10, config, Rng(0).numpy())
    total = np.zeros(10)
    np.add.at(total, drawn.labels, drawn.shares)
    np.testing.assert_allclose(total, 1)
    assert (np.bincount(drawn.labels.ravel()) == 20).all()
    counts = drawn.counts(np.full(10, 100))
    by_hand = np.zeros((50, 10), dtype=int)
    for client in range(50):
        for label, share in zip(drawn.labels[client], drawn.shares[client], strict=True):
            by_hand[client, label] += int(100 * share)
    assert (counts == by_hand).all()


def test_fedmrl_refuses_shares_that_do_not_come_out_even() -> None:
    config = PartitionConfig(kind="pathological", variant="fedmrl", clients=7, classes_per_client=2)
    with pytest.raises(DataError, match=r"7 x 2.*multiple of the 10 classes"):
        make_split(labelled(500, 10), config, Rng(0))


@pytest.mark.parametrize(("classes", "per_client", "holders"), [(10, 2, 2), (100, 10, 1)])
def test_fedre_pathological_fills_clients_in_order(classes: int, per_client: int, holders: int) -> None:
    dataset = balanced(6000 // classes * 5, classes, 6000 // classes)
    config = PartitionConfig(kind="pathological", variant="fedre", clients=10, classes_per_client=per_client)
    split = make_split(dataset, config, Rng(0))
    held = sum(table(split, dataset, part) for part in PARTS)
    assert ((held > 0).sum(axis=0) == holders).all()
    assert ((held > 0).sum(axis=1) == per_client).all()
    assert held.sum() == len(dataset)  # the official test rows are merged in
    first = np.argmax(held > 0, axis=0)
    assert (np.diff(first) >= 0).all()
    if holders == 2:  # all but the last holder of a class get less than the mean
        assert (held[first, np.arange(classes)] < dataset.y.bincount().numpy() / 2).all()


def test_fedre_dirichlet_keeps_its_own_smallest_size_and_a_quarter_for_the_test() -> None:
    dataset = balanced(500, 10, 100)
    config = PartitionConfig(kind="dirichlet", variant="fedre", clients=10, alpha=0.1)
    assert config.smallest(len(dataset)) == 40
    assert PartitionConfig(kind="dirichlet", variant="fedre", clients=100, alpha=0.1).smallest(6000) == 30
    split = make_split(dataset, config, Rng(1))
    for client in split.clients:
        rows = sum(map(len, client.parts))
        assert rows >= 40
        assert len(client.train) == int(0.75 * rows)  # as scikit-learn rounds


@pytest.mark.parametrize("variant", ["fedin", "fedre"])
def test_fair_variants_close_clients_that_hold_their_share(variant: str) -> None:
    dataset = balanced(300, 10)
    for seed in range(5):
        config = PartitionConfig(kind="dirichlet", variant=variant, clients=10, alpha=0.3, test=0.25)
        split = make_split(dataset, config, Rng(seed))
        held = sum(table(split, dataset, part) for part in PARTS)
        before = np.cumsum(held, axis=1) - held
        assert not held[before >= 300].any()


def test_plain_pathological_uses_every_class_equally_often() -> None:
    dataset = balanced(60, 10)
    config = PartitionConfig(kind="pathological", clients=15, classes_per_client=2, test=0.0)
    held = table(make_split(dataset, config, Rng(0)), dataset, "train")
    assert ((held > 0).sum(axis=1) == 2).all()
    assert ((held > 0).sum(axis=0) == 3).all()
    assert (held[held > 0] == 20).all()


def test_shards_hold_few_classes_and_equal_sizes() -> None:
    dataset = balanced(60, 10)
    config = PartitionConfig(kind="shards", clients=20, shards_per_client=2, test=0.0)
    held = table(make_split(dataset, config, Rng(0)), dataset, "train")
    assert (held.sum(axis=1) == 30).all()
    assert ((held > 0).sum(axis=1) <= 4).all()
    assert (held.sum(axis=0) == 60).all()


def test_quantity_varies_sizes_but_not_labels() -> None:
    dataset = balanced(1000, 4)
    config = PartitionConfig(kind="quantity", clients=8, alpha=1.0, test=0.0)
    held = table(make_split(dataset, config, Rng(0)), dataset, "train")
    sizes = held.sum(axis=1)
    assert sizes.max() > 2 * sizes.min()
    large = held[sizes > 400]
    assert np.abs(large / large.sum(axis=1, keepdims=True) - 0.25).max() < 0.1


def test_separate_test_rows_follow_the_training_mix() -> None:
    dataset = balanced(1000, 10, 200)
    config = PartitionConfig(kind="dirichlet", clients=10, alpha=0.3, validation=0.1)
    split = make_split(dataset, config, Rng(0))
    seen = table(split, dataset, "train") + table(split, dataset, "validation")
    test = table(split, dataset, "test")
    assert np.abs(test - seen / 1000 * 200).max() < 1
    assert (test.sum(axis=0) == 200).all()


def test_small_test_shares_are_spread_over_all_clients() -> None:
    dataset = balanced(1000, 10, 30)
    split = make_split(dataset, PartitionConfig(kind="iid", clients=100), Rng(0))
    sizes = np.array([len(client.test) for client in split.clients])
    assert sizes.sum() == 300
    assert sizes.max() <= 8


def test_a_client_too_small_for_a_test_part_keeps_its_row() -> None:
    dataset = from_arrays(np.zeros((3, 1), np.float32), np.array([0, 1, 0]))
    split = make_split(dataset, PartitionConfig(kind="iid", clients=2, test=0.5), Rng(0))
    assert [len(client.train) for client in split.clients] == [1, 1]
    assert [len(client.test) for client in split.clients] == [1, 0]


def test_held_out_clients_are_drawn_from_the_seed() -> None:
    dataset = labelled(200, 4)
    few = make_split(dataset, PartitionConfig(kind="iid", clients=10, held_out=3), Rng(0))
    same = make_split(dataset, PartitionConfig(kind="iid", clients=10, held_out=0.3), Rng(0))
    assert len(few.held_out) == 3
    assert few == same
    assert set(few.held_out) < set(few.ids)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "dirichlet", "alpha": 0.0}, "greater than 0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, "finite"),
        ({"kind": "dirichlet"}, "kind dirichlet needs alpha"),
        ({"kind": "iid", "alpha": 1.0}, "alpha has no meaning for kind iid"),
        ({"kind": "iid", "variant": "fedmrl"}, "kind iid has no variant 'fedmrl'"),
        ({"kind": "iid", "clients": 0}, "greater than or equal to 1"),
        ({"kind": "iid", "validation": 0.8}, "leave nothing to train on"),
        ({"kind": "iid", "held_out": 4}, "leaves none to train"),
        ({"kind": "iid", "held_out": float("inf")}, "leaves none to train"),
        ({"kind": "iid", "shuffle": True}, "Extra inputs"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        PartitionConfig(**({"clients": 4} | values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"kind": "iid", "clients": 500}, "100 rows cannot be divided among 500 clients"),
        ({"kind": "pathological", "classes_per_client": 6}, "but the data has 4 classes"),
        ({"kind": "shards", "shards_per_client": 30}, "4 x 30 shards"),
        (
            {"kind": "dirichlet", "alpha": 0.01, "min_size": 10, "clients": 8},
            r"raise alpha \(0.01\), lower clients \(8\) or min_size \(10\)",
        ),
        ({"kind": "iid", "min_size": 60}, r"lower clients \(4\) or min_size \(60\)"),
        ({"kind": "iid", "source": "separate"}, "no official test part"),
        ({"kind": "dirichlet", "alpha": 1e308, "min_size": 0}, "raise alpha"),
    ],
)
def test_what_the_data_cannot_give_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        make_split(labelled(100, 4), PartitionConfig(**({"clients": 4, "redraws": 20} | values)), Rng(0))


@pytest.mark.parametrize("variant", ["plain", "fedin"])
def test_a_tiny_alpha_ends(variant: str) -> None:
    config = PartitionConfig(
        kind="dirichlet", variant=variant, clients=4, alpha=1e-300, min_size=0, redraws=20
    )
    with contextlib.suppress(DataError):
        assert len(np.unique(all_rows(make_split(labelled(100, 4), config, Rng(0))))) == 100
