"""What Parquet files take in memory, whatever their heads say of it."""

from __future__ import annotations

import base64
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest

from potluck.data import parquet
from potluck.data.own.files import from_files, read_table
from potluck.data.parquet import File, TooLargeError, check_size, read_images
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


FIRST, GROUP = 0, -1  # where the head of a file says how many rows it has, and where of its last group
MANY = 10_007  # a number that stands nowhere else in the head


def alone(path: Path, **columns: pa.Array) -> Path:
    """A file with these columns."""
    pq.write_table(pa.table(columns), path, compression="zstd", write_statistics=False, store_schema=False)
    return path


def miscount(path: Path, *places: int, claimed: int = 1) -> Path:
    """Let the head of a file tell another number of rows in some places."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    first, *others = content[start:].split(varint(MANY))
    zigzag = 2 * claimed if claimed >= 0 else -2 * claimed - 1
    told = [varint(MANY)] * len(others)
    for place in places:
        told[place] = bytes([zigzag | 128, 128, 0])
    path.write_bytes(content[:start] + first + b"".join(map(bytes.__add__, told, others)))
    return path


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0] * MANY),
        pa.array([Decimal("1.5")] * MANY, pa.decimal128(38, 1)),
        pa.array([{"a": "x" * 100}] * MANY),
        pa.array(["x" * 100] * MANY),
        pa.array([["x" * 100]] * MANY),
        pa.array([[]] * MANY, pa.list_(pa.int8())),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("places", [(FIRST,), (GROUP,), (FIRST, GROUP)], ids=str)
def test_rows_that_the_head_denies_are_told(
    tmp_path: Path, column: pa.Array, places: tuple[int, ...]
) -> None:
    """Arrow reads all that there are, whatever the head says, and in parts only as many as it says."""
    file = alone(tmp_path / "a.parquet", x=column)
    check_size(file)
    miscount(file, *places)
    with pytest.raises(DataError, match=r"a\.parquet is not readable .* of rows"):
        check_size(file)


def test_texts_in_lists_are_counted_though_other_columns_have_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow says that the columns differ after it has read them."""
    file = alone(tmp_path / "a.parquet", x=pa.array([["x" * 1000]] * MANY))
    miscount(file, FIRST, GROUP)
    monkeypatch.setattr(parquet, "_check_rows", lambda *_: None)  # as if another column had one row
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", str(900 * MANY))
    with pytest.raises(TooLargeError):
        check_size(file)


def test_a_number_of_rows_below_none_is_told(tmp_path: Path) -> None:
    file = miscount(alone(tmp_path / "a.parquet", x=pa.array([b"x"] * MANY)), FIRST, claimed=-1)
    with pytest.raises(DataError, match=r"a\.parquet is not readable .* of rows"):
        read_images((File.at(file),), ("x",), (1, 2, 2))


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
        pa.array(range(ROWS), pa.time64("us")),
        pa.array(range(ROWS), pa.time64("us")).dictionary_encode(),
        pa.array(range(ROWS), pa.date32()),
        pa.array([b"a"] * ROWS),
        pa.array([b"a"] * ROWS, pa.binary(1)),
    ],
    ids=["struct", "list", "decimal", "map", "time", "dictionary", "date", "bytes", "letters"],
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
    assert [found.values for found in pages_of(file, 2)] == [chunk.num_values for chunk in chunks]
    assert all(found.size for found in pages_of(file, 2))


def test_pages_that_cannot_be_read_are_said_to_be_so(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", pa.array(["a", "b"] * ROWS))
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    with pytest.raises(DataError, match=r"a\.parquet is not readable Parquet \(.*\): fetch the file again"):
        check_size(file)


HEAD = bytes.fromhex("1500 1520 1520 2c 15 80897a 15 10 15 06 15 06 00 00")
CHUNK = (
    bytes.fromhex("3c 56 02") + b"\x26" + varint(len(HEAD) + 16) + bytes.fromhex("26 08 00")
)  # its only page is first


def forged(path: Path, head: bytes = HEAD, chunk: bytes = CHUNK, columns: int = 1, groups: int = 1) -> Path:
    """A file of which the first page has this head, and the file's own head so many columns of it in each group."""
    group = bytes([0x19, 0xFC, columns]) + (chunk + b"\0") * columns + b"\0"
    about = bytes([0x49, 0xFC, groups]) + group * groups + b"\0"
    path.write_bytes(b"PAR1" + head + bytes(16) + about + len(about).to_bytes(4, "little") + b"PAR1")
    return path


@pytest.mark.parametrize(("codec", "most"), [(1, 22), (2, 1032), (5, 256), (6, 32768), (7, 256)])
def test_pages_that_claim_more_than_can_be_packed_so_small_are_refused(
    tmp_path: Path, codec: int, most: int
) -> None:
    """Arrow takes memory for what is claimed, and that of two gigabytes in a file of a few hundred bytes."""
    chunk = bytes.fromhex("3c 45") + varint(codec) + b"\x16\x02" + b"\x26" + varint(600) + b"\x26\x08\x00"
    head = bytes.fromhex("15 00 15") + varint(16 * most) + HEAD[4:]
    (found,) = pages_of(forged(tmp_path / "a", head=head, chunk=chunk), 1)
    assert found.size == 16 * most
    head = bytes.fromhex("15 00 15") + varint(16 * most + 1) + HEAD[4:]
    with pytest.raises(ValueError, match="a page in it claims more bytes than fit into it"):
        list(pages_of(forged(tmp_path / "b", head=head, chunk=chunk), 1))


def test_columns_that_share_their_pages_are_refused(tmp_path: Path) -> None:
    assert len(list(pages_of(forged(tmp_path / "a"), 1))) == 1
    with pytest.raises(ValueError, match="its columns do not fit into it"):
        list(pages_of(forged(tmp_path / "a", columns=20, groups=20), 20))


@pytest.mark.parametrize(
    ("chunk", "columns", "said"),
    [
        (CHUNK + bytes.fromhex("5c 1c 00 00"), 1, "a column of it is encrypted"),
        (CHUNK, 2, "has other columns than its head"),
        (CHUNK[:-1] + bytes.fromhex("06 0a 02 00"), 1, "fields that are none"),  # the number again
        (b"", 1, ""),
    ],
)
def test_a_head_of_the_file_is_looked_at_as_well(
    tmp_path: Path, chunk: bytes, columns: int, said: str
) -> None:
    file = forged(tmp_path / "a", chunk=chunk, columns=columns)
    if not said:
        assert [found.values for found in pages_of(file, 1)] == [0]
        return
    with pytest.raises(ValueError, match=said):
        list(pages_of(file, 1))


@pytest.mark.parametrize("cut", [b"\xff\xff\xff\x7f", b"\0\0\0\0"])
def test_a_head_of_another_length_is_refused(tmp_path: Path, cut: bytes) -> None:
    file = forged(tmp_path / "a")
    file.write_bytes(file.read_bytes()[:-8] + cut + b"PAR1")
    with pytest.raises(ValueError, match="cut off"):
        list(pages_of(file, 1))


class Keys(encryption.KmsClient):  # type: ignore[misc]
    """Keeps no secret."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)


def test_an_encrypted_column_ends_no_process(tmp_path: Path) -> None:
    """Arrow ends the process when it is asked where such a column is."""
    table = pa.table({"x": [0.0] * ROWS, "y": [0, 1] * (ROWS // 2)})
    keys = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration("a", column_keys={"b": ["x"]}, plaintext_footer=True),
    )
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, encryption_properties=keys)
    script = f"import pathlib, potluck.data.own.files as own; own.read_table(pathlib.Path({str(file)!r}))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "a.parquet is not readable Parquet (a column of it is encrypted)" in ended.stderr


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("listed", [False, True])
def test_texts_written_as_differences_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, listed: bool
) -> None:
    """Other programs write texts in this way; what one has in common with the one before it is not in the file."""
    texts = [[text] if listed else text for text in ("b" * 10_000, "b" * 9_999) * (ROWS // 2)]
    file = write(tmp_path / "a.parquet", pa.array(texts), use_dictionary=False, column_encoding={
        "z": encoding, "x": "PLAIN", "y": "PLAIN",
    })  # fmt: skip
    assert file.stat().st_size < 20_000
    assert len(from_files(file, target="y", task="classification", features=["x"])) == ROWS
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", str(9_999 * ROWS))
    with pytest.raises(TooLargeError, match=r"a\.parquet would take"):
        check_size(file)


@pytest.mark.parametrize("listed", [False, True])
def test_texts_that_arrow_copies_are_counted_before_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    json = pytest.importorskip("pyarrow", minversion="19").json_()
    texts = pa.ExtensionArray.from_storage(json, pa.array([f'"{"b" * 1_000_000}"'] * 100))
    column = pa.ListArray.from_arrays(pa.array(range(101), pa.int32()), texts) if listed else texts
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"z": column}), file, compression="zstd", write_statistics=False)
    del column, texts
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "10000000")
    before = pa.total_allocated_bytes()
    most = pa.default_memory_pool().max_memory()
    with pytest.raises(TooLargeError, match=r"a\.parquet would take"):
        check_size(file)
    assert pa.total_allocated_bytes() == before
    assert pa.default_memory_pool().max_memory() <= max(most, before + 20_000_000)


@pytest.mark.parametrize("more", ["", "a602", "a93502040600", "a80161", "ac18017800", "a1", "a7" + "00" * 8])
def test_what_a_later_version_adds_to_a_head_is_left_out(tmp_path: Path, more: str) -> None:
    head = HEAD[:-1] + bytes.fromhex(more) + b"\0"
    assert next(pages_of(forged(tmp_path / "a", head), 1)).values == 1_000_000


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
        list(pages_of(forged(tmp_path / "a", head), 1))


def in_one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def in_lists(values: pa.Array, levels: int) -> pa.Array:
    """Each value in a list of its own, that in another one, and so on."""
    for _ in range(levels):
        values = pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1), pa.int32()), values)
    return values


ZEROS = pa.array(np.zeros(20_000, np.int8))


@pytest.mark.parametrize(
    "values",
    [
        in_lists(ZEROS, 1),
        in_lists(ZEROS[:1_000], 20),
        pa.StructArray.from_arrays([ZEROS], ["a"]),
        pa.MapArray.from_arrays(pa.array(np.arange(20_001), pa.int32()), ZEROS.cast(pa.string()), ZEROS),
        ZEROS.cast(pa.string()),
    ],
    ids=["lists", "deep", "structs", "maps", "texts"],
)
def test_objects_in_objects_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: pa.Array
) -> None:
    """Each list or structure in a list is an object of its own; a file has no byte for many of them."""
    file = write(tmp_path / "a.parquet", in_one_list(values))
    assert file.stat().st_size < 10_000
    assert len(read_table(file)) == 1
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "2000000")
    with pytest.raises(TooLargeError, match=r"a\.parquet would take"):
        check_size(file)
    check_size(file, ["x", "y"])


def test_numbers_in_a_list_are_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", in_one_list(ZEROS))
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "400000")
    check_size(file)


def test_groups_without_rows_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a group takes memory of its own, a few dozen bytes of the file some kilobytes."""
    path, empty = tmp_path / "a.parquet", pa.table({"x": pa.array([], pa.int64())})
    with pq.ParquetWriter(path, empty.schema) as writer:
        for _ in range(300):
            writer.write_table(empty)
    assert pq.ParquetFile(path).metadata.num_row_groups == 300
    check_size(path)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "2000000")
    with pytest.raises(TooLargeError):
        check_size(path)


def parts_looked_at(file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many parts the texts and objects of a file are counted."""
    parts = list[object]()

    def counted(usual: Any, one: object) -> int:
        parts.append(one)
        return int(usual(one))

    for name in ("_bytes_of", "_objects_in"):
        monkeypatch.setattr(parquet, name, partial(counted, getattr(parquet, name)))
    check_size(file)
    return len(parts)


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_stored_once_is_not_copied_for_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """Arrow copies a whole dictionary for each part: a long one in parts of a long column would take hours."""
    numbers = pa.array(np.zeros(200_000, np.int32))
    texts = pa.DictionaryArray.from_arrays(numbers, pa.array(["a", "b" * 2_000_000]))
    column = pa.StructArray.from_arrays([texts], names=["inner"]) if nested else texts
    file = write(tmp_path / "a.parquet", column)
    assert parts_looked_at(file, monkeypatch) <= 4


def long_and_short(file: Path, long: int, short: int, numbered: bool) -> Path:
    """A column that Arrow copies: one long text, and many short ones."""
    json = pytest.importorskip("pyarrow", minversion="19").json_()
    texts = pa.ExtensionArray.from_storage(json, pa.array([f'"{"b" * long}"', *["1"] * short]))
    options: dict[str, Any] = (
        {"dictionary_pagesize_limit": 1 << 30} if numbered else {"use_dictionary": False}
    )
    pq.write_table(pa.table({"z": texts}), file, compression="zstd", write_statistics=False, **options)
    return file


def test_texts_that_would_be_counted_in_too_many_parts_are_thought_to_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = long_and_short(tmp_path / "a.parquet", 2_000_000, 2_000, numbered=True)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "10000000")
    check_size(file)
    monkeypatch.setattr(parquet, "_MOST_PARTS", 1_000)
    with pytest.raises(TooLargeError, match=r"a\.parquet would take 3\.7 GiB or more"):
        check_size(file)


def test_texts_that_are_there_once_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = long_and_short(tmp_path / "a.parquet", 2_000_000, 2_000, numbered=True)
    assert [one.once for one in pages_of(file, 1)] == [2_000_011]
    file = long_and_short(file, 2_000_000, 2_000, numbered=False)
    assert [one.once for one in pages_of(file, 1)] == [0]


def test_equal_objects_are_not_looked_for(tmp_path: Path) -> None:
    """Arrow looks for them in a table of hashes, and millions of values with hashes alike would take hours."""
    pytest.importorskip("pandas", minversion="3")
    table = read_table(write(tmp_path / "a.parquet", pa.array([b"letters"] * ROWS)))
    assert table["z"][0] == table["z"][1]
    assert table["z"][0] is not table["z"][1]
