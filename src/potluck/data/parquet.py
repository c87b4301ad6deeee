"""Reading Parquet files in the Hugging Face layout: from a local folder, a downloaded snapshot, or the hub."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import math
import mmap
import os
import re
import secrets
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from potluck.core.modest import free_bytes
from potluck.data.parquet_differences import shared_in
from potluck.data.parquet_pages import Pages, check_head, pages_of
from potluck.errors import MOST_KNOWN, DataError, first_line, some
from potluck.files import check_plain
from potluck.hub import in_time

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "POTLUCK_DATA"
LIMIT_VARIABLE = "POTLUCK_DATA_LIMIT"  # bytes that one Parquet file may take in memory
HUB_PATIENCE = 8.0  # seconds in which the hub must say something
_LIMIT = 8 * 2**30
_WHILE_READ = 3  # times that memory, for a moment: what is read, and what it becomes
_CELL, _OBJECT = 8, 128  # bytes of a number in memory, and of an object of Python with a place in a column
# What becomes an object of Python in each row of a frame.
_OBJECTS = (
    pa.types.is_nested,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_binary_view,
)
# Bytes that Arrow takes for what is said of a group of rows, and of a column in it.
_GROUP, _CHUNK = 8_192, 512
_SPLIT = 20  # bytes that Arrow takes besides for a text of a page that has lengths and letters apart
_SOME_ROWS = 10_000  # whose texts are counted together, at least
_MOST_PARTS = 5_000_000  # of columns in which texts are counted; a part takes some microseconds
# How values are written in a file, by number in Parquet's specification.
_ONCE = frozenset((0, 6, 7))  # as often as they stand there: plainly, by length, or by what they share
_APART = frozenset((6, 7))  # with all lengths before all letters
_NUMBERED = frozenset((0, 2, 8))  # so that Arrow can give their numbers: plainly, or by number
_LAYOUTS = (
    "{split}-*.parquet",
    "data/{split}-*.parquet",
    "{config}/{split}-*.parquet",
    "plain_text/{split}-*.parquet",
    "{config}/{split}/*.parquet",
)
_SHARD = re.compile(r"-(\d+)-of-(\d+)")
_FORMATS = ("PNG", "WEBP", "JPEG")
_BROKEN_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_OTHER_ROWS = "it has another number of rows than its head says"
# What is raised of broken files, by Arrow and in Python's part of it.
FAULTS = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, RuntimeError)
# Fewer images are decoded in about a second, which is not worth a cache file.
_WORTH_KEEPING = 5_000


class TooLargeError(DataError):
    """A file that would take more memory than it may."""


@dataclass(frozen=True)
class Location:
    """Where a data set's Parquet files are: folder name, hub repository and configuration, splits."""

    name: str
    repository: str | None
    config: str = "data"
    splits: tuple[str, str] = ("train", "test")


@dataclass(frozen=True)
class File:
    """One Parquet file with its size and times; a changed file is a different `File`.

    The time of its content can be set back, as copying programs do. That of its entry in the file system cannot.
    """

    path: Path
    size: int
    changed: int
    entered: int

    @classmethod
    def at(cls, path: Path) -> File:
        """The file at `path` as it is now."""
        status = path.stat()
        return cls(path.resolve(), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


Files = tuple[File, ...]


def find(location: Location, folder: Path | None) -> tuple[Files, Files]:
    """The training and test files: from `folder` if one is given, else POTLUCK_DATA, else the hub."""
    if folder is not None:
        found = _look(location, (folder / location.name, folder))
        if found is None:
            raise DataError(
                f"data set {location.name!r} is not in {folder}: give a folder with "
                f"{location.name}/{location.splits[0]}-00000-of-00001.parquet, or no folder to use the hub"
            )
        return found
    shelf = os.environ.get(FOLDER_VARIABLE)
    found = _look(location, (Path(shelf) / location.name,)) if shelf else None
    return found or _download(location, shelf)


def _look(location: Location, roots: Sequence[Path]) -> tuple[Files, Files] | None:
    for root in roots:
        train, test = (_shards(root, split, location.config) for split in location.splits)
        if train and test:
            return train, test
        if train or test:
            missing = location.splits[1 if train else 0]
            raise DataError(f"{root} has no Parquet file of the split {missing!r}: fetch the whole data set")
    return None


def _shards(root: Path, split: str, config: str) -> Files:
    for layout in _LAYOUTS:
        paths = sorted(root.glob(layout.format(split=split, config=config)))
        if paths:
            _check_complete(paths, split)
            return tuple(File.at(path) for path in paths)
    return ()


def _check_complete(paths: Sequence[Path], split: str) -> None:
    shards = [match.groups() for path in paths if (match := _SHARD.search(path.name))]
    totals = {int(total) for _, total in shards}
    if not shards:
        return
    if len(totals) > 1 or sorted(int(index) for index, _ in shards) != list(range(max(totals))):
        raise DataError(
            f"{paths[0].parent} holds {len(shards)} file(s) of the split {split!r} where the names promise "
            f"{max(totals)}: fetch the missing ones or remove the stray ones"
        )


def _download(location: Location, shelf: str | None) -> tuple[Files, Files]:
    looked = f"it is not in {Path(shelf) / location.name}" if shelf else f"{FOLDER_VARIABLE} is not set"
    advice = f"give `dir`, or set {FOLDER_VARIABLE} to a folder that holds {location.name}/"
    if location.repository is None:
        raise DataError(f"data set {location.name!r} is not here: {looked} and the hub has no copy; {advice}")
    import huggingface_hub

    patterns = [
        layout.format(split=split, config=location.config) for layout in _LAYOUTS for split in location.splits
    ]
    silent = not _hub_answers(location.repository)
    try:
        root = huggingface_hub.snapshot_download(
            location.repository, repo_type="dataset", allow_patterns=patterns, local_files_only=silent
        )
    # The hub's client raises the errors of its HTTP library, which differs between versions.
    except Exception as error:
        raise DataError(
            f"data set {location.name!r} ({looked}) could not be fetched from the hub repository "
            f"{location.repository} ({type(error).__name__}): {advice}"
        ) from error
    found = _look(location, (Path(root),))
    if found is None:
        raise DataError(f"the hub repository {location.repository} has no Parquet we can read: {advice}")
    return found


def _hub_answers(repository: str) -> bool:
    """Whether the hub says anything in time, be it no; what it has sent before is used without it."""
    from huggingface_hub import HfApi

    try:
        in_time(lambda: HfApi().dataset_info(repository, timeout=HUB_PATIENCE), HUB_PATIENCE)
    except TimeoutError:
        return False
    except (
        Exception
    ):  # errors of its HTTP library, which differs between versions: the download says what is wrong
        return True
    return True


def read_labels(files: Files, names: Sequence[str], classes: int) -> np.ndarray:
    """All labels in order, as int64, checked to lie in [0, classes)."""
    return np.concatenate([_labels_of(file.path, names, classes) for file in files])


def _labels_of(path: Path, names: Sequence[str], classes: int) -> np.ndarray:
    values = _column(path, names)
    if not pa.types.is_integer(values.type) or values.null_count:
        raise DataError(f"the labels in {path} are not all integers: convert them to class numbers from 0")
    labels: np.ndarray = values.to_numpy().astype(np.int64)
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise DataError(
            f"{path} has labels from {labels.min()} to {labels.max()} where 0 to {classes - 1} are expected: "
            f"the file belongs to another data set, or its labels are hidden"
        )
    return labels


def read_class_names(files: Files, names: Sequence[str], classes: int) -> tuple[str, ...]:
    """The class names from the hub's feature metadata, or the class numbers if there are none."""
    numbers = tuple(str(label) for label in range(classes))
    for name in names:
        feature = _features(files[0].path).get(name)
        stored = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(stored, list) and len(stored) == classes:
            return tuple(map(str, stored))
    return numbers


def _features(path: Path) -> dict[str, Any]:
    with _reading(path):
        metadata = _open(path).schema_arrow.metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


@lru_cache(maxsize=4)
def read_texts(files: Files, names: tuple[str, ...]) -> tuple[str, ...]:
    """All texts in order."""
    texts: list[str] = []
    for file in files:
        values = _column(file.path, names)
        if values.null_count or not (
            pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        ):
            raise DataError(f"the column {names} in {file.path} is not all text: fetch the file again")
        with _reading(file.path):
            texts.extend(values.to_pylist())
    return tuple(texts)


@lru_cache(maxsize=4)
def read_images(files: Files, names: tuple[str, ...], shape: tuple[int, int, int]) -> np.ndarray:
    """All images in order as uint8 (N, channels, height, width); never write into it.

    Decoding small images is bound by the interpreter (with threads 0.30 ms per image, without 0.26 ms), so large
    data sets are decoded once, kept in the user's cache folder and memory-mapped from then on.
    """
    rows = sum(_open(file.path).metadata.num_rows for file in files)
    kept = _kept_at(files, shape)
    images = None if kept is None else _read_kept(kept, (rows, *shape))
    if images is None:
        for file in files:
            check_size(file.path, names)
        check_room(files[0].path.parent, rows * math.prod(shape), rows)
        images = _decode(files, names, rows, shape)
        if kept is not None and rows >= _WORTH_KEEPING:
            _keep(kept, images)
    return images


def _decode(files: Files, names: Sequence[str], rows: int, shape: tuple[int, int, int]) -> np.ndarray:
    if rows >= _WORTH_KEEPING:
        log.info("decoding %d images in %s", rows, files[0].path.parent)
    try:
        images = np.empty((rows, *shape), dtype=np.uint8)
    except MemoryError as error:
        raise DataError(
            f"{files[0].path.parent} has {rows:,} images, more than memory can hold; use a machine with more"
        ) from error
    row = end = 0
    for file in files:
        end += _open(file.path).metadata.num_rows
        for position, content in enumerate(_image_bytes(file.path, names)):
            if row == end:
                raise _miscounted(file.path)
            try:
                images[row] = _decode_one(content, shape)
            except _BROKEN_IMAGE as error:
                raise DataError(
                    f"row {position} of {file.path} is not a PNG, WebP or JPEG image of "
                    f"{shape[1]}x{shape[2]} pixels ({error}): fetch the file again"
                ) from error
            row += 1
        if row < end:
            raise _miscounted(file.path)
    return images


def _miscounted(path: Path) -> DataError:
    return DataError(f"{path} has another number of rows than its head says: fetch the file again")


def _decode_one(content: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    image: Image.Image = Image.open(io.BytesIO(content), formats=_FORMATS)
    if image.size != (shape[2], shape[1]):
        raise ValueError(f"it has {image.size[1]}x{image.size[0]}")
    pixels = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _image_bytes(path: Path, names: Sequence[str]) -> Iterator[bytes]:
    name = _column_name(path, names)
    with _reading(path):
        for batch in _open(path).iter_batches(batch_size=1_000, columns=[name]):
            values = batch.column(0)
            if pa.types.is_struct(values.type):
                values = values.field("bytes")
            is_bytes = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
            for value in values.to_pylist() if is_bytes else itertools.repeat(None, len(values)):
                yield value or b""


def _column(path: Path, names: Sequence[str]) -> pa.ChunkedArray:
    name = _column_name(path, names)
    check_size(path, [name])
    with _reading(path):
        return _open(path).read(columns=[name]).column(0)


def _column_name(path: Path, names: Sequence[str]) -> str:
    with _reading(path):
        present = _open(path).schema_arrow.names
    for name in names:
        if name in present:
            return name
    raise DataError(
        f"{path} has no column {' or '.join(repr(name) for name in names)}, only {some(present, MOST_KNOWN)}: "
        f"the file belongs to another data set"
    )


def _open(path: Path) -> pq.ParquetFile:
    with _reading(path):
        check_plain(path)
        check_room(path, _CHUNK * _chunks(File.at(path)), 0)
        file = pq.ParquetFile(path, memory_map=True)
        if file.metadata.num_rows < 0:
            raise ValueError(_OTHER_ROWS)
        return file


@lru_cache(maxsize=64)
def _chunks(file: File) -> int:
    """How many columns all groups of rows in a file have; it is opened once they are known."""
    return check_head(file.path)


def check_size(path: Path, columns: Sequence[str] | None = None) -> None:
    """Refuse a file that would become too large in memory: a few kilobytes can hold 10⁹ equal rows.

    `columns` are those that will be read, all if none are named.
    """
    with _reading(path):
        _check_size(path, columns)


def _check_size(path: Path, columns: Sequence[str] | None) -> None:
    file, limit = _open(path), size_limit()
    metadata = file.metadata
    cells = metadata.num_rows * max(_CELL, sum(_in_memory(field.type) for field in file.schema_arrow))
    groups = metadata.num_row_groups * (_GROUP + _CHUNK * len(file.schema))
    check_room(path, max(cells, groups), metadata.num_rows)
    # What the pages say of themselves counts: the head of the file may claim anything.
    pages = list(pages_of(path, len(file.schema)))
    check_room(path, max(cells, _of_values(file, pages), _of_pages(pages)), metadata.num_rows)
    _check_rows(file, pages)
    pages = _with_shared(path, file, columns, pages)
    needed = _of_pages(pages)
    if needed <= limit:
        needed = _unpacked(path, columns, pages, limit)
    if needed <= limit:
        _check_lists(file, columns)
    if needed <= limit and columns is None:
        needed += _of_objects(file, limit, _rows_for(_of_pages(pages), 1))
    check_room(path, needed, metadata.num_rows)


def _check_rows(file: pq.ParquetFile, pages: Sequence[Pages]) -> None:
    """Refuse a file whose head tells of other rows than there are: Arrow reads all, in parts only those told of."""
    flat = [not file.schema.column(place).max_repetition_level for place in range(len(file.schema))]
    groups = _rows_told(file)
    for group, rows in enumerate(groups):
        found = pages[group * len(flat) : (group + 1) * len(flat)]
        if any(one.values != rows for one, single in zip(found, flat, strict=True) if single):
            raise ValueError(_OTHER_ROWS)
    if sum(groups) != file.metadata.num_rows:
        raise ValueError(_OTHER_ROWS)


def _check_lists(file: pq.ParquetFile, columns: Sequence[str] | None) -> None:
    """The same where all columns have lists, of which nothing but Arrow tells how many rows they have.

    Where only some have, Arrow finds out that they are not as long as the others.
    """
    leaves = [file.schema.column(place) for place in range(len(file.schema))]
    wanted = [one.path for one in leaves if columns is None or _is_in(columns, one)]
    if not wanted or not all(one.max_repetition_level for one in leaves):
        return
    for group, rows in enumerate(_rows_told(file)):
        if file.read_row_group(group, columns=wanted[:1]).num_rows != rows:
            raise ValueError(_OTHER_ROWS)


def _rows_told(file: pq.ParquetFile) -> list[int]:
    """The rows of each group, as the head of the file has them."""
    return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]


def _in_memory(kind: pa.DataType) -> int:
    """The bytes that a value of a column takes once it is in a frame, without those of a text or of a list's items.

    What numpy has no type for becomes an object of Python for each row.
    """
    kind = _stored(kind)
    if pa.types.is_dictionary(kind):
        return _in_memory(kind.value_type)
    return _OBJECT if any(is_one(kind) for is_one in _OBJECTS) else _CELL


def _stored(kind: pa.DataType) -> pa.DataType:
    """What values are written as, whose kind is one that a library added."""
    return _stored(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def _with_shared(
    path: Path, file: pq.ParquetFile, columns: Sequence[str] | None, pages: Sequence[Pages]
) -> list[Pages]:
    """The same, with what texts share with those before them in their size, in the columns that will be read."""
    leaves = [file.schema.column(place) for place in range(len(file.schema))]
    levels = [(one.max_repetition_level, one.max_definition_level) for one in leaves]
    wanted = [columns is None or _is_in(columns, one) for one in leaves]
    found = []
    _check_writer(file, pages)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for place, one in enumerate(pages):
            leaf = place % len(leaves)
            differences = one.differences if wanted[leaf] else ()
            shared = sum(shared_in(content, page, levels[leaf]) for page in differences)
            found.append(replace(one, size=one.size + shared, differences=()))
    return found


def _check_writer(file: pq.ParquetFile, pages: Sequence[Pages]) -> None:
    """Arrow takes pages of an old writer for packed, whatever they say; it wrote none with differences."""
    writer = file.metadata.created_by.lower()
    found = (page for one in pages for page in one.differences if page.codec and page.second)
    plain = (not page.is_packed for page in found)
    if "parquet-cpp" in writer and not writer.startswith("parquet-cpp-arrow") and any(plain):
        raise ValueError("it names a writer that could not write it")


def _of_pages(pages: Sequence[Pages]) -> int:
    """The bytes of all pages."""
    return sum(one.size for one in pages)


def _of_values(file: pq.ParquetFile, pages: Sequence[Pages]) -> int:
    """The bytes of all values: those of a fixed length may be long, and those of lists have a place in each."""
    leaves = [file.schema.column(place) for place in range(len(file.schema))]
    widths = [max(_CELL, one.length or 0) + _CELL * one.max_repetition_level for one in leaves]
    each = zip(itertools.cycle(widths), pages, strict=False)
    return sum((width + _SPLIT * bool(one.encodings & _APART)) * one.values for width, one in each)


def check_room(path: Path, needed: int, rows: int) -> None:
    """Refuse data that would take more bytes of memory than they may."""
    if needed > (limit := size_limit()):
        raise TooLargeError(
            f"{path} would take {needed / 2**30:,.1f} GiB or more in memory ({rows:,} rows), the limit is "
            f"{limit / 2**30:,.1f} GiB; if that is right, set {LIMIT_VARIABLE} to more bytes"
        )


def size_limit() -> int:
    """How many bytes one file of data may take in memory, by default no more than can be read on this machine."""
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not given:
        free = free_bytes()
        return _LIMIT if free is None else min(_LIMIT, free // _WHILE_READ)
    if not given.isdecimal():
        raise DataError(f"{LIMIT_VARIABLE} is {given!r}: give a number of bytes")
    return int(given)


def _unpacked(path: Path, columns: Sequence[str] | None, pages: Sequence[Pages], limit: int) -> int:
    """The bytes of all texts in a file; counting ends beyond `limit`.

    A text that stands in many rows may be in the file once, and its head says nothing of that, or says what is not
    so. Such texts are counted before any is copied for all rows.
    """
    file = _open(path)
    texts = _texts(file, columns)
    parts = 0
    odd = {field.name for field in file.schema_arrow if "extension<" in str(field.type)}
    total = 0
    by_number = pq.ParquetFile(path, memory_map=True, read_dictionary=[one.path for one in texts.values()])
    for group in range(file.metadata.num_row_groups):
        numbered, lists, copied = list[str](), list[str](), list[tuple[Any, Pages]]()
        for place, text in texts.items():
            found = pages[group * len(file.schema) + place]
            total += found.size
            if found.encodings <= _ONCE:
                continue
            if found.encodings <= _NUMBERED and not _is_in(odd, text):
                (lists if text.max_repetition_level else numbered).append(text.path)
            else:
                copied.append((text, found))
        size = sum(pages[group * len(file.schema) + place].size for place in texts)
        rows = by_number.iter_batches(_rows_for(size, len(texts)), row_groups=[group], columns=numbered)
        for batch in rows if numbered else ():
            total += sum(map(_bytes_of, batch.columns))
            if total > limit:
                return total
        for name in lists:  # all at once: in parts it would be as many rows as the head says
            total += sum(map(_bytes_of, by_number.read_row_group(group, columns=[name]).column(0).chunks))
            if total > limit:
                return total
        bytes_, parts = _in_few_rows(file, group, copied, limit - total, parts)
        total += bytes_
    return total


def _rows_for(size: int, columns: int) -> int:
    """How many rows to read at once of so many columns: Arrow copies what is stored once for each part anew.

    A part has then about as many bytes of rows as of that.
    """
    return max(_SOME_ROWS, size // (_CELL * max(1, columns)))


def _in_few_rows(
    file: pq.ParquetFile, group: int, texts: Sequence[tuple[Any, Pages]], most: int, parts: int
) -> tuple[int, int]:
    """The bytes of the texts of columns that Arrow copies, counted a few rows at a time; and the parts so far.

    None that stands in many rows is longer than what its column stores once. Where that leaves too few rows for a
    part, each is thought to be so long. How many texts there are in a row of lists, Arrow does not tell.
    """
    total = sum(pages.values * pages.size for text, pages in texts if text.max_repetition_level)
    single = [(text.path, pages.once) for text, pages in texts if not text.max_repetition_level]
    if not single or total > most:
        return total, parts
    once, there = sum(size for _, size in single), file.metadata.row_group(group).num_rows
    rows = min(max(1, size_limit() // (4 * max(1, once))), _SOME_ROWS)
    parts += len(single) * -(-there // rows)
    if rows < _SOME_ROWS and parts > _MOST_PARTS:
        return max(total + there * once, most + 1), parts
    for batch in file.iter_batches(rows, row_groups=[group], columns=[path for path, _ in single]):
        total += sum(map(_bytes_of, batch.columns))
        if total > most:
            break
    return total, parts


def _of_objects(file: pq.ParquetFile, most: int, rows: int) -> int:
    """The bytes of objects of Python that stand in others in a frame; counting ends beyond so many."""
    nested = [field.name for field in file.schema_arrow if _has_objects(field.type)]
    total = 0
    for batch in file.iter_batches(rows, columns=nested) if nested else ():
        total += sum(map(_objects_in, batch.columns))
        if total > most:
            break
    return total


def _has_objects(kind: pa.DataType) -> bool:
    """Whether values of a column have objects in them: numbers in a list have a place in one array."""
    kind = _stored(kind)
    inner = [kind.field(place).type for place in range(kind.num_fields)]
    return bool(inner) and not (pa.types.is_list(kind) and pa.types.is_primitive(inner[0]))


def _objects_in(values: pa.Array) -> int:
    """The bytes of the objects in those of an array; these are counted with what they are in."""
    if isinstance(values, pa.ExtensionArray):
        return _objects_in(values.storage)
    if pa.types.is_struct(values.type):
        return sum(_OBJECT * len(one) + _objects_in(one) for one in values.flatten())
    if pa.types.is_map(values.type):
        inner = [values.keys, values.items]
    else:
        inner = [values.flatten()] if pa.types.is_nested(values.type) else []
    widths = (_CELL if pa.types.is_primitive(one.type) else _OBJECT for one in inner)
    return sum(width * len(one) + _objects_in(one) for width, one in zip(widths, inner, strict=True))


def _texts(file: pq.ParquetFile, columns: Sequence[str] | None) -> dict[int, Any]:
    """The columns of texts or bytes, of any length, by their places."""
    wanted = None if columns is None else set(columns)
    found = {place: file.schema.column(place) for place in range(len(file.schema))}
    return {
        place: one
        for place, one in found.items()
        if one.physical_type == "BYTE_ARRAY" and (wanted is None or _is_in(wanted, one))
    }


def _is_in(names: Collection[str], leaf: Any) -> bool:
    """Whether a part of a nested column, or a whole column, belongs to a column of these names."""
    return any(part in names for part in itertools.accumulate(leaf.path.split("."), "{}.{}".format))


def _bytes_of(values: pa.Array) -> int:
    """The bytes of the texts in an array, each counted as often as it stands there."""
    if pa.types.is_dictionary(values.type):
        found = pc.value_counts(values.indices.drop_null())  # few of what a long dictionary has
        lengths = pc.binary_length(values.dictionary.take(found.field("values"))).cast(pa.int64())
        return pc.sum(pc.multiply(lengths, found.field("counts"))).as_py() or 0
    if pa.types.is_struct(values.type):
        return sum(map(_bytes_of, values.flatten()))
    if pa.types.is_map(values.type):
        return _bytes_of(values.keys) + _bytes_of(values.items)
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _bytes_of(values.values)
    return int(values.nbytes)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say in one sentence that a file is broken, whatever the reader says of it."""
    try:
        yield
    except FAULTS as error:
        reason = first_line(error).rstrip(".")
        raise DataError(f"{path} is not readable Parquet ({reason}): fetch the file again") from error


def _kept_at(files: Files, shape: tuple[int, ...]) -> Path | None:
    """Where the decoded images of these files are kept; None for a user without a home."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:
        return None
    about = [(str(one.path), one.size, one.changed, one.entered) for one in files]
    key = hashlib.sha256(repr([*about, shape]).encode())
    return base / "potluck" / f"images-{key.hexdigest()[:24]}.npy"


def _read_kept(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The images of an earlier time; None if the file is not whole, or none of ours, and they are decoded again."""
    try:
        check_plain(path)  # a pipe would keep us waiting
        # Mode "c": pages are shared between processes, and a stray write never reaches the file.
        images = np.lib.format.open_memmap(path, mode="c")
    except (OSError, ValueError, EOFError, ArithmeticError, MemoryError):
        return None
    return images if images.shape == shape and images.dtype == np.uint8 else None


def _keep(path: Path, images: np.ndarray) -> None:
    """Keep images; they are on the disk before the file has its name: a power cut must not leave black ones."""
    partial = path.with_suffix(f".{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as file:  # a link that somebody put there is not followed
            np.save(file, images, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        log.info("decoded images are not kept: %s", error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
