"""Frames over a socket: a small JSON note and pieces of bytes.

A frame is eight bytes with the length of its head, the head (the note and the size of each piece, as JSON), and
then the pieces. Flower's apps import this module, so it must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError

LENGTH = 8  # bytes of the number in front of a head
LONGEST_HEAD = 1 << 24  # bytes; a head holds sizes and short sentences, so anything longer is not a frame
NAME_LIMIT = 100  # bytes of a socket's path; the system allows little more
NAME_ROOM = 16  # bytes of it that a socket has in a folder of our own

Node = int  # the number Flower gives a participant's node
Letter = tuple[Node, bytes]  # bytes for a node


class TooLarge(Exception):
    """A frame is larger than its receiver accepts; none of its pieces has been read."""


def too_large(what: str, size: int, most: int) -> str:
    """The sentence for something that is refused because of its size."""
    return f"{what} has {size:,} bytes, at most {most:,} are allowed"


def send(channel: socket.socket, note: Mapping[str, Any], pieces: Sequence[bytes | memoryview] = ()) -> None:
    """Send a note and pieces of bytes."""
    head = json.dumps({"note": note, "sizes": [len(piece) for piece in pieces]}).encode()
    channel.sendall(len(head).to_bytes(LENGTH, "little") + head)
    for piece in pieces:
        channel.sendall(piece)


def receive(
    channel: socket.socket, most: int | None = None, what: str = "a frame"
) -> tuple[dict[str, Any], list[bytes]]:
    """Receive the next frame; `EOFError` if the other side is gone or sends something else.

    If the pieces have more than `most` bytes in total, raise `TooLarge` before any memory is taken for them.
    """
    note, sizes = receive_head(channel)
    if most is not None and sum(sizes) > most:
        raise TooLarge(too_large(what, sum(sizes), most))
    return note, [_read(channel, size) for size in sizes]


def receive_head(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive the note of the next frame and the sizes of its pieces; the caller then reads each with `fill`."""
    length = int.from_bytes(_read(channel, LENGTH), "little")
    if length > LONGEST_HEAD:
        raise EOFError(f"a head of {length} bytes is no frame")
    try:
        head = json.loads(_read(channel, length))
        note, sizes = dict(head["note"]), [int(size) for size in head["sizes"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise EOFError(f"no frame: {error}") from error
    if min(sizes, default=0) < 0:
        raise EOFError("no frame: a piece of a negative size")
    return note, sizes


def fill(channel: socket.socket, place: memoryview) -> None:
    """Read bytes until `place` is full; `EOFError` if the other side is gone before that."""
    while len(place):
        count = channel.recv_into(place)
        if not count:
            raise EOFError("the other side is gone")
        place = place[count:]


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    fill(channel, memoryview(data))
    return bytes(data)


def check_path(path: Path) -> None:
    """Refuse a path that is too long for a socket, or that Flower's settings do not take."""
    if not is_told_whole(path):
        raise ConfigError(f"{str(path)!r} has signs that Flower does not take in a path; choose another one")
    if len(os.fsencode(path)) > NAME_LIMIT:
        raise ConfigError(
            f"the path of a socket has at most {NAME_LIMIT} bytes; choose a shorter one than {path}"
        )


def is_told_whole(path: Path | str) -> bool:
    """Whether a path between quotation marks, as Flower's settings have it, is read as it is."""
    text = str(path)
    return text.isprintable() and not {'"', "\\"} & set(text)


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """A temporary folder for sockets, removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
        long = len(os.fsencode(folder)) > NAME_LIMIT - NAME_ROOM
        if long or not is_told_whole(folder):
            why = "is too long for sockets" if long else "has signs that Flower does not take"
            raise ConfigError(
                f"the path of the folder for temporary files {why}: {tempfile.gettempdir()}; "
                f"set TMPDIR to {'a shorter' if long else 'another'} one, such as /tmp"
            )
        yield Path(folder)


@contextlib.contextmanager
def listening(path: Path, mode: int = 0o600) -> Iterator[socket.socket]:
    """Open a Unix socket at a path; one that a killed process left there is replaced, and nothing else is."""
    check_path(path)
    if os.path.lexists(path) and not path.is_socket():
        raise ConfigError(f"{path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX) as door:
        try:
            path.unlink(missing_ok=True)
            door.bind(str(path))
            path.chmod(mode)
            door.listen()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"cannot open a socket at {path}: {reason}; choose another path") from error
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def connect(path: str, wait: float | None = None) -> socket.socket:
    """Connect to a Unix socket by its path; `OSError` if nobody listens there.

    With `wait` whatever is done with it may take so many seconds, and nobody waits in line for a place.
    """
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(wait)
    try:
        channel.connect(path)
    except OSError:
        channel.close()
        raise
    return channel
