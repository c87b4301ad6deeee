"""The natural split: every client keeps the rows it brought."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import Experiment
from potluck.core.rng import Rng
from potluck.data import NaturalConfig, from_arrays, from_datasets, from_frame, make_split
from potluck.data.client_splits import ClientSplit, ClientSplits
from potluck.data.scaling import Scaling
from potluck.errors import ConfigError, DataError
from potluck.federation.groups import shared_test


def owned(owners: list[str], tests: list[str] | None = None) -> Any:
    def part(names: list[str]) -> tuple[Any, Any, Any]:
        return np.zeros((len(names), 2), np.float32), np.arange(len(names)) % 2, names

    x, y, clients = part(owners)
    return from_arrays(x, y, classes=2, clients=clients, test=part(tests) if tests else None)


def rows_of(client: ClientSplit) -> list[int]:
    return sorted(np.concatenate(client.parts).tolist())


@settings(max_examples=60, deadline=None)
@given(
    owners=st.lists(st.sampled_from("abcde"), min_size=1, max_size=60),
    tests=st.lists(st.sampled_from("abcde"), max_size=20),
    validation=st.floats(0, 0.4),
    test=st.floats(0, 0.4),
    seed=st.integers(0, 99),
)
def test_everyone_keeps_their_own_rows(
    owners: list[str], tests: list[str], validation: float, test: float, seed: int
) -> None:
    tests = [name for name in tests if name in owners]
    data, config = owned(owners, tests), NaturalConfig(validation=validation, test=test)
    split = make_split(data, config, Rng(seed))
    assert split == make_split(data, config, Rng(seed))
    everyone = owners + tests
    for client in split.clients:
        assert rows_of(client) == [row for row, name in enumerate(everyone) if name == client.id]
        assert len(client.train)
        if client.id in tests:
            assert (client.test >= len(owners)).all()
            assert len(client.test) == tests.count(client.id)
        assert (client.train < len(owners)).all()
    assert split.ids == tuple(sorted(set(owners)))


def test_a_client_s_cut_does_not_depend_on_the_others() -> None:
    few, more = (
        make_split(owned([*names]), NaturalConfig(), Rng(3)) for names in ("a" * 20, "a" * 20 + "b" * 9)
    )
    assert rows_of(few["a"]) == rows_of(more["a"])
    assert few["a"].test.tolist() == more["a"].test.tolist()


def test_small_clients_are_left_out_and_named_ones_held_out() -> None:
    data = owned([*"a" * 8, *"b" * 2, *"c" * 8])
    split = make_split(data, NaturalConfig(min_size=3, held_out=("c",)), Rng(0))
    assert split.ids == ("a", "c")
    assert split.held_out == ("c",)
    assert len(make_split(data, NaturalConfig(held_out=0.34), Rng(0)).held_out) == 1
    for written, names in (("c", ("c",)), ([3, "a"], ("3", "a"))):
        assert NaturalConfig.model_validate({"held_out": written}).held_out == names


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (NaturalConfig(by="hospital"), "cannot be split by 'hospital'; leave out by"),
        (NaturalConfig(min_size=99), "no client of data set 'arrays' has 99 rows"),
        (NaturalConfig(held_out=("d",)), "names 'd', which is not a client"),
        (NaturalConfig(held_out=9), "leaves none to train"),
    ],
)
def test_what_does_not_fit_is_named(config: NaturalConfig, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        make_split(owned([*"ab" * 8]), config, Rng(0))


def test_a_client_without_training_rows_is_named() -> None:
    data = owned([*"a" * 8], [*"ab"])
    with pytest.raises(DataError, match="client 'b' has no training rows"):
        make_split(data, NaturalConfig(), Rng(0))
    assert make_split(data, NaturalConfig(held_out=("b",)), Rng(0)).held_out == ("b",)


def test_data_without_clients_cannot_be_split_that_way() -> None:
    with pytest.raises(DataError, match="does not say which client a row comes from"):
        make_split(from_arrays(np.zeros((4, 2)), np.arange(4) % 2), NaturalConfig(), Rng(0))
    table = from_frame(
        pd.DataFrame({"age": [1.0, 2.0] * 2, "site": [*"pqpq"], "stay": [*"uvuv"]}), target="stay"
    )
    with pytest.raises(DataError, match=r"where the table is read, from_frame\(…, by='site'\) or from_files"):
        make_split(table, NaturalConfig(by="site"), Rng(0))


def test_the_partition_can_be_left_out_where_the_data_know_their_clients() -> None:
    data = from_datasets(
        {"b": (torch.zeros(8, 2), torch.arange(8) % 2), "a": (torch.ones(8, 2), torch.arange(8) % 2)}
    )
    experiment = Experiment.make(data=data, models="mlp-small", method="local")
    assert experiment.make_split(data).ids == ("b", "a")
    group = {"data": data, "models": "mlp-small"}
    both = Experiment.make(
        federation=[group, group | {"partition": {"kind": "iid", "clients": 2}}], method="local"
    )
    assert both.make_split((data, data)).ids == ("b", "a", "2", "3")
    with pytest.raises(ConfigError, match="'partition' is missing"):
        Experiment.make(data="digits", models="mlp-small", method="local")
    with pytest.raises(ConfigError, match="no split 'naturl'; did you mean 'natural'"):
        Experiment.make(data="digits", partition={"kind": "naturl"}, models="mlp-small", method="local")


def test_the_shared_test_set_has_the_test_rows_of_all_clients() -> None:
    data = owned([*"a" * 8, *"b" * 8], [*"aa"])
    split = make_split(data, NaturalConfig(), Rng(0))
    shared = shared_test(data, split.clients)
    assert shared.tolist() == sorted([*split["b"].test.tolist(), 16, 17])
    assert len(split["b"].test)


def test_the_shared_test_set_leaves_out_rows_of_nobody() -> None:
    """They would be measured as no client sees them, for example without anyone's standardisation."""
    data = owned([*"a" * 8, *"b" * 8, *"c"], [*"aabbcc"])
    split = make_split(data, NaturalConfig(min_size=5), Rng(0))
    assert split.ids == ("a", "b")
    assert shared_test(data, split.clients).tolist() == [17, 18, 19, 20]
    bare = replace(data, owners=None)
    assert shared_test(bare, split.clients).tolist() == [17, 18, 19, 20, 21, 22]
    scaled = ClientSplits.of(replace(one, scaling=Scaling((0,), (1.0,), (2.0,))) for one in split.clients)
    assert shared_test(bare, scaled).tolist() == [17, 18, 19, 20]


def test_an_official_validation_part_is_dealt_like_the_test_part() -> None:
    x, y = np.zeros((90, 2), np.float32), np.arange(90) % 3
    data = from_arrays(x, y, validation=(x[:30], y[:30]), test=(x[:60], y[:60]))
    for variant in ({}, {"variant": "fedmrl"}):
        config = {"kind": "pathological", "clients": 3, "classes_per_client": 2, **variant, "validation": 0.5}
        experiment = Experiment.make(data=data, partition=config, models="mlp-small", method="local")
        split = experiment.make_split(data)
        held = np.concatenate([client.validation for client in split.clients])
        tested = np.concatenate([client.test for client in split.clients])
        assert {*held.tolist()} <= {*range(90, 120)}
        assert {*tested.tolist()} <= {*range(120, 180)}
        assert len(held) > 20
        assert len(tested) > 50
        for client in split.clients:
            seen = {*y[client.train].tolist()}
            assert {*data.y[client.validation].tolist()} <= seen
            assert {*data.y[client.test].tolist()} <= seen


@pytest.mark.parametrize("name", ["", " ", "\t", "\x1c"])
def test_a_client_without_a_name_is_refused_before_it_trains(name: str) -> None:
    """No file of a split may have one, so the run could not be opened."""
    rows = (np.zeros((8, 2)), np.arange(8) % 2)
    table = pd.DataFrame({"a": np.arange(8.0), "who": [name, "b"] * 4, "y": ["k", "l"] * 4})
    for make in (
        lambda: from_datasets({name: rows, "b": rows}),
        lambda: from_arrays(*rows, clients=[name, "b"] * 4),
        lambda: from_frame(table, target="y", by="who"),
    ):
        with pytest.raises(DataError, match=r"a client is called .*: give it a name that can be seen"):
            make()
