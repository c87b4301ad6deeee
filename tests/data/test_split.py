from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import ClientSplit, PartitionConfig, Split, from_arrays, from_index_file, make_split
from potluck.errors import DataError


@pytest.fixture
def dataset() -> Dataset:
    return from_arrays(torch.zeros(40, 2), np.tile(np.arange(4), 10))


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_split_survives_the_disk(dataset: Dataset, tmp_path: Path) -> None:
    config = PartitionConfig(kind="iid", clients=4, validation=0.2, held_out=1)
    split = make_split(dataset, config, Rng(0))
    path = tmp_path / "split.json"
    split.save(path)
    again = Split.load(path)
    assert again == split
    assert again.held_out == split.held_out
    for mine, theirs in zip(split.clients, again.clients, strict=True):
        assert mine.id == theirs.id
        for a, b in zip(mine.parts, theirs.parts, strict=True):
            assert b.dtype == np.int64
            np.testing.assert_array_equal(a, b)
    assert from_index_file(path, dataset) == split
    assert [file.name for file in tmp_path.iterdir()] == ["split.json"]


def test_the_hash_is_the_same_everywhere() -> None:
    split = Split.of(
        [ClientSplit("a", rows(0, 2), rows(), rows(1)), ClientSplit("b", rows(3), rows(4), rows())], ["b"]
    )
    assert split.hash == "8b096eda021c598d767346f21731f1ea164ba9a03becfb781758d4baa4797358"
    assert split != Split.of(split.clients)
    assert split != Split.of(reversed(split.clients), ["b"])


def test_moving_a_row_between_parts_changes_the_hash() -> None:
    one = Split.of([ClientSplit("a", rows(0, 1), rows(2), rows())])
    other = Split.of([ClientSplit("a", rows(0), rows(1, 2), rows())])
    assert one.hash != other.hash


def test_a_changed_file_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    make_split(dataset, PartitionConfig(kind="iid", clients=2), Rng(0)).save(path)
    content = json.loads(path.read_text())
    content["clients"][0]["train"].pop()
    path.write_text(json.dumps(content))
    for read in (Split.load, lambda file: from_index_file(file, dataset)):
        with pytest.raises(DataError, match="was changed after it was written"):
            read(path)


def test_counts_are_training_rows_by_client_and_class(dataset: Dataset) -> None:
    split = Split.of(
        [ClientSplit("a", rows(0, 1, 4), rows(), rows(2)), ClientSplit("b", rows(3), rows(), rows())]
    )
    assert split.counts(dataset.y, 4).tolist() == [[2, 1, 0, 0], [0, 0, 0, 1]]


def test_clients_are_found_by_id() -> None:
    split = Split.of([ClientSplit("ward", rows(0), rows(), rows())])
    assert split["ward"].train.tolist() == [0]
    with pytest.raises(DataError, match="no client 'x'"):
        split["x"]


def test_saved_splits_may_hold_empty_clients(dataset: Dataset, tmp_path: Path) -> None:
    config = PartitionConfig(kind="dirichlet", clients=20, alpha=0.01, min_size=0)
    split = make_split(dataset, config, Rng(0))
    assert min(len(client.train) for client in split.clients) == 0
    split.save(tmp_path / "split.json")
    assert from_index_file(tmp_path / "split.json", dataset) == split


@pytest.mark.parametrize(
    "content",
    [
        {"clients": [{"id": "a", "train": [2, 0], "test": [1]}, {"id": 7, "train": [3], "validation": [4]}]},
        {"a": {"train": [2, 0], "test": [1]}, "7": {"train": [3], "validation": [4]}},
    ],
)
def test_own_index_files(content: Any, dataset: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    split = from_index_file(path, dataset)
    assert split.ids == ("a", "7")
    assert [part.tolist() for part in split["a"].parts] == [[0, 2], [], [1]]
    assert [part.tolist() for part in split["7"].parts] == [[3], [4], []]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"a": {"train": [0, 40]}}, "client 'a' has row 40, but the data has rows 0 to 39"),
        ({"a": {"train": [-1]}}, "has row -1"),
        ({"a": {"train": [0, 1, 1]}}, "has row 1 more than once"),
        ({"a": {"train": [0], "test": [0]}}, "has row 0 more than once"),
        ({"a": {"train": [0, 5]}, "b": {"train": [5]}}, "row 5 belongs to client 'a' and to 'b'"),
        ({"a": {"test": [0]}}, "no training rows"),
        ({"a": {"train": [0.5]}}, "not a list of row numbers"),
        ({"a": {"train": [10**30]}}, "not a list of row numbers"),
        ({"a": {"train": "all"}}, "not a list of row numbers"),
        ({"a": {"trian": [0]}}, "unknown entry 'trian'"),
        ({"clients": [{"train": [0]}]}, "no id"),
        ({"": {"train": [0]}}, "a client has an empty id: give it a name"),
        ({"clients": [{"id": "a", "train": [0]}, {"id": "a", "train": [1]}]}, "two clients with the id 'a'"),
        ({"clients": 3}, "must be an object"),
        ({"a": [0, 1]}, "must be an object"),
        ([1, 2], "is not a split"),
        ({}, "names no client"),
        ({"clients": [{"id": "a", "train": [0]}], "held_out": ["b"]}, "'b', which is no client"),
        ({"clients": [{"id": "a", "train": [0]}], "held_out": ["a"]}, "leaves no client to train"),
    ],
)
def test_bad_index_files_give_one_sentence(
    content: Any, sentence: str, dataset: Dataset, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=sentence) as caught:
        from_index_file(path, dataset)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_index_files(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        from_index_file(tmp_path / "none.json", dataset)
    (tmp_path / "broken.json").write_text('{"clients": [')
    with pytest.raises(DataError, match="is not JSON"):
        from_index_file(tmp_path / "broken.json", dataset)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": {"train": [0]}, "b": {"train": [1]}, "a": {"train": [2]}}', "a"),
        ('{"clients": [{"id": "a", "train": [0], "train": [1]}]}', "train"),
    ],
)
def test_a_key_that_stands_twice_is_named(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "split.json").write_text(text)
    with pytest.raises(DataError, match=f"has the key '{key}' twice"):
        from_index_file(tmp_path / "split.json", from_arrays(np.zeros((3, 2)), np.arange(3)))
