"""HTTP as the gate speaks it with nodes: one connection, its calls and answers, and what it may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import h11

HOP = {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"expect"}
PIECE = 1 << 16  # bytes read at once

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Bounds:
    """What a connection may take: seconds, bytes, and how many there may be."""

    head: float = 10.0  # for TLS, and again for the head of a call
    idle: float = 75.0  # between two calls
    silence: float = 30.0  # between two pieces of a call's body
    body: float = 600.0  # for a call's body, and again for its answer to be taken
    answer: float = 60.0  # for the SuperLink to answer
    linger: float = 2.0  # to read what comes after a refusal, so that the refusal is read
    most: int = 1 << 26  # bytes of a call or an answer; Flower sends pieces of 5 MB
    head_bytes: int = 1 << 14
    connections: int = 1000
    per_host: int = 250


class Gone(Exception):
    """The caller has left, or kept the gate waiting."""


class Caller:
    """One connection from outside."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: Bounds) -> None:
        self.reader, self.writer, self.bounds = reader, writer, bounds
        self.http = h11.Connection(h11.SERVER, bounds.head_bytes)
        self.asked = b""  # the method of the call at hand

    async def event(self, seconds: float) -> object:
        """The next event, whole, within some seconds."""
        try:
            async with asyncio.timeout(seconds):
                while (event := self.http.next_event()) is h11.NEED_DATA:
                    self.http.receive_data(await self.reader.read(PIECE))
        except (TimeoutError, OSError) as error:
            raise Gone from error
        if isinstance(event, h11.Request):
            self.asked = event.method
        return event

    async def body(self) -> AsyncIterator[bytes]:
        """The body of the call at hand, piece by piece."""
        clock = asyncio.get_running_loop()
        end, size = clock.time() + self.bounds.body, 0
        while not isinstance(event := await self._piece(end - clock.time()), h11.EndOfMessage):
            data = bytes(getattr(event, "data", b""))
            size += len(data)
            if size > self.bounds.most:
                raise Gone
            yield data

    async def _piece(self, left: float) -> object:
        try:
            event = await self.event(min(self.bounds.silence, left))
        except h11.RemoteProtocolError as error:
            raise Gone from error
        if not isinstance(event, h11.Data | h11.EndOfMessage):
            raise Gone
        return event

    async def answer(self, status: int, headers: list[Header], data: bytes) -> bool:
        """Send an answer, without its body if only the head was asked for; whether another call may follow."""
        read = self.http.their_state is h11.DONE
        stays = read and not 400 <= status < 500  # who was refused has no reason to stay
        length = [
            (b"content-length", str(len(data)).encode()),
            *([] if stays else [(b"connection", b"close")]),
        ]
        message = self.http.send(h11.Response(status_code=status, headers=[*headers, *length]))
        body = h11.Data(data=b"" if self.asked == b"HEAD" else data)
        pieces = [message, self.http.send(body), self.http.send(h11.EndOfMessage())]
        self.writer.write(b"".join(piece for piece in pieces if piece))
        try:
            async with asyncio.timeout(self.bounds.body):
                await self.writer.drain()
        except (TimeoutError, OSError) as error:
            raise Gone from error
        if stays and self.http.our_state is h11.DONE:
            self.http.start_next_cycle()
            return True
        if not read:
            await self._linger()
        return False

    async def _linger(self) -> None:
        """Read on for a moment: a caller that still sends would else lose the answer to a reset."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self.bounds.linger):
                while await self.reader.read(PIECE):
                    pass

    async def close(self) -> None:
        """Close the connection, politely if the other side lets us."""
        self.writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self.bounds.linger):
                await self.writer.wait_closed()
        self.writer.transport.abort()


def refusal(status: int, sentence: str) -> tuple[int, list[Header], bytes]:
    """An answer of the gate's own."""
    return status, [(b"content-type", b"text/plain; charset=utf-8")], sentence.encode()


def passed_on(headers: list[Header], *others: bytes) -> list[Header]:
    """The headers without those that concern one connection alone."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    dropped = HOP | {word.strip().lower() for word in named.split(b",")} | set(others)
    return [(name, value) for name, value in headers if name.lower() not in dropped]
