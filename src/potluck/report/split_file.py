"""Reading `split.json` for pages and tables: of very many clients only those that are shown."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from potluck.data import split_lines
from potluck.data.split_lines import about_line, client_lines, lines_of
from potluck.report.log import read_mapping

FIRST = 1000  # clients that are read whoever they are
PICTURED = 100  # clients of every group of a federation that are read, too


def read_split(path: Path, wanted: Collection[str] = ()) -> dict[str, Any]:
    """What `split.json` says; nothing if there is none.

    Of a large file `clients` has the first ones of all and of every group, and those that are `wanted`. `places`
    says then where each of them stands, and `total` how many there are.
    """
    found = _some(path, wanted) if path.exists() and path.stat().st_size > split_lines.LARGE else None
    return found if found is not None else read_mapping(path) or {}


def read_ids(path: Path) -> tuple[str, ...] | None:
    """The ids of all clients in a large file; None for another, which is read as a whole."""
    if path.stat().st_size <= split_lines.LARGE:
        return None
    with path.open("rb") as file:
        try:
            lines = lines_of(file)
            next(lines, b"")
            return tuple(str(json.loads(_id(line))) for line in client_lines(lines))
        except ValueError:
            return None


def total_of(split: Mapping[str, Any]) -> int:
    """How many clients there are."""
    total: int = split.get("total", len(split.get("clients") or ()))
    return total


def by_group(split: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]], int]]:
    """Every group, or the split itself, with its clients as far as they were read, and with their number."""
    clients, total = split.get("clients") or [], total_of(split)
    places, start = split.get("places") or range(len(clients)), 0
    for group in split.get("groups") or [dict(split) | {"clients": total}]:
        end = start + group["clients"]
        own = [client for place, client in zip(places, clients, strict=True) if start <= place < end]
        yield group, own, group["clients"]
        start = end


def _some(path: Path, wanted: Collection[str]) -> dict[str, Any] | None:
    """Some clients of a file that has a line for each; None if it was written in another way."""
    names = {json.dumps(one).encode() for one in wanted}
    with path.open("rb") as file:
        try:
            lines = lines_of(file)
            about = about_line(next(lines, b""))
            starts = _starts(about)
            places, clients, total = list[int](), list[Any](), 0
            for place, line in enumerate(client_lines(lines)):
                total += 1
                pictured = any(start <= place < start + PICTURED for start in starts)
                if place < FIRST or pictured or _id(line) in names:
                    places.append(place)
                    clients.append(json.loads(line.rstrip().rstrip(b",")))
        except (ValueError, TypeError, KeyError):
            return None
    return about | {"clients": clients, "places": places, "total": total}


def _starts(about: Mapping[str, Any]) -> list[int]:
    """The place of the first client of every group but the first."""
    sizes = [int(group["clients"]) for group in about.get("groups") or ()]
    return [sum(sizes[:number]) for number in range(1, len(sizes))]


def _id(line: bytes) -> bytes:
    """The id in the line of a client, as JSON."""
    end = line.find(b',"train":')
    if not line.startswith(b'{"id":') or end < 0:
        raise ValueError("a line is not that of a client")
    return line[len(b'{"id":') : end]
