"""The way from `potluck serve` to the nodes: a run on a SuperLink whose app relays our letters.

The other end of the relay is `server` in `apps`, which Flower starts. A relay or a SuperLink that is lost is waited
for and replaced, and what was asked is asked again: sites answer a repeated order from their record.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from potluck.core.card import ClientId
from potluck.deploy.flower.connections import Security
from potluck.deploy.flower.processes import START, require_flower
from potluck.deploy.flower.superlinks import Superlink
from potluck.engine import frames
from potluck.engine.frames import Letter, Node
from potluck.errors import RunError

SLACK = 60.0  # seconds beyond an exchange's deadline after which the relay is given up
LOOK = 2.0  # seconds between two looks at whether the SuperLink is still there
LOOKS = 3  # in vain, one after the other, after which it is lost
RETURN = 60.0  # seconds nodes have to come back to a SuperLink that was away
LONGEST = 30.0  # seconds between two attempts to connect
TRIES = 20  # at one exchange, each of which lost the relay

T = TypeVar("T")


class Lost(RunError):
    """The relay is gone, or does not answer."""


class Relay:
    """A courier that sends letters to nodes through the ServerApp that Flower runs."""

    def __init__(self, channel: socket.socket, lost: Callable[[], str] = lambda: "") -> None:
        """`lost` says why no answer can come any more, or nothing."""
        self._channel, self._lost = channel, lost
        self._keys: dict[Node, str] = {}
        self._took: list[float | None] = []

    def nodes(self) -> list[Node]:
        """The nodes that are connected now."""
        note, _ = self._ask({"ask": "nodes"}, (), SLACK, 0)
        self._keys = {int(node): str(key) for node, key in zip(note["nodes"], note["keys"], strict=True)}
        return list(self._keys)

    def keys(self) -> Mapping[Node, str]:
        """The keys of the nodes at the last call of `nodes`; the SuperLink has checked them."""
        return self._keys

    def exchange(self, letters: Sequence[Letter], timeout: float, most: Sequence[int]) -> list[bytes | str]:
        """The answer to every letter, in order; a sentence where none came in time or it was too large."""
        to = [node for node, _ in letters]
        note = {"ask": "exchange", "to": to, "timeout": timeout, "most": list(most)}
        told, answers = self._ask(note, [data for _, data in letters], timeout + SLACK, sum(most))
        self._took = told["seconds"]
        return [failure or answer for failure, answer in zip(told["failures"], answers, strict=True)]

    def took(self) -> Sequence[float | None]:
        """The seconds until each answer of the last exchange was here."""
        return self._took

    def _ask(
        self, note: Mapping[str, Any], pieces: Sequence[bytes], timeout: float, most: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        self._channel.settimeout(timeout)
        try:
            frames.send(self._channel, note, pieces)
            self._await(time.monotonic() + timeout)
            return frames.receive(self._channel, most)
        except (EOFError, OSError, frames.TooLarge) as error:
            raise Lost(
                f"the connection to Flower is lost ({error}); run the same command again to go on"
            ) from error

    def _await(self, end: float) -> None:
        """Wait until an answer begins to come."""
        vain = 0
        while not select.select([self._channel], [], [], LOOK)[0]:
            why = self._lost()
            vain = vain + 1 if why else 0
            if vain >= LOOKS:
                raise EOFError(why)
            if time.monotonic() > end:
                raise EOFError("the relay does not answer")


class Courier:
    """A courier that outlives relays and SuperLinks."""

    def __init__(
        self, superlink: Superlink, folder: Path, patience: float, notice: Callable[[str], None]
    ) -> None:
        """`folder` is for sockets; `patience` how many seconds a connection may take to come back."""
        self.superlink, self.folder, self.patience, self.notice = superlink, folder, patience, notice
        self._relay: Relay | None = None
        self._channel: socket.socket | None = None
        self._number = (
            0  # of relays so far; each has a socket of its own, so that no earlier one takes its place
        )

    def nodes(self) -> list[Node]:
        """The nodes that are connected now."""
        return self._asked(lambda relay: relay.nodes())

    def keys(self) -> Mapping[Node, str]:
        """The keys of the nodes at the last call of `nodes`."""
        return self._relay.keys() if self._relay is not None else {}

    def exchange(self, letters: Sequence[Letter], timeout: float, most: Sequence[int]) -> list[bytes | str]:
        """The answer to every letter, or a sentence; sent again when the relay is lost over it."""
        to = {node for node, _ in letters}
        return self._asked(lambda relay: relay.exchange(letters, timeout, most), to)

    def took(self) -> Sequence[float | None]:
        """The seconds until each answer of the last exchange was here."""
        return self._relay.took() if self._relay is not None else ()

    def connect(self) -> Relay:
        """Submit a relay to the SuperLink and wait until it is there."""
        self._number += 1
        self._make_folder()
        path = self.folder / f"serve-{self._number}"
        with frames.listening(path) as door:
            self.superlink.submit(path)
            door.settimeout(START)
            try:
                self._channel, _ = door.accept()
            except OSError as error:
                where, advice = self.superlink.home, self.superlink.distrust()
                raise RunError(f"Flower does not start the server's relay (see {where}){advice}") from error
        self._relay = Relay(self._channel, self.superlink.lost)
        return self._relay

    def _make_folder(self) -> None:
        """Make the folder of the sockets again where it was cleared away, as it is empty while a run goes on."""
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise RunError(f"{self.folder} was put there by somebody else; remove it")

    def close(self) -> None:
        """Let the relay go; it ends by itself."""
        self._relay = None
        if self._channel is not None:
            self._channel.close()

    def _asked(self, ask: Callable[[Relay], T], to: Collection[Node] = ()) -> T:
        for _ in range(TRIES):
            try:
                return ask(self._relay or self._reconnect(to))
            except Lost as error:
                self.close()
                why = str(error).partition(";")[0]
                self.notice(
                    f"{why}; it is sought for up to {self.patience:g} s, then the same is asked again"
                )
        raise RunError(
            f"Flower's relay was lost {TRIES} times over the same exchange; "
            "run the same command again to go on"
        )

    def _reconnect(self, to: Collection[Node]) -> Relay:
        """A new relay, after waits that grow; `RunError` when patience is at its end."""
        start, wait = time.monotonic(), 1.0
        while True:
            try:
                self.superlink.mend()
                relay = self.connect()
                break
            except RunError as error:
                left = start + self.patience - time.monotonic()
                if left <= 0:
                    told = (
                        f"no connection to Flower for {self.patience:g} s ({error}); the same command goes on"
                    )
                    raise RunError(told) from error
                time.sleep(min(wait, left))
                wait = min(2 * wait, LONGEST)
        self._expect(relay, to)
        self.notice(f"connected to Flower again after {time.monotonic() - start:.0f} s")
        return relay

    def _expect(self, relay: Relay, to: Collection[Node]) -> None:
        """Give the nodes that letters are for time to come back."""
        end = time.monotonic() + min(RETURN, self.patience)
        while not set(to) <= set(relay.nodes()) and time.monotonic() < end:
            time.sleep(LOOK)


@contextlib.contextmanager
def relaying(
    address: str,
    security: Security,
    home: Path,
    patience: float,
    notice: Callable[[str], None],
    clients: Sequence[ClientId] = (),
) -> Iterator[Courier]:
    """A courier over the SuperLink at an address; one that knows the clients' keys is started if there is none."""
    require_flower()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(frames.meeting_folder())  # first: to start Flower takes a while
        superlink = Superlink(address, security, home, notice, clients)
        stack.callback(superlink.close)
        superlink.open()
        courier = Courier(superlink, folder, patience, notice)
        stack.callback(courier.close)
        courier.connect()
        yield courier
