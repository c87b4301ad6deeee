"""How much the pages of a Parquet file hold, from the head of each page.

The head of the file says it too, but nothing holds it to that: a page is unpacked whole, whatever the file's head
claims of its column. Heads of pages are in Thrift's compact form. Only the few numbers that count are looked at,
and what two readers could read in two ways is refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DATA, _DATA_2 = 0, 3  # kinds of pages with values; others are dictionaries, or are skipped by Arrow
_KIND, _UNPACKED, _PACKED = 1, 2, 3  # fields of a page's head
_COUNTED = {5: _DATA, 8: _DATA_2}  # and those with a head of their own, whose field 1 counts values
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_PADDING = 100  # bytes that Arrow may read beyond a column, as some old writers did not count them
_LONGEST = 16 << 20  # bytes of a page's head, as in Arrow
_DEEPEST = 10  # structures in structures
_FIELDS = 1_000  # no structure has as many


@dataclass(frozen=True)
class Pages:
    """What the pages of one column in one group of rows hold."""

    values: int  # those of its data pages; a list has one for each of its items
    size: int  # bytes once they are unpacked


def pages_of(path: Path, metadata: Any) -> Iterator[Pages]:
    """What the pages of each column hold, group by group; a `ValueError` says why one cannot be read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        walked = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for place in range(group.num_columns):
                found, length = _pages(content, group.column(place), len(content) - walked)
                walked += length
                yield found


def _pages(content: mmap.mmap, column: Any, most: int) -> tuple[Pages, int]:
    """Those of one column, and their length in the file, which has at most so many bytes for them.

    Arrow reads pages until there are as many values as the file's head says, the last one whole.
    """
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    place, end = start, min(start + column.total_compressed_size + _PADDING, len(content))
    values = size = 0
    while values < column.num_values and 0 <= place < end:
        head = _Head(content, place)
        values, size, place = values + head.values, size + head.unpacked, head.end + head.packed
        if place - start > most:
            raise ValueError("its columns do not fit into it")
    return Pages(values, size), place - start


class _Head:
    """The head of one page."""

    def __init__(self, content: mmap.mmap, place: int) -> None:
        self._content, self._place, self._last = content, place, min(place + _LONGEST, len(content))
        numbers = dict.fromkeys((_KIND, _UNPACKED, _PACKED), -1)
        counts = dict.fromkeys(_COUNTED.values(), 0)
        for field, form in self._fields({**dict.fromkeys(numbers, _I32), **dict.fromkeys(_COUNTED, _STRUCT)}):
            if field in numbers:
                numbers[field] = self._number()
            elif field in _COUNTED:
                counts[_COUNTED[field]] = self._count()
            else:
                self._skip(form)
        self.values = counts.get(numbers[_KIND], 0)
        self.unpacked, self.packed, self.end = numbers[_UNPACKED], numbers[_PACKED], self._place
        if min(self.values, *numbers.values()) < 0:
            raise ValueError("the head of a page is not whole")

    def _count(self) -> int:
        """The number of values in a structure."""
        found = -1
        for field, form in self._fields({1: _I32}):
            if field == 1:
                found = self._number()
            else:
                self._skip(form)
        return found

    # --- Thrift's compact form ---

    def _fields(self, forms: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Number and form of each field in a structure; whoever is told reads or skips what is in it.

        Each is there once, in the order of their numbers: readers may take others for one that counts, or not.
        """
        field = 0
        while (head := self._byte()) != 0:
            before, step, form = field, head >> 4, head & 15
            field = field + step if step else self._number()
            if not before < field < _FIELDS or forms.get(field, form) != form:
                raise ValueError("the head of a page has fields that are none of one")
            yield field, form

    def _skip(self, form: int, depth: int = 0) -> None:
        if depth > _DEEPEST:
            raise ValueError("the head of a page is nested too deeply")
        if form in (_I16, _I32, _I64):
            self._unsigned()
        elif form in (_BYTE, _DOUBLE, _BINARY):
            length = {_BYTE: 1, _DOUBLE: 8}.get(form) or self._unsigned()
            self._place += length
        elif form in (_LIST, _SET):
            self._skip_list(depth + 1)
        elif form == _STRUCT:
            for _, inner in self._fields({}):
                self._skip(inner, depth + 1)
        elif form not in (_TRUE, _FALSE):  # a map: heads of pages have none
            raise ValueError("the head of a page has a field of another form")

    def _skip_list(self, depth: int) -> None:
        head = self._byte()
        length, form = head >> 4, head & 15
        for _ in range(self._unsigned() if length == 15 else length):
            self._skip(_BYTE if form in (_TRUE, _FALSE) else form, depth)
            if self._place > self._last:
                raise ValueError("the head of a page is cut off")

    def _byte(self) -> int:
        if self._place >= self._last:
            raise ValueError("the head of a page is cut off")
        self._place += 1
        return self._content[self._place - 1]

    def _unsigned(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("the head of a page has too long a number")

    def _number(self) -> int:
        """A number of 32 bits, which may be negative."""
        found = self._unsigned()
        if found >> 32:
            raise ValueError("the head of a page has too long a number")
        return (found >> 1) ^ -(found & 1)
