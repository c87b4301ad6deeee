"""Reading safetensors of unknown origin: the head is bounded before it is parsed, and no file is mapped.

A tensor of a mapped file reads the disk when it is used: if the file is cut by then, the process is killed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.files import opened

LONGEST_HEAD = 100_000_000  # bytes, as in safetensors
MOST_TENSORS = 500_000  # in a file; a server may have one for each client
MOST_ENTRIES = 12 * MOST_TENSORS  # commas and colons: a tensor has nine, and one for each further dimension
MOST_DIMENSIONS = 64  # as in torch
_LENGTH = 8  # bytes that say how long the head is
DTYPES = {  # in the order in which the library writes them
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "F32": torch.float32, "U32": torch.uint32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """What a head says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes after the head
    end: int


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, which are not read; a `ValueError` if it is no such file."""
    with opened(path, os.O_RDONLY) as handle, os.fdopen(os.dup(handle), "rb") as file:
        try:
            return {name: entry.shape for name, entry in _head_of(file)}
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error


def tensors(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of a file by name, in memory of their own; a `ValueError` says what is wrong with it."""
    with opened(path, os.O_RDONLY) as handle, os.fdopen(os.dup(handle), "rb", buffering=0) as file:
        for name, entry in _head_of(file):
            if wanted(name):
                memory = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
                _fill(file, memoryview(memory.numpy().data))
                yield name, memory.view(entry.dtype).reshape(entry.shape)
            else:
                file.seek(entry.end - entry.begin, os.SEEK_CUR)


def tensors_in(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in the bytes of a file, in memory of their own, and what else its head says."""
    length = int.from_bytes(data[:_LENGTH], "little")
    start = _LENGTH + length
    entries, about = _parsed(data[_LENGTH:start], length, len(data))
    found = {}
    for name, entry in entries:
        memory = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        memory.numpy()[:] = np.frombuffer(data, np.uint8, len(memory), start + entry.begin)
        found[name] = memory.view(entry.dtype).reshape(entry.shape)
    return found, about


def check_file(path: Path) -> None:
    """Raise a `ValueError` for a file with a head that would take far more memory than that of any state.

    What else is wrong with the file the library says that reads it.
    """
    with opened(path, os.O_RDONLY, follow=True) as handle, os.fdopen(os.dup(handle), "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length <= LONGEST_HEAD:
            _check_head(file.read(length))


# --- inside ---------------------------------------------------------------------------------------------


def _check_head(head: bytes) -> None:
    blocks = head.count(b"{") + head.count(b"[")
    if blocks > 3 * MOST_TENSORS or head.count(b",") + head.count(b":") > MOST_ENTRIES:
        raise ValueError(f"its head has more than {MOST_TENSORS:,} tensors")


def _fill(file: FileIO, place: memoryview) -> None:
    while len(place):
        count = file.readinto(place)
        if not count:
            raise ValueError("it was cut while it was read")
        place = place[count:]


def _head_of(file: Any) -> list[tuple[str, Entry]]:
    """The tensors of a file in the order of their bytes, which follow at the file's place."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_exactly(file, min(_LENGTH, size)), "little")
    return _parsed(_exactly(file, min(length, LONGEST_HEAD, size - _LENGTH)), length, size)[0]


def _exactly(file: FileIO, count: int) -> bytes:
    data = bytearray(max(count, 0))
    _fill(file, memoryview(data))
    return bytes(data)


def _parsed(head: bytes, length: int, size: int) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """The tensors of a file of so many bytes, in their order, and what else its head says."""
    if size < _LENGTH or len(head) != length or length > LONGEST_HEAD:
        raise ValueError("it is not safetensors, or it was cut")
    _check_head(head)
    text = head.decode("utf-8")  # the library takes no other encoding, and no half letters either
    try:
        found = json.loads(text, object_pairs_hook=_entry_or_mapping)
    except RecursionError as error:
        raise ValueError("its head is nested too deeply") from error
    if "\\ud" in text or "\\uD" in text:
        json.dumps(found, ensure_ascii=False, default=str).encode()
    if not isinstance(found, dict):
        raise ValueError("its head is no mapping")
    about = found.pop("__metadata__", None) or {}
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        raise ValueError("what its head says besides is no mapping of texts")
    for name, entry in found.items():
        if not isinstance(entry, Entry):
            raise ValueError(f"its head does not say what {name!r:.100} is")
    entries: list[tuple[str, Entry]] = sorted(found.items(), key=lambda one: (one[1].begin, one[1].end))
    place = 0
    for name, entry in entries:
        if entry.begin != place:
            raise ValueError(f"the bytes of {name!r:.100} do not follow those before")
        place = entry.end
    if place != size - _LENGTH - length:
        raise ValueError(
            f"its head tells of {place:,} bytes of tensors, and it has {size - _LENGTH - length:,}"
        )
    return entries, about


def _entry_or_mapping(pairs: list[tuple[str, Any]]) -> Entry | dict[str, Any]:
    """An object of a head; in no object a key stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key of its head stands twice in one object")
    return _entry(found) if found.keys() == {"dtype", "shape", "data_offsets"} else found


def _entry(found: Mapping[str, Any]) -> Entry:
    """What a head says of a tensor, if it holds together."""
    dtype, shape, places = found["dtype"], found["shape"], found["data_offsets"]
    whole = isinstance(shape, list) and isinstance(places, list) and len(places) == 2
    if not whole or len(shape) > MOST_DIMENSIONS or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError("its head tells of a tensor that there cannot be")
    for number in (*shape, *places):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError("its head has a size or a place that is no number of bytes")
    if 0 in shape and math.prod(filter(None, shape)) >> 63:  # torch multiplies them all
        raise ValueError("its head tells of a tensor that is too large")
    kind, (begin, end) = DTYPES[dtype], places
    if end - begin != kind.itemsize * math.prod(shape):
        raise ValueError("its head tells of a tensor with more or fewer bytes than its shape has")
    return Entry(kind, tuple(shape), begin, end)
