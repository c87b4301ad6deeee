"""A large `split.json`, line by line: `Split.save` writes one for each client."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from potluck.data.client_splits import PARTS, ClientSplits

LARGE = 16 << 20  # bytes; a larger file is read like this, as all of it at once takes time and memory
LONGEST = 256 << 20  # bytes of a line: a client with 25 million rows has that many
_BEGIN, _END = b'"clients": [\n', b"]}\n"


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; a `ValueError` at one that is too long: a terabyte may have no end of a line."""
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError("a line is too long")
        yield line


def client_lines(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of the clients, after the first line; a `ValueError` if the file is not written that way."""
    if next(lines, b"") != _BEGIN:
        raise ValueError("it has no line for each client")
    for line in lines:
        if line == _END:
            return
        yield line
    raise ValueError("it has no end")


def about_line(line: bytes) -> dict[str, Any]:
    """What the first line says of the split as a whole."""
    about: dict[str, Any] = json.loads(line.rstrip()[:-1] + b"}")
    return about


def read_lines(path: Path) -> tuple[dict[str, Any], ClientSplits] | None:
    """A large split without views, and what its file says of it; None where the usual way has to read it.

    Nothing is checked but the form of the file: its hash has to be compared.
    """
    if path.stat().st_size <= LARGE:
        return None
    ids, sizes, rows, widths = list[str](), array("q"), array("q"), set[int]()
    try:
        with path.open("rb") as file:
            lines = lines_of(file)
            about = about_line(next(lines, b""))
            for line in client_lines(lines):
                entry = json.loads(line.rstrip().rstrip(b","))
                parts = [entry.pop(part) for part in PARTS]
                ids.append(str(entry.pop("id")))
                sizes.extend(map(len, parts))
                for part in parts:
                    rows.extend(part)
                counts = entry.pop("counts", [len(parts[0])])
                whole = {*map(type, counts)} <= {int} and min(counts, default=0) >= 0
                widths.add(len(counts))
                if entry or not whole or sum(counts) != len(parts[0]):
                    return None
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
        return None
    if len(set(ids)) < len(ids) or (len(widths) > 1 and "groups" not in about):
        return None
    table = np.array(sizes, dtype=np.int64).reshape(-1, len(PARTS))
    return about, ClientSplits(tuple(ids), np.array(rows, dtype=np.int64), table)
