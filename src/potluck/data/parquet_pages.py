"""How much the pages of a Parquet file hold, from the head of each page.

The head of the file says it too, but nothing holds it to that: a page is unpacked whole, whatever the file's head
claims of its column. All heads are in Thrift's compact form. Only the few numbers that count are looked at, and
what two readers could read in two ways is refused. Arrow is not asked where the pages are: of some broken or
encrypted columns it says so by ending the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)

# What is looked at, by the numbers of fields in Parquet's specification.
_SCHEMA, _GROUPS, _COLUMNS = 2, 4, 1  # lists: two in the head of the file, one in a group of rows
_CHILDREN = 5  # of a field in the schema: how many of the next ones are in it
_ABOUT, _SECRET = 3, 8  # of a column: the second where it is encrypted
_CODEC, _VALUES, _LENGTH, _DATA_AT, _DICTIONARY_AT = 4, 5, 7, 9, 11
_COLUMN = {
    _ABOUT: {_CODEC: _I32, **dict.fromkeys((_VALUES, _LENGTH, _DATA_AT, _DICTIONARY_AT), _I64)},
    _SECRET: {},
}
_KIND, _UNPACKED, _PACKED = 1, 2, 3  # of a page
_FIRST, _DICTIONARY, _SECOND = 0, 2, 3  # kinds of pages with values, two of them with those of a column
# The field about them, and in it the one of their encoding.
_COUNTED = {_FIRST: (5, 2), _DICTIONARY: (7, 2), _SECOND: (8, 4)}
_LEVELS = {_FIRST: (4, 3), _SECOND: (6, 5)}  # how these are written, or how long they are
_IS_PACKED = 7  # of the second kind
_PAGE = {
    **dict.fromkeys((_KIND, _UNPACKED, _PACKED), _I32),
    5: dict.fromkeys((1, 2, 3, 4), _I32),
    7: dict.fromkeys((1, 2), _I32),
    8: {**dict.fromkeys((1, 4, 5, 6), _I32), _IS_PACKED: _TRUE},
}

_PADDING = 100  # bytes that Arrow may read beyond a column, as some old writers did not count them
_LONGEST = 16 << 20  # bytes of a page's head, as in Arrow
_DEEPEST = 10  # structures in structures
_FIELDS = 1_000  # no structure has as many
_DIFFERENCES = frozenset((5, 6, 7))  # encodings of which the page itself says how many values it has
# What Arrow bears: it walks fields in fields by calls in calls, and takes a while for each.
_DEEPEST_FIELD, _MOST_FIELDS = 100, 150_001
# How many bytes one packed byte becomes at most, by codec: in a copy of Snappy, a match of gzip or LZ4, a block of
# Zstandard. Brotli has no such bound.
_GROWTH = {1: 22, 2: 1_032, 5: 256, 6: 32_768, 7: 256}


@dataclass(frozen=True)
class Page:
    """A page of which the values are written as differences."""

    place: int  # in the file
    packed: int  # bytes there
    unpacked: int
    codec: int  # by number in Parquet's specification, 0 for none
    values: int
    encoding: int
    second: bool  # kind of page
    levels: tuple[int, int]  # of repetitions and definitions: their encodings, in the second kind their bytes
    is_packed: bool


@dataclass(frozen=True)
class Pages:
    """What the pages of one column in one group of rows hold."""

    values: int  # those of its data pages; a list has one for each of its items
    size: int  # bytes once they are unpacked
    encodings: frozenset[int]  # how the values are written, by number in Parquet's specification
    differences: tuple[Page, ...] = ()
    once: int = 0  # bytes of them that hold values once, which may stand in many rows


def check_head(path: Path) -> int:
    """How many columns all groups of rows have; a `ValueError` where the schema is none that Arrow could bear."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        head, chunks = _head(content), 0
        for field, form in head.fields({_SCHEMA: _LIST, _GROUPS: _LIST}):
            if field == _SCHEMA:
                _check_schema(head)
            elif field == _GROUPS:
                for _ in head.items():
                    chunks += head.structure({_COLUMNS: _LIST}).get(_COLUMNS, 0)
            else:
                head.skip(form)
    return chunks


def _check_schema(head: _Heads) -> None:
    left = [1]  # fields that are still to come, in the one where we are and those around it
    for count, _ in enumerate(head.items(), 1):
        children = head.structure({_CHILDREN: _I32}).get(_CHILDREN, 0)
        while left and not left[-1]:
            left.pop()
        if not left:
            raise ValueError("its schema has fields in none")
        left[-1] -= 1
        if children > 0:
            left.append(children)
        if len(left) > _DEEPEST_FIELD or count > _MOST_FIELDS:
            raise ValueError(
                f"its schema has more than {_MOST_FIELDS:,} fields or {_DEEPEST_FIELD} in each other"
            )


def _head(content: mmap.mmap) -> _Heads:
    """The head of the file, which is at its end: then come its length, and a sign."""
    end = len(content) - 8
    return _Heads(content, end - int.from_bytes(content[end : end + 4], "little"), end)


def pages_of(path: Path, columns: int) -> Iterator[Pages]:
    """What the pages of each of so many columns hold, group by group; a `ValueError` says what cannot be read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        walked, head = 0, _head(content)
        for _ in head.each(_GROUPS):
            found = [head.structure(_COLUMN) for _ in head.each(_COLUMNS)]
            if len(found) != columns:
                raise ValueError("a group of its rows has other columns than its head")
            for column in found:
                pages, length = _pages(content, column, len(content) - walked)
                walked += length
                yield pages


def _pages(content: mmap.mmap, column: Mapping[int, Any], most: int) -> tuple[Pages, int]:
    """Those of one column, and their length in the file, which has at most so many bytes for them.

    Arrow reads pages until there are as many values as the file's head says, the last one whole.
    """
    if _SECRET in column:
        raise ValueError("a column of it is encrypted")
    about = column.get(_ABOUT, {})
    start, dictionary = about.get(_DATA_AT, -1), about.get(_DICTIONARY_AT, 0)
    place = start = dictionary if 0 < dictionary < start else start
    end = min(start + about.get(_LENGTH, -1) + _PADDING, len(content))
    codec = about.get(_CODEC, -1)
    values, size, once, encodings, differences = 0, 0, 0, frozenset[int](), list[Page]()
    while values < about.get(_VALUES, -1) and 0 <= place < end:
        heads = _Heads(content, place, min(place + _LONGEST, len(content)))
        page = heads.structure(_PAGE)
        kind, unpacked, packed = (page.get(field, -1) for field in (_KIND, _UNPACKED, _PACKED))
        counted, encoding = 0, 0
        if kind in _COUNTED:
            field, encoded = _COUNTED[kind]
            counted, encoding = (page.get(field, {}).get(one, -1) for one in (1, encoded))
        if min(kind, unpacked, packed, counted, encoding) < 0:
            raise ValueError("the head of a page is not whole")
        if unpacked > packed * _GROWTH.get(codec, unpacked):
            raise ValueError("a page in it claims more bytes than fit into it")
        place = heads.place + packed
        if place - start > most:
            raise ValueError("its columns do not fit into it")
        if kind in _LEVELS:
            values, encodings = values + counted, encodings | {encoding}
            if encoding in _DIFFERENCES:
                differences.append(_differences(page, heads.place, codec))
        elif kind == _DICTIONARY and counted > unpacked:
            raise ValueError("a dictionary in it has more values than bytes")
        once += unpacked * (kind == _DICTIONARY)
        size += unpacked
    return Pages(values, size, encodings, tuple(differences), once), place - start


def _differences(page: Mapping[int, Any], place: int, codec: int) -> Page:
    kind = page[_KIND]
    field, encoding = _COUNTED[kind]
    said = page[field]
    levels = tuple(said.get(one, -1) for one in _LEVELS[kind])
    if min(codec, *levels) < 0:
        raise ValueError("the head of a page is not whole")
    return Page(
        place,
        page[_PACKED],
        page[_UNPACKED],
        codec,
        said[1],
        said[encoding],
        kind == _SECOND,
        (levels[0], levels[1]),
        said.get(_IS_PACKED, True),
    )


class _Heads:
    """Structures of Thrift's compact form, one behind the other."""

    def __init__(self, content: mmap.mmap, place: int, last: int) -> None:
        self._content, self.place, self._last = content, place, last
        if place < 0:
            raise ValueError("its head is cut off")

    def structure(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """The wanted fields of the next structure: numbers, lengths of lists, structures with wanted fields."""
        found: dict[int, Any] = {}
        forms = {field: one if isinstance(one, int) else _STRUCT for field, one in wanted.items()}
        for field, form in self.fields(forms):
            if field not in wanted:
                self.skip(form)
            elif form == _STRUCT:
                found[field] = self.structure(wanted[field])
            elif form in (_TRUE, _FALSE):
                found[field] = form == _TRUE
            elif form == _LIST:
                found[field] = self._skip_list(0)
            else:
                found[field] = self._number(64 if form == _I64 else 32)
        return found

    def each(self, field: int) -> Iterator[None]:
        """Walk through the next structure, and stop before each structure in a list; whoever is told reads it."""
        for one, form in self.fields({field: _LIST}):
            if one == field:
                yield from self.items()
            else:
                self.skip(form)

    def items(self) -> Iterator[None]:
        """Stop before each structure in a list; whoever is told reads it."""
        length, form = self._list()
        if length and form != _STRUCT:
            raise ValueError("a head in it has a list of another form")
        for _ in range(length):
            yield

    def fields(self, forms: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Number and form of each field in a structure; whoever is told reads or skips what is in it.

        Each is there once, in the order of their numbers: readers may take others for one that counts, or not.
        """
        field = 0
        while (head := self._byte()) != 0:
            before, step, form = field, head >> 4, head & 15
            field = field + step if step else self._number(32)
            alike = _TRUE if form == _FALSE else form
            if not before < field < _FIELDS or forms.get(field, alike) != alike:
                raise ValueError("a head in it has fields that are none of one")
            yield field, form

    def skip(self, form: int, depth: int = 0) -> None:
        if depth > _DEEPEST:
            raise ValueError("a head in it is nested too deeply")
        if form in (_I16, _I32, _I64):
            self._unsigned()
        elif form in (_BYTE, _DOUBLE, _BINARY):
            length = {_BYTE: 1, _DOUBLE: 8}.get(form) or self._unsigned()
            self.place += length
        elif form in (_LIST, _SET):
            self._skip_list(depth + 1)
        elif form == _STRUCT:
            for _, inner in self.fields({}):
                self.skip(inner, depth + 1)
        elif form not in (_TRUE, _FALSE):  # a map: Parquet has none
            raise ValueError("a head in it has a field of another form")

    def _skip_list(self, depth: int) -> int:
        length, form = self._list()
        for _ in range(length):
            self.skip(_BYTE if form in (_TRUE, _FALSE) else form, depth)
            if self.place > self._last:
                raise ValueError("a head in it is cut off")
        return length

    def _list(self) -> tuple[int, int]:
        """Length of a list, and the form of what is in it."""
        head = self._byte()
        length = head >> 4
        return self._unsigned() if length == 15 else length, head & 15

    def _byte(self) -> int:
        if self.place >= self._last:
            raise ValueError("a head in it is cut off")
        self.place += 1
        return self._content[self.place - 1]

    def _unsigned(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("a head in it has too long a number")

    def _number(self, bits: int) -> int:
        """A number of so many bits, which may be negative."""
        found = self._unsigned()
        if found >> bits:
            raise ValueError("a head in it has too long a number")
        return (found >> 1) ^ -(found & 1)
