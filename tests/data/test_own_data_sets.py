"""A user's own arrays and data sets, of torch and Hugging Face, of one or of every client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset, TensorDataset

import potluck
from potluck.data import from_arrays, from_datasets, parquet
from potluck.data.parquet import check_size
from potluck.data.split import from_index_file
from potluck.errors import DataError, PotluckError

X, Y = torch.arange(96.0).view(12, 8), torch.arange(12) % 3


class Pictures(TorchDataset[Any]):
    """As torchvision's data sets: Pillow images, numbers, names."""

    classes = ("cat", "dog", "eel")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return Image.fromarray(np.full((4, 4), number, np.uint8)), number % 3


class Endless(IterableDataset[Any]):
    """A data set without row numbers."""

    def __iter__(self) -> Iterator[Any]:
        yield X[0], 0


def test_a_tensor_data_set_is_read() -> None:
    data = from_datasets(TensorDataset(X, Y))
    assert torch.equal(data.x, X)
    assert torch.equal(data.y, Y)
    assert (data.task.kind, data.task.classes, data.train_rows) == ("classification", 3, 12)


def test_a_subset_is_read_item_by_item() -> None:
    data = from_datasets(Subset(TensorDataset(X, Y), [4, 2, 6]))
    assert torch.equal(data.x, X[[4, 2, 6]])
    assert data.y.tolist() == [1, 2, 0]


def test_pictures_keep_their_class_names() -> None:
    data = from_datasets(Subset(Pictures(), range(3)))
    assert data.task.input == (1, 4, 4)
    assert data.class_names == ("cat", "dog", "eel")
    assert data.x[2].unique().tolist() == [2]
    assert data.x.dtype == torch.uint8


def test_clients_bring_their_parts() -> None:
    data = from_datasets(
        {
            "north": TensorDataset(X[:4], Y[:4]),
            "south": {
                "train": (X[4:8], Y[4:8]),
                "validation": (X[8:9], Y[8:9]),
                "test": Subset(TensorDataset(X, Y), [10, 11]),
            },
        }
    )
    assert (data.train_rows, data.validation_rows, len(data)) == (8, 1, 11)
    assert data.owners is not None
    assert data.owners.names == ("north", "south")
    assert data.owners.rows.tolist() == [0] * 4 + [1] * 7
    assert torch.equal(data.x, X[[0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]])


def test_the_parts_of_one_data_set_are_no_clients() -> None:
    whole = TensorDataset(X, Y)
    data = from_datasets({"train": whole, "val": whole, "test": Subset(whole, [0])})
    assert data.owners is None
    assert (data.train_rows, data.validation_rows, len(data)) == (12, 12, 25)


def test_a_column_of_a_hugging_face_data_set_names_the_clients() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["a b", "c d"] * 4, "label": [0, 1] * 4, "site": ["west", "east"] * 4}
    data = from_datasets(datasets.Dataset.from_dict(rows), by="site")
    assert data.owners is not None
    assert data.owners.names == ("east", "west")
    assert data.owners.by == "site"
    assert data.owners.rows.tolist() == [1, 0] * 4
    parts = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict(rows) for name in ("train", "test", "more")}
    )
    assert (from_datasets(parts).train_rows, len(from_datasets(parts))) == (8, 16)


def test_a_hugging_face_data_set_may_hold_vectors() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[1, 2, 3], [4, 5, 6]] * 3, "id": [*range(6)], "stay": [0.5, 1.5] * 3}
    whole = datasets.Dataset.from_dict(rows)
    data = from_datasets(whole, target="stay", task="regression")
    assert (data.task.kind, data.x[1].tolist(), data.y[:2].tolist()) == ("regression", [4, 5, 6], [0.5, 1.5])
    named = from_datasets(whole.add_column("z", rows["x"]), features="x", label="stay", task="regression")
    assert torch.equal(named.x, data.x)
    with pytest.raises(DataError, match=r"which column holds the samples\? It has x, id, z"):
        from_datasets(whole.add_column("z", rows["x"]), label="stay", task="regression")
    with pytest.raises(DataError, match=r"its columns id hold one value each, .* potluck.from_frame"):
        from_datasets(whole.remove_columns("x"), label="stay", task="regression")
    with pytest.raises(DataError, match="label and target are two names"):
        from_datasets(whole, label="stay", target="stay")


class Torn:
    """A data set whose third item cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        if number == 2:
            raise OSError("torn")
        return X[number], int(Y[number])


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (Endless(), {}, "Endless objects cannot be read by row number"),
        (iter([]), {}, "cannot be read by row number"),
        (TensorDataset(X), {}, "give two, the samples and the labels"),
        (TensorDataset(X, Y.float()), {}, "say task='regression'"),
        (TensorDataset(X, Y + 1), {}, "labels start at 1; subtract 1 or give classes=4"),
        ([X[0], X[1], X[2]], {}, "item 0 is not a pair"),
        ([(X[0], "cat"), (X[1], "dog"), (X[2], "cat")], {}, "'cat' in item 0 is not a class number"),
        ({"train": (X, Y), "north": (X, Y)}, {}, "'north' stands beside the name of a part"),
        ({"test": (X, Y)}, {}, "no split 'train'"),
        ({"north": {"train": (X, Y), "extra": (X, Y)}}, {}, "client north: 'extra' is not a part"),
        ({"north": (X, Y), "south": (X[:, :3], Y)}, {}, "client south: the samples differ in shape"),
        ({"north": (X, Y), "south": (X[:5], Y)}, {}, "client south: x is .* per label"),
        ({}, {}, "there is no client in it"),
        (TensorDataset(X, Y), {"by": "site"}, "leave out by"),
        (from_arrays(X, Y), {}, "a data set of potluck already"),
        ({1: (X, Y), "1": (X, Y)}, {}, "the number 1 and the text '1' would be one client"),
        ({"train": (X, Y), "val": (X, Y), "valid": (X, Y)}, {}, "a part is there twice"),
        ([(X, Y), (X, Y)], {}, 'name the client of each: {"north": \\(x, y\\)'),
        ([(X, Y), (X, Y), (X, Y)], {}, "name the client of each"),
        (Torn(), {}, "item 2 cannot be read \\(OSError: torn\\)"),
    ],
)
def test_what_cannot_be_read_is_named(source: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_datasets(source, **options)


@pytest.mark.parametrize(
    ("x", "y", "task", "classes", "kind"),
    [
        (X, Y.double(), "regression", 1, torch.float32),
        (X, torch.stack([Y, Y], 1), "regression", 2, torch.float32),
        (X, torch.stack([Y > 0, Y > 1, Y < 1], 1).int(), "multi-label", 3, torch.uint8),
        (torch.rand(2, 3, 4, 4), torch.arange(32).view(2, 4, 4) % 5, "segmentation", 5, torch.int64),
    ],
)
def test_other_tasks_have_a_door(x: Any, y: Any, task: Any, classes: int, kind: torch.dtype) -> None:
    data = from_arrays(x, y, task=task)
    assert (data.task.kind, data.task.classes, data.y.dtype) == (task, classes, kind)
    assert torch.equal(data.y.double(), y.double())


@pytest.mark.parametrize(
    ("x", "y", "options", "sentence"),
    [
        (X, Y, {"task": "regresion"}, "no task 'regresion'; did you mean 'regression'"),
        (
            X,
            torch.full((12,), torch.nan),
            {"task": "regression"},
            r"y holds NaN .*, the first in row 0 \(.* in 12 of 12",
        ),
        (
            X.index_put((torch.tensor([3, 5]), torch.tensor([1, 0])), torch.tensor(torch.inf)),
            Y,
            {},
            r"x holds NaN .*, the first in row 3, column 1 \(counted from 0\), in 2 of 12 rows: clean",
        ),
        (X, torch.stack([Y, Y], 1), {"task": "multi-label"}, "of 0 and 1"),
        (X, torch.stack([Y, Y], 1), {}, "say task='multi-label'"),
        (X, torch.zeros(12, 4, 4).int(), {"task": "segmentation"}, "needs images and a label per pixel"),
        (X.view(12, 2, 4).expand(12, 2, 4)[:, :, :2], Y, {}, "modality='window'"),
        (X, Y, {"clients": ["a"] * 11}, "one name per row"),
        (X, Y, {"clients": ["a"] * 11 + [None]}, "row 11 names no client"),
        (X, Y, {"clients": ["a"] * 11 + [float("nan")]}, "row 11 names no client"),
        (X, Y, {"clients": [1, "1"] * 6}, "would be one client"),
        (X, Y.float(), {}, r"give y\.astype\(int\); for another task say task='regression'"),
        (X, torch.eye(3)[Y], {}, r"one-hot classes, give y\.argmax\(1\)"),
        (X, torch.where(Y == 0, torch.nan, Y.float()), {}, "it holds NaN"),
        (X[:0], Y[:0], {}, "there is no row in it"),
        (X[:, 0], Y, {}, r"give x\[:, None\]"),
        (X, Y, {"clients": ["a"] * 12, "test": (X, Y)}, "test part names no clients"),
        (X, Y, {"test": X}, "give test as"),
        (X, Y, {"task": "regression", "strata": Y.float()}, "one class number per row"),
    ],
)
def test_a_mistake_in_arrays_is_named(x: Any, y: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_arrays(x, y, **options)


@pytest.mark.parametrize("rest", [(), ({"north": Y},)])
def test_arrays_of_each_client_have_another_door(rest: Any) -> None:
    with pytest.raises(
        DataError, match=r"for data of each client call from_datasets\(\{'north': \(x, y\), …\}\)"
    ):
        from_arrays({"north": X}, *rest)


def test_a_class_without_samples_may_be_asked_for() -> None:
    assert from_arrays(X, Y + 1, classes=4).task.classes == 4
    assert from_arrays(X, Y + 1, class_names=["none", "a", "b", "c"]).task.classes == 4


def test_labels_that_are_texts_are_numbered_in_order() -> None:
    data = from_arrays(X, ["eel", "cat", "dog"] * 4, test=(X[:1], ["dog"]))
    assert data.class_names == ("cat", "dog", "eel")
    assert data.y.tolist() == [2, 0, 1] * 4 + [1]
    with pytest.raises(DataError, match="'fox' is none of the class names"):
        from_arrays(X, ["fox"] * 12, class_names=["cat", "dog"])


def test_windows_are_normalised_per_channel() -> None:
    values = np.random.default_rng(0).normal(size=(40, 3, 16))
    x = torch.from_numpy(values).float() * torch.tensor([1.0, 5, 9])[:, None] + 2
    data = from_arrays(x, torch.arange(40) % 2, normalize=True)
    assert data.task.input == (3, 16)
    assert len(data.mean) == 3
    seen = potluck.data.DataConfig(name="arrays").preparation(data).prepare(data.x)
    torch.testing.assert_close(seen.mean((0, 2)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std((0, 2)), torch.ones(3), atol=1e-3, rtol=0)


def test_the_content_counts_clients_and_parts() -> None:
    plain = from_arrays(X, Y)
    owned = [from_arrays(X, Y, clients=[*"ab" * 6]), from_arrays(X, Y, clients=[*"ba" * 6])]
    parts = [from_arrays(X[:8], Y[:8], **{part: (X[8:], Y[8:])}) for part in ("validation", "test")]
    assert len({data.fingerprint for data in (plain, *owned, *parts)}) == 5


def test_a_run_needs_nothing_but_the_clients_data(tmp_path: Any) -> None:
    generator = np.random.default_rng(0)
    whole = {
        name: TensorDataset(torch.from_numpy(generator.normal(size=(24, 6))), torch.arange(24) % 2)
        for name in ("north", "south", "west")
    }
    result = potluck.run(
        data=from_datasets(whole),
        models=["mlp-small"],
        method="fedavg",
        training={"rounds": 1},
        out=tmp_path / "run",
    )
    assert (tmp_path / "run" / "split.json").read_text().count('"id"') == 3
    assert "north" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert result is not None


def test_a_data_set_is_written_in_one_line() -> None:
    x, y = torch.zeros(6, 4), torch.arange(6) % 2
    data = from_datasets({"a": (x, y), "b": {"train": (x, y), "test": (x[:2], y[:2])}}, name="mine")
    assert repr(data) == (
        "<data set mine: 14 rows, 2 of them for test; classification with 2 classes for samples of 4 numbers each, "
        "2 clients>"
    )


def test_a_small_file_that_becomes_huge_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Parquet file of a few kilobytes can hold any number of equal rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000_000, pa.int32()), pa.array([1.0]))
    pq.write_table(pa.table({"x": values, "y": values}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 100_000
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "1000000")
    with pytest.raises(
        DataError, match=r"bomb\.parquet would take .* \(3,000,000 rows\).*POTLUCK_DATA_LIMIT"
    ):
        potluck.from_files(tmp_path / "bomb.parquet", target="y")


def test_no_file_takes_more_than_a_third_of_the_memory_that_is_free(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"x": [0.5] * 3_000, "y": [0, 1, 2] * 1_000}), path)
    free = 3 * 16 * 3_000
    monkeypatch.delenv("POTLUCK_DATA_LIMIT", raising=False)
    monkeypatch.setattr("potluck.data.parquet.free_bytes", lambda: free - 3)
    with pytest.raises(DataError, match=r"table\.parquet would take .* \(3,000 rows\).*POTLUCK_DATA_LIMIT"):
        potluck.from_files(path, target="y", task="classification")
    for enough in (free, None):
        monkeypatch.setattr("potluck.data.parquet.free_bytes", lambda enough=enough: enough)
        assert len(potluck.from_files(path, target="y", task="classification").y) == 3_000


@pytest.mark.parametrize(
    "as_given", [float, np.float64, lambda one: np.full((3, 1, 1), one), lambda one: [one] * 3]
)
def test_mean_and_std_may_be_a_number_or_an_array(as_given: Any) -> None:
    x, y = np.zeros((6, 3, 8, 8), dtype=np.uint8), np.arange(6) % 2
    data = from_arrays(x, y, mean=as_given(0.25), std=as_given(0.5))
    assert (data.mean, data.std) == ((0.25,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0), (0.5, None), ([0.1, 0.2], 0.5), (0.5, np.nan)])
def test_a_mean_or_std_that_does_not_fit_is_told(mean: Any, std: Any) -> None:
    with pytest.raises(DataError, match="one mean and one positive std for each of the 3 channels"):
        from_arrays(np.zeros((6, 3, 8, 8)), np.arange(6) % 2, mean=mean, std=std)
    with pytest.raises(DataError, match="mean and std are 'half'; give numbers, one for each channel"):
        from_arrays(np.zeros((6, 3, 8, 8)), np.arange(6) % 2, mean="half", std=1)


# --- files of others ------------------------------------------------------------------------------------


def repeated(folder: Path, column: Any) -> Path:
    """A small file in which a long text stands in many rows, and is stored once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = folder / "bomb.parquet"
    pq.write_table(pa.table({"a": column("x" * 1000), "y": [0, 1] * 1000}), file, row_group_size=500)
    assert file.stat().st_size < 50_000
    return file


@pytest.mark.parametrize(
    "column",
    [
        lambda text: [text] * 2000,
        lambda text: [{"bytes": text.encode(), "path": None}] * 2000,
        lambda text: [[text]] * 2000,
    ],
)
def test_a_text_counts_in_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: Any) -> None:
    file = repeated(tmp_path, column)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "1000000")
    with pytest.raises(DataError, match=r"bomb\.parquet would take .* \(2,000 rows\).*POTLUCK_DATA_LIMIT"):
        potluck.from_files(file, target="y")
    check_size(file, ["y"])
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "3000000")
    check_size(file)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.json", "a.yaml"])
def test_a_pipe_does_not_keep_anybody_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    read: Any = {
        ".json": lambda path: potluck.Split.load(path),
        ".yaml": potluck.Experiment.load,
    }.get(Path(name).suffix, lambda path: potluck.from_files(path, target="y"))
    with pytest.raises(PotluckError, match=rf"{name} cannot be read.*it is no plain file"):
        read(tmp_path / name)


def test_a_file_larger_than_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.data.parquet.free_bytes", lambda: 1 << 36)
    for name in ("a.csv", "a.json"):
        (tmp_path / name).write_text("a,y\n1,0\n")
        os.truncate(tmp_path / name, 1 << 36)  # without a byte on the disk
    with pytest.raises(DataError, match=r"a\.csv has more than 8\.0 GiB"):
        potluck.from_files(tmp_path / "a.csv", target="y")
    with pytest.raises(DataError, match=r"a\.json cannot be read \(it has more than 1,073,741,824 bytes"):
        potluck.Split.load(tmp_path / "a.json")


def test_what_no_table_holds_is_told(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "wide.csv").write_text("a," * 60_000 + "y\n" + "1," * 60_000 + "0\n")
    with pytest.raises(DataError, match=r"wide\.csv has more than 50,000 columns"):
        potluck.from_files(tmp_path / "wide.csv", target="y")
    (tmp_path / "wide.csv").write_text('"a\n",' + "b," * 60_000 + "y\n" + "1," * 60_001 + "0\n")
    with pytest.raises(DataError, match=r"wide\.csv has more than 50,000 columns"):
        potluck.from_files(tmp_path / "wide.csv", target="y")
    table = pa.table({"a": [b"\xff"] * 40, "y": ["k", "l"] * 20})
    pq.write_table(table, tmp_path / "bytes.parquet")
    with pytest.raises(DataError, match="column 'a' holds a bytes in a cell"):
        potluck.from_files(tmp_path / "bytes.parquet", target="y")
    odd = table.replace_schema_metadata({"pandas": '{"index_columns": [5], "columns": 3}'})
    pq.write_table(odd, tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=r"odd\.parquet cannot be read"):
        potluck.from_files(tmp_path / "odd.parquet", target="y")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"\\ud800": {"train": [1], "test": [4]}}', "letters that cannot be printed"),
        ('{"\\u001b[2J": {"train": [1], "test": [4]}}', "letters that cannot be printed"),
    ],
)
def test_a_split_that_nobody_wrote_is_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "s.json").write_text(text)
    data = from_arrays(np.zeros((6, 3), dtype=np.float32), np.arange(6) % 2)
    with pytest.raises(DataError, match=words):
        from_index_file(tmp_path / "s.json", data)


def as_varint(number: int, length: int = 1) -> bytes:
    """A number as the head of a Parquet file has it, as long as another one that it replaces."""
    rest = 2 * number
    digits = [rest >> 7 * place & 127 for place in range(max(length, -(-rest.bit_length() // 7)))]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def test_long_texts_count_whatever_the_head_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file, texts = tmp_path / "bomb.parquet", [f"{row:08d}" + "x" * 20_000 for row in range(200)]
    options: Any = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"a": texts, "y": [0, 1] * 100}), file, **options)
    told = as_varint(pq.ParquetFile(file).metadata.row_group(0).total_byte_size)
    assert file.read_bytes().count(told) == 1
    file.write_bytes(file.read_bytes().replace(told, as_varint(1000, len(told))))
    assert pq.ParquetFile(file).metadata.row_group(0).total_byte_size == 1000
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "1000000")
    with pytest.raises(DataError, match=r"bomb\.parquet would take .* \(200 rows\).*POTLUCK_DATA_LIMIT"):
        potluck.from_files(file, target="y")


@pytest.mark.parametrize("key", ["pandas", "PANDAS_ATTRS"])
def test_notes_of_pandas_that_are_nested_without_end_are_named(tmp_path: Path, key: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"a": [1.0] * 4, "y": [0, 1] * 2}).replace_schema_metadata({key: "[" * 100_000})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read \(maximum recursion depth.*: check the"):
        potluck.from_files(tmp_path / "a.parquet", target="y")


def test_many_short_texts_are_counted_in_few_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part brings all texts before it, so the time grows with the square of their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [f"text {row}" for row in range(40_000)]}), tmp_path / "a.parquet")
    counted = Mock(side_effect=parquet._bytes_of)
    monkeypatch.setattr(parquet, "_bytes_of", counted)
    check_size(tmp_path / "a.parquet")
    assert 1 <= counted.call_count <= 4
