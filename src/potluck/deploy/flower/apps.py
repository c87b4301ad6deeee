"""Flower's two apps, which only carry bytes. Flower starts a process for every message, so torch is not imported.

`client` hands an order to the worker beside its SuperNode and returns the worker's reply. `server` hands letters
from `potluck serve`, which holds the run, to Flower's Grid and returns the answers; it ends with `potluck serve`.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from potluck.deploy.fingerprints import fingerprint
from potluck.engine import frames

ORDER = "order"
KEY = "potluck"
TOKEN = "token"  # a random number in every order: only a node that got the order can answer it
WORKER_WAIT = 60.0  # seconds to wait for a worker that is being restarted
PULL = 0.3  # seconds between two polls for answers
ROOM = 1 << 31  # bytes of memory that reading an answer may take, whatever its size
COPIES = 6  # of an answer that may be in memory while it is read

client = ClientApp()
server = ServerApp()


def wrap(data: bytes, token: str) -> RecordDict:
    """Bytes as a Flower record: an array, which Flower sends in pieces if it is large."""
    array = Array(dtype="uint8", shape=(len(data),), stype="potluck", data=data)
    about = ConfigRecord({TOKEN: token})
    return RecordDict({KEY: ArrayRecord(OrderedDict({KEY: array})), TOKEN: about})


def unwrap(content: RecordDict) -> tuple[bytes, str]:
    """The bytes and the token in a record."""
    return content.array_records[KEY][KEY].data, str(content.config_records[TOKEN][TOKEN])


@client.query(ORDER)
def carry(message: Message, context: Context) -> Message:
    """Hand an order to the worker and return its reply."""
    order, token = unwrap(message.content)
    reply = ask_worker(str(context.node_config["socket"]), order)
    return Message(wrap(reply, token), reply_to=message)


def ask_worker(path: str, order: bytes, wait: float = WORKER_WAIT) -> bytes:
    """The worker's reply. Wait for a worker that is restarting; if it ends during an order, do not ask again."""
    end = time.monotonic() + wait
    while True:
        try:
            channel = frames.connect(path)
            break
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(f"there is no worker at {path}: {error}") from error
            time.sleep(0.2)
    with channel:
        try:
            with contextlib.suppress(
                OSError
            ):  # the worker answers an order that is too large without reading it
                frames.send(channel, {}, [order])
            _, (reply,) = frames.receive(channel)
        except (EOFError, OSError) as error:
            raise ConnectionError("its worker process ended over the order") from error
    return reply


@server.main()
def relay(grid: Grid, context: Context) -> None:
    """Relay letters from `potluck serve` until it ends."""
    serve_relay(grid, str(context.run_config["socket"]))


def serve_relay(grid: Grid, path: str) -> None:
    """Answer requests from the socket at a path, for nodes or for an exchange, until it is closed."""
    with frames.connect(path) as channel:
        while True:
            try:
                note, letters = frames.receive(channel)
            except (EOFError, OSError):
                return
            if note["ask"] == "nodes":
                there = [*grid.get_nodes()]
                keys = [key_of(node.public_key) for node in there]
                frames.send(channel, {"nodes": [node.node_id for node in there], "keys": keys})
            else:
                failures, answers = exchange(grid, note["to"], letters, note["timeout"], note["most"])
                frames.send(channel, {"failures": failures}, answers)


def key_of(public_key: bytes) -> str:
    """The fingerprint of a node's registered key, or an empty string."""
    try:
        key = load_pem_public_key(public_key)
    except ValueError:
        return ""
    return fingerprint(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def exchange(
    grid: Grid, nodes: Sequence[int], letters: Sequence[bytes], timeout: float, most: Sequence[int]
) -> tuple[list[str], list[bytes]]:
    """Send letters and collect the answers: for each a sentence if it failed, and the bytes."""
    end = time.monotonic() + timeout
    tokens = [secrets.token_hex(16) for _ in letters]
    messages = [
        Message(wrap(data, token), node, f"query.{ORDER}", ttl=timeout)
        for node, data, token in zip(nodes, letters, tokens, strict=True)
    ]
    numbers = [*grid.push_messages(messages)]
    waiting = {  # a letter to a node that has gone gets no number
        number: (token, limit) for number, token, limit in zip(numbers, tokens, most, strict=True) if number
    }
    found: dict[str, tuple[str, bytes]] = {}
    while waiting and time.monotonic() < end:
        time.sleep(PULL)
        found |= {number: read for number, how in waiting.items() if (read := _pull(grid, number, *how))}
        waiting = {number: how for number, how in waiting.items() if number not in found}
    outcomes = [found.get(number, (f"no answer within {timeout:g} s", b"")) for number in numbers]
    return [sentence for sentence, _ in outcomes], [data for _, data in outcomes]


def _pull(grid: Grid, number: str, token: str, most: int) -> tuple[str, bytes] | None:
    """One answer, if it has come. Flower reads it into memory whole, so memory is bounded to protect the relay."""
    try:
        with bounded(ROOM + COPIES * most):
            for reply in grid.pull_messages([number]):
                return _read(reply, token, most)
    except MemoryError:
        return f"its reply takes far more memory than the {most:,} bytes allowed", b""
    return None


@contextlib.contextmanager
def bounded(room: int) -> Iterator[None]:
    """Limit this process to `room` bytes of memory beyond what it has now, where the system supports it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _read(reply: Message, token: str, most: int) -> tuple[str, bytes]:
    if reply.has_error():
        error: Any = reply.error
        lines = str(error.reason or "").strip().splitlines() or ["no reason given"]
        return f"Flower reports error {error.code}: {lines[-1][:500]}", b""
    try:
        data, named = unwrap(reply.content)
    except (KeyError, AttributeError, TypeError):
        return "its reply holds no message", b""
    if not secrets.compare_digest(named.encode(), token.encode()):
        return "its reply does not name the order it is one to", b""
    return (frames.too_large("its reply", len(data), most), b"") if len(data) > most else ("", data)
