"""What Parquet files take in memory, whatever their heads say of it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from potluck.data.own.files import from_files
from potluck.data.parquet import TooLargeError, check_size
from potluck.data.parquet_pages import pages_of
from potluck.errors import DataError

ROWS = 1_000
LISTED = 1_000_003  # a number that stands nowhere else in the head


def one_long_list(kind: pa.DataType) -> pa.Array:
    """One row with many equal values."""
    value = "x" if kind == pa.string() else 0
    values = pa.array([value], kind).take(pa.array(np.zeros(LISTED, np.int64)))
    return pa.ListArray.from_arrays(pa.array([0, LISTED], pa.int32()), values)


def write(path: Path, column: pa.Array, **options: Any) -> Path:
    rows = len(column)
    table = pa.table({"x": np.zeros(rows), "y": np.arange(rows) % 2, "z": column})
    pq.write_table(table, path, compression="zstd", write_statistics=False, **options)
    return path


def claim(path: Path, there: int, claimed: int = 1) -> None:
    """Let the head of a file say another number than it does, in as many bytes."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    length, zigzag = len(varint(there)), 2 * claimed
    groups = [(zigzag >> 7 * place) & 127 for place in range(length)]
    other = bytes([*(group | 128 for group in groups[:-1]), groups[-1]])
    head = content[start:]
    assert varint(there) in head
    path.write_bytes(content[:start] + head.replace(varint(there), other))


def varint(number: int) -> bytes:
    """A number as the head of a Parquet file has it."""
    zigzag, found = 2 * number, b""
    while zigzag > 127:
        zigzag, found = zigzag >> 7, found + bytes([zigzag & 127 | 128])
    return found + bytes([zigzag])


@pytest.mark.parametrize("kind", [pa.int32(), pa.string()], ids=str)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_lists_are_counted_whatever_the_head_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, version: str
) -> None:
    file = write(tmp_path / "a.parquet", one_long_list(kind), data_page_version=version)
    claim(file, LISTED)
    assert file.stat().st_size < 10_000
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "4000000")
    with pytest.raises(TooLargeError, match=r"a\.parquet would take"):
        check_size(file)


def test_bytes_of_a_fixed_length_are_counted_in_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 10_000
    file = write(tmp_path / "a.parquet", pa.array([b"x" * length] * ROWS, pa.binary(length)))
    assert file.stat().st_size < length
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", str(ROWS * length - 1))
    with pytest.raises(DataError, match=r"a\.parquet would take"):
        from_files(file, target="y", task="classification", features=["x"])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([{"a": True}] * ROWS),
        pa.array([[]] * ROWS, pa.list_(pa.int8())),
        pa.array([Decimal("1.5")] * ROWS, pa.decimal128(38, 1)),
        pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int8())),
    ],
    ids=["struct", "list", "decimal", "map"],
)
def test_what_becomes_objects_of_python_is_counted_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: pa.Array
) -> None:
    file = write(tmp_path / "a.parquet", column)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", str(100 * ROWS))
    with pytest.raises(DataError, match=r"a\.parquet would take"):
        from_files(file, target="y", task="classification", features=["x"])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_what_pages_have_is_what_was_written(tmp_path: Path, version: str, compression: str) -> None:
    file = tmp_path / "a.parquet"
    lists = pa.array([list(range(row % 5)) for row in range(5 * ROWS)])
    names = pa.array([None if row % 3 else f"a{row}" for row in range(5 * ROWS)])
    pq.write_table(
        pa.table({"lists": lists, "names": names}),
        file,
        row_group_size=ROWS,
        data_page_size=100,
        data_page_version=version,
        compression=compression,
        write_page_checksum=True,
    )
    metadata = pq.read_metadata(file)
    chunks = [metadata.row_group(group).column(place) for group in range(5) for place in range(2)]
    assert [found.values for found in pages_of(file, metadata)] == [chunk.num_values for chunk in chunks]
    assert all(found.size for found in pages_of(file, metadata))


def test_pages_that_cannot_be_read_are_said_to_be_so(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", pa.array(["a", "b"] * ROWS))
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    with pytest.raises(DataError, match=r"a\.parquet is not readable Parquet \(.*\): fetch the file again"):
        check_size(file)


def test_columns_that_share_their_pages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", pa.array(np.zeros(ROWS)))
    metadata = pq.read_metadata(file)
    group = metadata.row_group(0)
    shared = Mock(num_columns=20, column=lambda place: group.column(0))
    forged = Mock(num_row_groups=20, row_group=lambda number: shared)
    with pytest.raises(ValueError, match="its columns do not fit into it"):
        list(pages_of(file, forged))


HEAD = bytes.fromhex("1500 1520 1520 2c 15 80897a 15 10 15 06 15 06 00 00")


def values_in(path: Path, head: bytes) -> int:
    """How many values a file has whose only page has this head."""
    path.write_bytes(b"PAR1" + head + bytes(16))
    column = Mock(
        data_page_offset=4, has_dictionary_page=False, total_compressed_size=len(head) + 16, num_values=1
    )
    group = Mock(num_columns=1, column=lambda place: column)
    (found,) = pages_of(path, Mock(num_row_groups=1, row_group=lambda number: group))
    return found.values


@pytest.mark.parametrize("more", ["", "a602", "a93502040600", "a80161", "ac18017800", "a1", "a7" + "00" * 8])
def test_what_a_later_version_adds_to_a_head_is_left_out(tmp_path: Path, more: str) -> None:
    head = HEAD[:-1] + bytes.fromhex(more) + b"\0"
    assert values_in(tmp_path / "a", head) == 1_000_000


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (HEAD[:-2] + bytes.fromhex("05 02 02 00 00"), "fields that are none"),  # the number again
        (HEAD[:-2] + bytes.fromhex("05 828008 02 00 00"), "fields that are none"),  # of 16 bits it is field 1
        (HEAD.replace(bytes.fromhex("2c 15"), bytes.fromhex("2c 16")), "fields that are none"),
        (HEAD.replace(bytes.fromhex("80897a"), bytes.fromhex("808080808001")), "too long a number"),
        (HEAD.replace(bytes.fromhex("80897a"), bytes.fromhex("ffffffff0f")), "is not whole"),
        (HEAD[:-1] + bytes.fromhex("ab 01"), "another form"),
        (HEAD[:-1] + bytes.fromhex("ac") * 30, "nested too deeply"),
        (HEAD[:-1] + bytes.fromhex("a9 f1 ffffff7f"), "cut off"),
        (HEAD[:-1] + bytes.fromhex("a8 ffffffff0f"), "cut off"),
        (bytes.fromhex("1500 00"), "is not whole"),
    ],
)
def test_a_head_that_may_be_read_in_two_ways_is_refused(tmp_path: Path, head: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        values_in(tmp_path / "a", head)
