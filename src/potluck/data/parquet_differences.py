"""What a page of a Parquet file claims in itself, where its values are written as differences.

Such a page begins with how many values it has, and Arrow takes memory for so many before it looks for them. A text
may also have nothing in the page but how many letters it shares with the one before.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from potluck.data.parquet_pages import Page

_SHARING = 7  # the encoding of texts that share letters with those before, by number in the specification
_RUNS, _BITS = 3, 4  # encodings of levels
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_HADOOP = 5  # LZ4 in pieces, each with its two lengths
_LARGEST = 65_536  # values of a block: no writer has as many
_WIDEST = 32  # bits of a length
_AT_ONCE = 65_536  # lengths


def shared_in(content: mmap.mmap, page: Page, levels: tuple[int, int]) -> int:
    """How many letters the texts of a page share with those before; a `ValueError` where it claims too much.

    `levels` are the largest of repetitions and of definitions in its column.
    """
    body = _Body(_values_of(content, page, levels), page.values)
    if not body.left:
        return 0
    shared = sum(int(lengths.sum()) for lengths in body.lengths()) if page.encoding == _SHARING else 0
    body.head()
    return shared


def _values_of(content: mmap.mmap, page: Page, levels: tuple[int, int]) -> np.ndarray:
    """The bytes of the values of a page, without the levels before them; they are in memory once."""
    packed = content[page.place : page.place + page.packed]
    if page.second:
        length = sum(page.levels)
        if length > min(page.packed, page.unpacked):
            raise ValueError("a page in it is cut off")
        codec = page.codec if page.is_packed and page.unpacked > length else 0
        return np.frombuffer(_unpack(packed[length:], codec, page.unpacked - length), np.uint8)
    values, place = np.frombuffer(_unpack(packed, page.codec, page.unpacked), np.uint8), 0
    for encoding, largest in zip(page.levels, levels, strict=True):
        if largest and encoding == _RUNS:
            place += 4 + int.from_bytes(values[place : place + 4].tobytes(), "little")
        elif largest and encoding == _BITS:
            place += -(-page.values * largest.bit_length() // 8)
        elif largest:
            raise ValueError("a page in it has levels of another encoding")
    return values[place:]


def _unpack(packed: bytes, codec: int, size: int) -> bytes:
    if not codec:
        return packed
    if codec == _HADOOP:
        return b"".join(_pieces(packed, size))
    if codec not in _CODECS:
        raise ValueError("a page in it is packed in a way that cannot be read")
    return bytes(pa.Codec(_CODECS[codec]).decompress(packed, size, asbytes=True))


def _pieces(packed: bytes, size: int) -> Iterator[bytes]:
    while packed:
        full, length = (int.from_bytes(packed[at : at + 4], "big") for at in (0, 4))
        size -= full
        if size < 0 or len(packed) < 8 + length:
            raise ValueError("a page in it is cut off")
        yield pa.Codec("lz4_raw").decompress(packed[8 : 8 + length], full, asbytes=True)
        packed = packed[8 + length :]


class _Body:
    """Blocks of differences, one behind the other, in a page with so many values."""

    def __init__(self, content: np.ndarray, values: int) -> None:
        self._content, self._place, self._most = content, 0, values
        self._end = len(content)

    @property
    def left(self) -> int:
        return self._end - self._place

    def head(self) -> tuple[int, int, int, int]:
        """Values of a block, its parts, how many values there are in all blocks, and the first of them."""
        size, parts, count, first = (self._unsigned() for _ in range(4))
        if count > self._most:
            raise ValueError("a page in it claims more values than it has")
        if not 0 < size <= _LARGEST or not 0 < parts <= size or size // parts % 32:
            raise ValueError("a page in it has blocks that are none")
        return size, parts, count, first

    def lengths(self) -> Iterator[np.ndarray]:
        """The lengths that come next, some at a time."""
        size, parts, count, first = self.head()
        each, last, left = size // parts, _signed(first), count - 1
        yield _checked(np.array([last] * min(count, 1), np.int64))
        while left > 0:
            lows, widths, places, found = [], [], [], 0
            while found < min(left, _AT_ONCE):
                low = _signed(self._unsigned())
                given = self._content[self._place : self._place + parts].tolist()
                self._place += parts
                for width in given[: -(-(left - found) // each)]:
                    lows.append(low)
                    widths.append(width)
                    places.append(self._place)
                    self._place += width * each // 8
                found += size
            if self.left < 0 or max(widths) > _WIDEST:
                raise ValueError("a page in it is cut off")
            steps = self._numbers(places, widths, each) + np.array(lows)[:, None]
            lengths = _checked(last + steps.ravel()[:left].cumsum())
            yield lengths
            last, left = int(lengths[-1]), left - len(lengths)

    def _numbers(self, places: list[int], widths: list[int], each: int) -> np.ndarray:
        """So many numbers from each of the places, as wide as is said for it."""
        wide = np.array(widths)[:, None]
        bits = 8 * np.array(places)[:, None] + wide * np.arange(each)
        found = np.zeros(bits.shape, np.int64)
        for byte in range(5):
            content = self._content.take((bits >> 3) + byte, mode="clip")  # beyond the end nothing counts
            found |= content.astype(np.int64) << 8 * byte
        return (found >> (bits & 7)) & ((1 << wide) - 1)

    def _unsigned(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            if self._place >= self._end:
                break
            byte = int(self._content[self._place])
            self._place += 1
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("a page in it is cut off")


def _signed(number: int) -> int:
    """What is written as this number, whose lowest bit is the sign, in 32 bits."""
    number &= 0xFFFFFFFF
    return (number >> 1) ^ -(number & 1)


def _checked(lengths: np.ndarray) -> np.ndarray:
    """Lengths as Arrow has them, in 32 bits."""
    found = lengths.astype(np.int32)
    if found.size and found.min() < 0:
        raise ValueError("a page in it has texts shorter than none")
    return found.astype(np.int64)
