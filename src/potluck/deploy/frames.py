"""Frames over a Unix socket: a small note and pieces of bytes. Flower's apps import this, so it knows no torch."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LENGTH = 8  # bytes of the number before a frame's head
LONGEST_HEAD = 1 << 24  # a head holds sizes and short sentences; anything longer is no frame
NAME_LIMIT = 100  # characters of a socket's path; the system allows little more

Node = int
Letter = tuple[Node, bytes]


class TooLarge(Exception):
    """A frame that is larger than its receiver takes; nothing of its pieces has been read."""


def too_large(what: str, size: int, most: int) -> str:
    """One sentence about something that is refused for its size."""
    return f"{what} has {size:,} bytes, at most {most:,} are allowed"


def send(channel: socket.socket, note: Mapping[str, Any], pieces: Sequence[bytes] = ()) -> None:
    """Send a note and pieces of bytes."""
    head = json.dumps({"note": note, "sizes": [len(piece) for piece in pieces]}).encode()
    channel.sendall(len(head).to_bytes(LENGTH, "little") + head)
    for piece in pieces:
        channel.sendall(piece)


def receive(
    channel: socket.socket, most: int | None = None, what: str = "a frame"
) -> tuple[dict[str, Any], list[bytes]]:
    """The next frame; `EOFError` when the other side is gone or does not speak in frames.

    Pieces of more than `most` bytes together are `TooLarge`, before there is memory for them.
    """
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
    if most is not None and sum(sizes) > most:
        raise TooLarge(too_large(what, sum(sizes), most))
    return note, [_read(channel, size) for size in sizes]


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    rest = memoryview(data)
    while len(rest):
        count = channel.recv_into(rest)
        if not count:
            raise EOFError("the other side is gone")
        rest = rest[count:]
    return bytes(data)


@contextlib.contextmanager
def listening(path: Path, mode: int = 0o600) -> Iterator[socket.socket]:
    """A socket others can connect to by its path; a file a killed process left there is replaced."""
    if len(str(path)) > NAME_LIMIT:
        raise OSError(f"the path of a socket has at most {NAME_LIMIT} characters: {path}")
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        path.chmod(mode)
        door.listen()
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def connect(path: str) -> socket.socket:
    """A connection to a listening socket; `OSError` if nobody is there."""
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(path)
    except OSError:
        channel.close()
        raise
    return channel
