"""Values of Parquet files that are written as differences, and what a page or a schema may claim of them."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import tracemalloc
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from potluck.data.own.files import read_table
from potluck.data.parquet import File, TooLargeError, check_size, read_images, read_labels, read_texts
from potluck.data.parquet_differences import shared_in
from potluck.data.parquet_pages import Page, pages_of
from potluck.errors import DataError

NUMBERS, LENGTHS, SHARED = 5, 6, 7
NAMES = {NUMBERS: "DELTA_BINARY_PACKED", LENGTHS: "DELTA_LENGTH_BYTE_ARRAY", SHARED: "DELTA_BYTE_ARRAY"}
PACKED = ["none", "snappy", "gzip", "brotli", "zstd", "lz4"]
TEXT = "x" * 300


def number(value: int) -> bytes:
    """An unsigned number, seven bits in each byte."""
    found = b""
    while value > 127:
        value, found = value >> 7, found + bytes([value & 127 | 128])
    return found + bytes([value])


def blocks(size: int, parts: int, count: int, first: int = 0) -> bytes:
    """The head of blocks of differences."""
    return b"".join(map(number, (size, parts, count, 2 * first)))


def write(file: Path, column: pa.Array, encoding: int, **options: Any) -> Path:
    """A file with one column in this encoding."""
    table = pa.table({"x": column})
    pq.write_table(table, file)
    leaf = pq.ParquetFile(file).schema.column(0).path
    encodings = {leaf: NAMES[encoding]}
    pq.write_table(table, file, use_dictionary=False, column_encoding=encodings, **options)
    return file


def lying(file: Path, encoding: int, lie: bytes) -> Path:
    """A file with one text, the page of which begins with a lie."""
    schema = pa.schema([pa.field("x", pa.string(), nullable=False)])
    table = pa.Table.from_arrays([pa.array([TEXT])], schema=schema)
    settings = {"compression": "none", "write_statistics": False, "store_schema": False}
    pq.write_table(table, file, use_dictionary=False, column_encoding={"x": NAMES[encoding]}, **settings)
    content, true = file.read_bytes(), blocks(128, 4, 1, len(TEXT)) + TEXT.encode()
    true = true if encoding == LENGTHS else blocks(128, 4, 1) + true
    assert content.count(true) == 1
    file.write_bytes(content.replace(true, lie.ljust(len(true), b"\0")))
    return file


def test_an_honest_page_is_read(tmp_path: Path) -> None:
    file = lying(tmp_path / "a.parquet", SHARED, blocks(128, 4, 1) + blocks(128, 4, 1, 5) + b"abcde")
    assert read_table(file)["x"].tolist() == ["abcde"]


@pytest.mark.parametrize("count", [2, 2**30, 2**32 - 1, 2**60])
@pytest.mark.parametrize("place", ["lengths", "shared", "behind"])
def test_pages_that_claim_more_texts_than_they_have_are_refused(
    tmp_path: Path, place: str, count: int
) -> None:
    """Arrow takes memory for as many as are claimed before it looks for them."""
    claim = blocks(2**31, 1, count) + b"\0\0"
    lie = blocks(128, 4, 1) + claim if place == "behind" else claim
    file = lying(tmp_path / "a.parquet", LENGTHS if place == "lengths" else SHARED, lie)
    with pytest.raises(
        DataError, match=r"a\.parquet is not readable Parquet \(a page in it claims more values"
    ):
        read_table(file)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (blocks(2**31, 1, 1), "blocks that are none"),
        (blocks(2**31, 2**26, 1), "blocks that are none"),
        (blocks(0, 1, 1), "blocks that are none"),
        (blocks(128, 0, 1), "blocks that are none"),
        (blocks(128, 3, 1), "blocks that are none"),
        (blocks(128, 4, 1)[:-1] + number(1), "texts shorter than none"),
        (b"\xff" * 400, "cut off"),
    ],
)
def test_blocks_that_nobody_writes_are_refused(tmp_path: Path, lie: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_table(lying(tmp_path / "a.parquet", SHARED, lie))


@pytest.mark.parametrize("encoding", NAMES)
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_honest_files_are_read_as_they_were(tmp_path: Path, encoding: int, packed: str, version: str) -> None:
    texts = sorted(f"a{7**place % 10 ** (place % 12)}" for place in range(300))
    values = [int(text[1:]) for text in texts] if encoding == NUMBERS else texts
    columns = [
        pa.array(values),
        pa.array([None if place % 3 else value for place, value in enumerate(values)]),
        pa.array([values[place : place + place % 4] or None for place in range(300)]),
        pa.array([None] * 300, pa.array(values).type),
        pa.array(values[:0], pa.array(values).type),
    ]
    for column in columns:
        for size in (100, 1 << 20):
            options = {"compression": packed, "data_page_version": version, "data_page_size": size}
            file = write(tmp_path / "a.parquet", column, encoding, **options)
            pd.testing.assert_frame_equal(read_table(file), pd.read_parquet(file))


def pages_in(file: Path) -> tuple[bytes, tuple[Page, ...]]:
    (found,) = pages_of(file, 1)
    return file.read_bytes(), found.differences


def shared_by(content: bytes, page: Page, levels: tuple[int, int] = (0, 1)) -> int:
    return shared_in(cast(mmap.mmap, content), page, levels)


def test_what_texts_share_is_counted(tmp_path: Path) -> None:
    """Texts of up to 100,000 letters, so that lengths and the steps between them are narrow and wide."""
    texts = ["ab" * (7**place % 2 ** (place % 16)) for place in range(1_000)]
    file = write(tmp_path / "a.parquet", pa.array(texts), SHARED, compression="none")
    content, pages = pages_in(file)
    told = sum(shared_by(content, page) for page in pages)
    written = file.stat().st_size
    assert 0 < sum(map(len, texts)) - told < written


def test_long_texts_in_lists_are_not_thought_to_be_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = [[f"{'b' * 900}{row}{item}" for item in range(3)] for row in range(2_000)]
    file = write(tmp_path / "a.parquet", pa.array(lists), SHARED)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "8000000")
    assert read_table(file)["x"].map(list).tolist() == lists
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "5000000")
    with pytest.raises(TooLargeError):
        check_size(file)


@pytest.mark.parametrize("encoding", [LENGTHS, SHARED])
def test_what_arrow_takes_for_each_text_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: int
) -> None:
    """It has a length and a place for each text of a page; 10⁹ of them without a letter fit into a short file."""
    file = write(tmp_path / "a.parquet", pa.array([""] * 100_000), encoding)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "2799999")
    with pytest.raises(TooLargeError):
        check_size(file)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "2800000")
    check_size(file)


def test_texts_of_a_fixed_length_may_share_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", pa.array([b"b" * 500] * 2_000, pa.binary(500)), SHARED)
    assert len(read_table(file)) == 2_000
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "900000")
    with pytest.raises(TooLargeError):
        check_size(file)


def test_columns_that_are_not_read_are_not_looked_at(tmp_path: Path) -> None:
    file = lying(tmp_path / "a.parquet", SHARED, b"\xff" * 400)
    check_size(file, ["y"])
    with pytest.raises(DataError):
        check_size(file, ["x"])


def differences(values: list[int], size: int, parts: int) -> bytes:
    """Numbers in blocks of this size and so many parts; the last block has no bits for parts without numbers."""
    found, each = blocks(size, parts, len(values), values[0]), size // parts
    steps = [after - before for before, after in itertools.pairwise(values)]
    for start in range(0, len(steps), size):
        block = steps[start : start + size]
        least = min(block)
        groups = [[step - least for step in block[at : at + each]] for at in range(0, len(block), each)]
        widths = [max(group).bit_length() for group in groups]
        found += number(2 * least if least >= 0 else -2 * least - 1) + bytes(widths).ljust(parts, b"\xff")
        for group, width in zip(groups, widths, strict=True):
            bits = sum(step << width * place for place, step in enumerate(group))
            found += bits.to_bytes(width * each // 8, "little")
    return found


@pytest.mark.parametrize(("size", "parts"), [(128, 4), (128, 1), (256, 8), (2_048, 8), (65_536, 2_048)])
@pytest.mark.parametrize("count", [1, 2, 33, 128, 129, 5_000, 200_000])
def test_blocks_of_every_size_are_counted(size: int, parts: int, count: int) -> None:
    """Other programs write larger blocks than Arrow does."""
    lengths = [pow(7, place, 2 ** (place % 31)) if place % 5 else 0 for place in range(5_000)]
    lengths = (lengths * (count // len(lengths) + 1))[:count]
    content = differences(lengths, size, parts) + differences([0] * count, 128, 4)
    page = Page(0, len(content), len(content), 0, count, SHARED, True, (0, 0), False)
    assert shared_by(content, page) == sum(lengths)
    with pytest.raises(ValueError, match="claims more values"):
        shared_by(content, dataclasses.replace(page, values=count - 1))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_an_unpacked_page_is_in_memory_once(tmp_path: Path, version: str) -> None:
    texts = pa.array(["b" * 10_000_000, "c"])
    options = {"compression": "zstd", "data_page_version": version, "write_statistics": False}
    content, (page,) = pages_in(write(tmp_path / "a.parquet", texts, SHARED, **options))
    tracemalloc.start()
    try:
        assert shared_by(content, page) == 0
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()


def test_pages_packed_as_hadoop_does_are_read(tmp_path: Path) -> None:
    texts = pa.array(["b" * 100 + str(row) for row in range(100)])
    content, (page,) = pages_in(write(tmp_path / "a.parquet", texts, SHARED, compression="none"))
    told = shared_by(content, page)
    body = content[page.place : page.place + page.packed]
    pieces = b""
    for piece in (body[:50], body[50:]):
        packed = pa.Codec("lz4_raw").compress(piece, asbytes=True)
        pieces += len(piece).to_bytes(4, "big") + len(packed).to_bytes(4, "big") + packed
    hadoop = dataclasses.replace(page, place=0, packed=len(pieces), codec=5)
    assert shared_by(pieces, hadoop) == told > 0
    for broken in (pieces[:-1], pieces[:6], b"\xff" * 20):
        with pytest.raises(ValueError, match="cut off"):
            shared_by(broken, dataclasses.replace(hadoop, packed=len(broken)))


def test_levels_as_old_writers_have_them_are_skipped(tmp_path: Path) -> None:
    texts = pa.array(["b" * 100 + str(row) for row in range(100)])
    content, (page,) = pages_in(write(tmp_path / "a.parquet", texts, SHARED, compression="none"))
    body = content[page.place : page.place + page.packed]
    values = body[4 + int.from_bytes(body[:4], "little") :]
    old = dataclasses.replace(page, place=0, packed=13 + len(values), levels=(4, 4))
    assert shared_by(b"\xff" * 13 + values, old) == shared_by(content, page)
    with pytest.raises(ValueError, match="levels of another encoding"):
        shared_by(content, dataclasses.replace(page, levels=(5, 5)))
    with pytest.raises(ValueError, match="packed in a way"):
        shared_by(content, dataclasses.replace(page, codec=3))


@pytest.mark.parametrize(("text", "refused"), [("b" * 500, False), ("b", True)])
def test_a_writer_whose_pages_arrow_reads_in_another_way_wrote_none_with_differences(
    tmp_path: Path, text: str, refused: bool
) -> None:
    """Arrow takes every page of an old writer for packed; here a short one is not."""
    file = tmp_path / "a.parquet"
    write(file, pa.array([text]), SHARED, compression="zstd", data_page_version="2.0")
    assert pages_in(file)[1][0].is_packed is not refused
    check_size(file)
    file.write_bytes(file.read_bytes().replace(b"parquet-cpp-arrow version", b"parquet-cpp version 1.0  "))
    if not refused:
        check_size(file)
        return
    with pytest.raises(DataError, match="names a writer that could not write it"):
        check_size(file)


# --- schemas and heads -------------------------------------------------------------------------------------

LEAF = bytes.fromhex("15 02 25 00 18 01 61 00")  # a whole number called a
INNER = bytes.fromhex("35 02 18 01 61 15 02 00")  # an optional structure with one field


def with_head(file: Path, schema: bytes, fields: int, groups: bytes = b"\x19\x0c") -> Path:
    head = b"\x15\x02\x19\xfc" + number(fields) + schema + b"\x16\x00" + groups + b"\0"
    file.write_bytes(b"PAR1" + head + len(head).to_bytes(4, "little") + b"PAR1")
    return file


def root(children: int) -> bytes:
    return b"\x48\x01r\x15" + number(2 * children) + b"\0"


def test_fields_in_fields_without_end_are_refused(tmp_path: Path) -> None:
    """Arrow walks them by calls in calls, until there is no place for more, and the process ends."""
    file = with_head(tmp_path / "a.parquet", root(1) + INNER * 30 + LEAF, 32)
    assert read_table(file).shape == (0, 1)
    file = with_head(tmp_path / "a.parquet", root(1) + INNER * 20_000 + LEAF, 20_002)
    with pytest.raises(DataError, match=r"its schema has more than 150,001 fields or 100 in each other"):
        read_table(file)


def test_very_wide_files_are_refused_unopened(tmp_path: Path) -> None:
    file = with_head(tmp_path / "a.parquet", root(160_000) + LEAF * 160_000, 160_001)
    with pytest.raises(DataError, match="its schema has more than 150,001 fields"):
        check_size(file)


@pytest.mark.parametrize("schema", [root(1) + LEAF * 3, b"\0" * 5])
def test_fields_that_are_in_none_are_refused(tmp_path: Path, schema: bytes) -> None:
    with pytest.raises(DataError, match="has fields in none"):
        check_size(with_head(tmp_path / "a.parquet", schema, 4))


def test_what_is_said_of_columns_counts_before_the_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = b"\x19\x1c\x19\xfc" + number(10_000) + b"\x26\0\0" * 10_000 + b"\x16\0\x16\0\0"
    file = with_head(tmp_path / "a.parquet", root(1) + LEAF, 2, chunks)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "1000000")
    with pytest.raises(TooLargeError):
        check_size(file)


def test_two_columns_of_one_name_are_named(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns are called 'a': rename or remove one"):
        read_table(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["text", "list", "category"])
def test_texts_that_are_none_are_told(tmp_path: Path, kind: str) -> None:
    odd = pa.array([b"\xff\xfe"]).view(pa.string())
    listed = pa.ListArray.from_arrays(pa.array([0, 1]), odd)
    columns = {"text": odd, "list": listed, "category": odd.dictionary_encode()}
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": columns[kind]}), file)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read \(.*\): check the file"):
        read_table(file)
    if kind == "text":
        with pytest.raises(
            DataError, match=r"a\.parquet is not readable Parquet \(.*\): fetch the file again"
        ):
            read_texts((File.at(file),), ("x",))


def test_names_of_columns_that_are_no_text_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"named": [1]}), file, store_schema=False)
    file.write_bytes(file.read_bytes().replace(b"named", b"n\xff\xfeed"))
    files = (File.at(file),)
    for read in (
        lambda: read_labels(files, ("named",), 2),
        lambda: read_texts(files, ("named",)),
        lambda: read_images(files, ("named",), (1, 2, 2)),
    ):
        with pytest.raises(
            DataError, match=r"a\.parquet is not readable Parquet \(.*\): fetch the file again"
        ):
            read()


def test_a_dictionary_has_no_more_values_than_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(60) % 2}), file, compression="none", write_statistics=False)
    content = file.read_bytes()
    head = bytes.fromhex("4c 15 04")  # of the dictionary: it has two values
    assert content.count(head) == 1
    file.write_bytes(content.replace(head, bytes.fromhex("4c 15 7e")))
    with pytest.raises(DataError, match="a dictionary in it has more values than bytes"):
        check_size(file)
