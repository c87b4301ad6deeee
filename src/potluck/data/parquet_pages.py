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
_GROUPS, _COLUMNS = 4, 1  # lists of structures: in the head of the file, and in a group of rows
_ABOUT, _SECRET = 3, 8  # of a column: the second where it is encrypted
_VALUES, _LENGTH, _DATA_AT, _DICTIONARY_AT = 5, 7, 9, 11
_COLUMN = {_ABOUT: dict.fromkeys((_VALUES, _LENGTH, _DATA_AT, _DICTIONARY_AT), _I64), _SECRET: {}}
_KIND, _UNPACKED, _PACKED = 1, 2, 3  # of a page
# Kinds of pages with values: the field about them, and in it the one of their encoding.
_COUNTED = {0: (5, 2), 3: (8, 4)}
_PAGE = {
    **dict.fromkeys((_KIND, _UNPACKED, _PACKED), _I32),
    **{about: {1: _I32, encoding: _I32} for about, encoding in _COUNTED.values()},
}

_PADDING = 100  # bytes that Arrow may read beyond a column, as some old writers did not count them
_LONGEST = 16 << 20  # bytes of a page's head, as in Arrow
_DEEPEST = 10  # structures in structures
_FIELDS = 1_000  # no structure has as many


@dataclass(frozen=True)
class Pages:
    """What the pages of one column in one group of rows hold."""

    values: int  # those of its data pages; a list has one for each of its items
    size: int  # bytes once they are unpacked
    encodings: frozenset[int]  # how the values are written, by number in Parquet's specification


def pages_of(path: Path, columns: int) -> Iterator[Pages]:
    """What the pages of each of so many columns hold, group by group; a `ValueError` says what cannot be read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        walked, end = 0, len(content) - 8  # then the length of the file's head, and a sign
        head = _Heads(content, end - int.from_bytes(content[end : end + 4], "little"), end)
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
    values, size, encodings = 0, 0, set()
    while values < about.get(_VALUES, -1) and 0 <= place < end:
        heads = _Heads(content, place, min(place + _LONGEST, len(content)))
        page = heads.structure(_PAGE)
        kind, unpacked, packed = (page.get(field, -1) for field in (_KIND, _UNPACKED, _PACKED))
        counted, encoding = 0, 0
        if kind in _COUNTED:
            field, encoded = _COUNTED[kind]
            counted, encoding = (page.get(field, {}).get(one, -1) for one in (1, encoded))
            encodings.add(encoding)
        if min(kind, unpacked, packed, counted, encoding) < 0:
            raise ValueError("the head of a page is not whole")
        values, size, place = values + counted, size + unpacked, heads.place + packed
        if place - start > most:
            raise ValueError("its columns do not fit into it")
    return Pages(values, size, frozenset(encodings)), place - start


class _Heads:
    """Structures of Thrift's compact form, one behind the other."""

    def __init__(self, content: mmap.mmap, place: int, last: int) -> None:
        self._content, self.place, self._last = content, place, last
        if place < 0:
            raise ValueError("its head is cut off")

    def structure(self, wanted: Mapping[int, Any]) -> dict[int, Any]:
        """The wanted fields of the next structure: numbers of a form, or structures with wanted fields."""
        found: dict[int, Any] = {}
        forms = {field: one if isinstance(one, int) else _STRUCT for field, one in wanted.items()}
        for field, form in self._fields(forms):
            if field not in wanted:
                self._skip(form)
            elif form == _STRUCT:
                found[field] = self.structure(wanted[field])
            else:
                found[field] = self._number(64 if form == _I64 else 32)
        return found

    def each(self, field: int) -> Iterator[None]:
        """Walk through the next structure, and stop before each structure in a list; whoever is told reads it."""
        for one, form in self._fields({field: _LIST}):
            if one != field:
                self._skip(form)
                continue
            length, inner = self._list()
            if length and inner != _STRUCT:
                raise ValueError("a head in it has a list of another form")
            for _ in range(length):
                yield

    def _fields(self, forms: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Number and form of each field in a structure; whoever is told reads or skips what is in it.

        Each is there once, in the order of their numbers: readers may take others for one that counts, or not.
        """
        field = 0
        while (head := self._byte()) != 0:
            before, step, form = field, head >> 4, head & 15
            field = field + step if step else self._number(32)
            if not before < field < _FIELDS or forms.get(field, form) != form:
                raise ValueError("a head in it has fields that are none of one")
            yield field, form

    def _skip(self, form: int, depth: int = 0) -> None:
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
            for _, inner in self._fields({}):
                self._skip(inner, depth + 1)
        elif form not in (_TRUE, _FALSE):  # a map: Parquet has none
            raise ValueError("a head in it has a field of another form")

    def _skip_list(self, depth: int) -> None:
        length, form = self._list()
        for _ in range(length):
            self._skip(_BYTE if form in (_TRUE, _FALSE) else form, depth)
            if self.place > self._last:
                raise ValueError("a head in it is cut off")

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
