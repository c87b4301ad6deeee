"""How the relay takes a reply from Flower: piece by piece, without waiting, within bounds.

Flower's own `Grid.pull_messages` waits up to two hours for a reply that was announced and never uploaded, and what
it raises over a malformed one ends the app. Here each reply has its turns, takes the parts that are there, and
whatever is wrong with it becomes a sentence about its sender.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, inflate_object_from_contents
from flwr.supercore.run import RunNotRunningException

from potluck.core.plain_values import printable
from potluck.engine import frames

ROOM = 1 << 31  # bytes of memory that reading an answer may take, whatever its size
COPIES = 6  # of an answer that may be in memory while it is read
FRAME = 1 << 20  # bytes of Flower's own around an answer
PIECE = (
    1 << 20
)  # bytes; Flower cuts arrays into pieces of 5 MB, so more parts than this allows are none of its
TURN = 1.0  # seconds after which the next reply has its turn

KEY = "potluck"
TOKEN = "token"  # a random number in every order: only a node that got the order can answer it

Read = tuple[str, bytes]  # a sentence if it failed, and the bytes


class Reply:
    """The reply to one letter, on its way."""

    def __init__(self, grid: Grid, number: str, token: str, most: int) -> None:
        self.grid, self.number, self.token, self.most = grid, number, token, most
        self.message = ""  # its id, once it is announced
        self.parts: list[str] = []  # that it consists of
        self.taken: dict[str, bytes] = {}
        self.size = 0

    def turn(self) -> Read | None:
        """Take what is there. Whatever is wrong with the reply is a sentence; only the end of the run is raised."""
        cut = False
        try:
            with bounded(ROOM + COPIES * self.most) as cut:
                found = self._take()
        except MemoryError:
            # where this process may have less than that, nobody knows whose fault it is
            why = (
                "the server has not the memory to read its reply: allow it more (ulimit -v)"
                if cut
                else f"its reply takes far more memory than the {self.most:,} bytes allowed"
            )
            found = why, b""
        except RunNotRunningException:
            raise
        except Exception as error:
            why = printable(f"{type(error).__name__}: {error}".rstrip(": "))
            found = f"its reply cannot be read: {why}", b""
        if found is not None:
            self._forget()
        return found

    def _forget(self) -> None:
        """Have the SuperLink delete the reply, read or refused; it stays there until the run ends if that fails."""
        self.taken.clear()
        client: Any = getattr(self.grid, "_runtime_client", None)
        if client is not None and self.message:
            grid: Any = self.grid
            about = ConfirmMessageReceivedRequest(
                node=grid.node, run_id=grid.run.run_id, message_object_id=self.message
            )
            with contextlib.suppress(Exception):
                client.ConfirmMessageReceived(about)

    def late(self, timeout: float) -> Read:
        """What to say of a reply that has not come in time."""
        what = "it announced a reply and did not send all of it" if self.message else "no answer"
        return f"{what} within {timeout:g} s", b""

    def _take(self) -> Read | None:
        client = getattr(self.grid, "_runtime_client", None)
        if client is None:  # Flower's simulation, whose Grid does not wait
            replies = [*self.grid.pull_messages([self.number])]
            return read(replies[0], self.token, self.most) if replies else None
        if not self.message:
            refusal = self._announced(client)
            if refusal or not self.message:
                return (refusal, b"") if refusal else None
        return self._parts(client)

    def _announced(self, client: Any) -> str:
        """Ask whether the reply has come; a sentence if it has more parts than it can have."""
        found = client.PullMessages(PullAppMessagesRequest(message_ids=[self.number]))
        for about, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            if about.metadata.reply_to_message_id == self.number:
                self.message = str(about.metadata.message_id)
                self.parts = list(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
        most = 100 + self.most // PIECE
        return (
            f"its reply comes in {len(self.parts):,} parts, {most:,} would do"
            if len(self.parts) > most
            else ""
        )

    def _parts(self, client: Any) -> Read | None:
        grid: Any = self.grid
        pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)
        end = time.monotonic() + TURN
        for part in self.parts:
            if part in self.taken:
                continue
            if time.monotonic() > end:
                return None
            try:
                self.taken[part] = content = pull(part)
            except ObjectUnavailableError:
                return None
            self.size += len(content)
            if self.size > self.most + FRAME:
                return f"its reply has more than the {self.most:,} bytes allowed", b""
        found = inflate_object_from_contents(self.message, self.taken)
        if not isinstance(found, Message):
            raise TypeError(f"Flower's {type(found).__name__} in place of a message")
        return read(found, self.token, self.most)


def unwrap(content: RecordDict) -> tuple[bytes, str]:
    """The bytes and the token in a record."""
    return content.array_records[KEY][KEY].data, str(content.config_records[TOKEN][TOKEN])


def read(reply: Message, token: str, most: int) -> Read:
    """The bytes of a reply, or a sentence: an error, no message, another token, too large."""
    if reply.has_error():
        error: Any = reply.error
        lines = str(error.reason or "").strip().splitlines() or ["no reason given"]
        return f"Flower reports error {error.code}: {printable(lines[-1])}", b""
    try:
        data, named = unwrap(reply.content)
    except (KeyError, AttributeError, TypeError):
        return "its reply holds no message", b""
    if not secrets.compare_digest(named.encode(), token.encode()):
        return "its reply does not name the order it is one to", b""
    return (frames.too_large("its reply", len(data), most), b"") if len(data) > most else ("", data)


def outcomes(
    numbers: list[str], replies: Mapping[str, Reply], found: Mapping[str, Read], timeout: float
) -> list[Read]:
    """For every letter what was read, or why nothing was; a letter to a node that has gone has no number."""
    nothing = f"no answer within {timeout:g} s", b""
    return [
        found[number] if number in found else replies[number].late(timeout) if number in replies else nothing
        for number in numbers
    ]


@contextlib.contextmanager
def bounded(room: int) -> Iterator[bool]:
    """Limit this process to `room` bytes of memory beyond what it has now, where the system supports it.

    Gives whether a limit of the user's own leaves it less.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield False
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
    try:
        yield 0 <= hard < wanted
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
