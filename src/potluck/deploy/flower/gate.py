"""`potluck gate`: nodes reach the fleet API of a SuperLink through it, and nobody reaches anything else.

Only a call to `/v1/fleet/` is passed on; everything else is answered with 404 and goes nowhere. Flower's SuperNodes
call again after 502, 503 and 504 and give up after any other error, so a SuperLink that is away, refuses or breaks
off gives 502, and one that is silent 504. Time, size and number of connections are bounded: whoever connects and
says nothing is put out. Needs h11 and httpx, which come with Flower.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import ipaddress
import os
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import h11
import httpx

from potluck.deploy.flower.certificates import dates_told, tls_of
from potluck.deploy.flower.connections import Security, is_same_place, split_address
from potluck.deploy.flower.http_calls import PIECE, Bounds, Caller, Gone, Header, passed_on, refusal
from potluck.errors import ConfigError

CALL = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")  # pull-messages, send-node-heartbeat, …
PAUSE = 0.2  # seconds after a connection could not be accepted


class Away(Exception):
    """The SuperLink does not answer; the sentence says why, `status` what a node is told."""

    def __init__(self, why: str, status: int = 502) -> None:
        super().__init__(why)
        self.status = status


class Line:
    """Connections to the SuperLink, with one authority; closed once they are old and no call uses them any more."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client, self.calls, self.old = client, 0, False

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[httpx.AsyncClient]:
        """The connections, for one call."""
        self.calls += 1
        try:
            yield self.client
        finally:
            self.calls -= 1
            await self.close()

    def retire(self) -> asyncio.Task[None]:
        """Take no further calls; those under way end as they began."""
        self.old = True
        return asyncio.get_running_loop().create_task(self.close())

    async def close(self) -> None:
        """Close the connections, unless they are still needed."""
        if self.old and not self.calls:
            await self.client.aclose()


class Superlink:
    """The SuperLink behind the gate; says once when it goes away and once when it is back."""

    def __init__(self, address: str, ca: Path | None, bounds: Bounds, notice: Callable[[str], None]) -> None:
        self.address, self.notice, self.bounds, self.away = address, notice, bounds, False
        self.ca, self.line = ca, Line(self._client(ca))
        self._closing: set[asyncio.Task[None]] = set()

    def trust(self) -> None:
        """Trust the authority that the file has now; a call that is under way ends as it began."""
        before, self.line = self.line, Line(self._client(self.ca))
        task = before.retire()
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _client(self, ca: Path | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"{'http' if ca is None else 'https'}://{self.address}",
            verify=False if ca is None else ssl.create_default_context(cafile=ca),
            timeout=httpx.Timeout(self.bounds.answer, connect=self.bounds.head),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def ask(
        self, call: bytes, headers: list[Header], body: AsyncIterator[bytes]
    ) -> tuple[int, list[Header], bytes]:
        """Pass a call on; status, headers and data of the answer, or `Away`."""
        try:
            answer = await self._ask(call, headers, body)
        except Away as error:
            if not self.away:
                said = f"the SuperLink at {self.address} is away ({error}); nodes are told to try again"
                self.notice(said)
            self.away = True
            raise
        if self.away:
            self.notice(f"the SuperLink at {self.address} answers again")
        self.away = False
        return answer

    async def _ask(
        self, call: bytes, headers: list[Header], body: AsyncIterator[bytes]
    ) -> tuple[int, list[Header], bytes]:
        data = bytearray()
        try:
            async with (
                self.line.call() as client,
                client.stream("POST", call.decode(), content=body, headers=headers) as answer,
            ):
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > self.bounds.most:
                        raise Away(f"it answers with more than {self.bounds.most:,} bytes")
        except httpx.TimeoutException as error:
            raise Away(f"it is silent: {type(error).__name__}", 504) from error
        except (httpx.HTTPError, httpx.StreamError, h11.LocalProtocolError, OSError) as error:
            raise Away(str(error) or type(error).__name__) from error
        return answer.status_code, passed_on(list(answer.headers.raw), b"content-length"), bytes(data)


class Gate:
    """Takes connections and passes calls to the fleet API on."""

    def __init__(self, superlink: Superlink, tls: ssl.SSLContext | None, bounds: Bounds) -> None:
        self.superlink, self.tls, self.bounds = superlink, tls, bounds
        self.held: collections.Counter[str] = collections.Counter()  # connections of each address
        self._tasks: set[asyncio.Task[None]] = set()

    def read_again(self, security: Security) -> None:
        """Take what the files have now, for new connections; bad ones leave all as it was."""
        try:
            self.tls = tls_of(security)
            self.superlink.trust()
            self.superlink.notice("the certificates were read again")
            for sentence in dates_told(security):
                self.superlink.notice(sentence)
        except ConfigError as error:
            self.superlink.notice(f"the certificates stay as they were: {error}")

    async def serve(self, door: socket.socket) -> None:
        """Take connections for ever; further ones wait while there are as many as there may be."""
        clock, room = asyncio.get_running_loop(), asyncio.Semaphore(self.bounds.connections)
        while True:
            await room.acquire()
            try:
                channel, address = await clock.sock_accept(door)
            except OSError:  # no more files may be open, or the caller has left already
                room.release()
                await asyncio.sleep(PAUSE)
                continue
            task = clock.create_task(self._one(channel, counted_as(str(address[0]))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda done: room.release())

    async def _one(self, channel: socket.socket, host: str) -> None:
        self.held[host] += 1
        try:
            if self.held[host] > self.bounds.per_host:
                channel.close()
                return
            with contextlib.suppress(OSError, TimeoutError):  # no TLS, or not in time
                caller = await self._greet(channel)
                try:
                    await self._talk(caller)
                finally:
                    await caller.close()
        finally:
            self.held[host] -= 1
            self.held += collections.Counter()  # forget addresses without connections

    async def _greet(self, channel: socket.socket) -> Caller:
        clock = asyncio.get_running_loop()
        reader = asyncio.StreamReader(PIECE, clock)
        protocol = asyncio.StreamReaderProtocol(reader)
        seconds = self.bounds.head if self.tls is not None else None
        try:
            transport, _ = await clock.connect_accepted_socket(
                lambda: protocol, channel, ssl=self.tls, ssl_handshake_timeout=seconds
            )
        except BaseException:
            channel.close()
            raise
        return Caller(reader, asyncio.StreamWriter(transport, protocol, reader, clock), self.bounds)

    async def _talk(self, caller: Caller) -> None:
        """Answer one call after the other."""
        seconds, going = self.bounds.head, True
        with contextlib.suppress(Gone):
            while going:
                try:
                    call = await caller.event(seconds)
                except h11.RemoteProtocolError as error:
                    if caller.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                        await caller.answer(*refusal(error.error_status_hint, "this is no call"))
                    return
                if not isinstance(call, h11.Request):
                    return
                going, seconds = await caller.answer(*await self._answer(call, caller)), self.bounds.idle

    async def _answer(self, call: h11.Request, caller: Caller) -> tuple[int, list[Header], bytes]:
        if call.method != b"POST" or not CALL.fullmatch(call.target):
            return refusal(404, "there is no such call")
        names = {name for name, _ in call.headers}
        if {b"content-length", b"transfer-encoding"} <= names:  # which of them holds is a matter of taste
            return refusal(400, "the length of this call is told in two ways")
        headers = passed_on(list(call.headers))
        try:
            return await self.superlink.ask(call.target, headers, caller.body())
        except Away as error:
            return refusal(error.status, "the SuperLink is away; try again")


def counted_as(host: str) -> str:
    """What connections are counted by: an address, or the first half of one of IPv6, as each caller has the rest.

    >>> counted_as("192.0.2.7"), counted_as("2001:db8:1:2:3:4:5:6"), counted_as("fe80::1%eth0")
    ('192.0.2.7', '2001:db8:1:2::/64', 'fe80::/64')
    """
    plain = host.partition("%")[0]
    return str(ipaddress.ip_network(f"{plain}/64", strict=False)) if ":" in plain else plain


def open_door(address: str) -> socket.socket:
    """Listen at an address; a sentence says why that cannot be."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        why = {errno.EADDRINUSE: "somebody listens there already", errno.EACCES: "only root may"}
        told = why.get(error.errno or 0, error.strerror or str(error))
        raise ConfigError(f"--listen {address}: {told}; choose another address") from error
    door.setblocking(False)
    return door


def gate(listen: str, superlink: str, security: Security, notice: Callable[[str], None]) -> None:
    """Let nodes through from `listen` to the fleet API of a SuperLink until interrupted."""
    split_address(superlink)
    security.check(listen, ("ca", "certificate", "key"))
    security.check(superlink, ("ca", "certificate", "key"))
    if is_same_place(listen, superlink):
        raise ConfigError(
            f"--listen {listen} and --superlink {superlink} are one place; give the SuperLink a port of its own"
        )
    tls = tls_of(security)
    with open_door(listen) as door:
        asyncio.run(_serve(door, listen, superlink, security, tls, notice))


async def _serve(
    door: socket.socket,
    listen: str,
    superlink: str,
    security: Security,
    tls: ssl.SSLContext | None,
    notice: Callable[[str], None],
) -> None:
    bounds = Bounds()
    opened = Gate(Superlink(superlink, security.ca, bounds, notice), tls, bounds)
    if hasattr(signal, "SIGHUP") and os.name == "posix":
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, opened.read_again, security)
    for sentence in dates_told(security):
        notice(sentence)
    notice(f"the gate is open at {listen}, before the SuperLink at {superlink}; Ctrl-C closes it")
    await opened.serve(door)
