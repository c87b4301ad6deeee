"""Flower's two apps, which carry bytes. Flower starts a new process for every message: no torch in here.

`client` hands an order to the worker beside its SuperNode and brings back the reply. `server` hands the letters of
`potluck serve`, which holds the run, to the Grid and brings back the answers; it ends when `potluck serve` does.
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
TOKEN = "token"  # a random number with every order: only who has received the order can answer it
WORKER_WAIT = 60.0  # seconds a worker that is starting again has to be there
PULL = 0.3  # seconds between two looks for answers
ROOM = 1 << 31  # bytes of memory that reading any answer may take
COPIES = 6  # how often an answer may be in memory meanwhile

client = ClientApp()
server = ServerApp()


def wrap(data: bytes, token: str) -> RecordDict:
    """Bytes as Flower carries them: an array, which it cuts into pieces if it is large."""
    array = Array(dtype="uint8", shape=(len(data),), stype="potluck", data=data)
    about = ConfigRecord({TOKEN: token})
    return RecordDict({KEY: ArrayRecord(OrderedDict({KEY: array})), TOKEN: about})


def unwrap(content: RecordDict) -> tuple[bytes, str]:
    """The bytes in a record, and the token they came with."""
    return content.array_records[KEY][KEY].data, str(content.config_records[TOKEN][TOKEN])


@client.query(ORDER)
def carry(message: Message, context: Context) -> Message:
    """Hand an order to the worker and bring back its reply."""
    order, token = unwrap(message.content)
    reply = ask_worker(str(context.node_config["socket"]), order)
    return Message(wrap(reply, token), reply_to=message)


def ask_worker(path: str, order: bytes, wait: float = WORKER_WAIT) -> bytes:
    """The worker's reply. It may be starting again; one that ends over an order is not asked twice."""
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
            with contextlib.suppress(OSError):  # an order that is too large is answered and not read
                frames.send(channel, {}, [order])
            _, (reply,) = frames.receive(channel)
        except (EOFError, OSError) as error:
            raise ConnectionError("its worker process ended over the order") from error
    return reply


@server.main()
def relay(grid: Grid, context: Context) -> None:
    """Do what `potluck serve` asks until it is gone."""
    serve_relay(grid, str(context.run_config["socket"]))


def serve_relay(grid: Grid, path: str) -> None:
    """Do what whoever listens at a socket asks of the Grid until it is gone."""
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
    """The fingerprint of the key a node has registered with; empty where it is none."""
    try:
        key = load_pem_public_key(public_key)
    except ValueError:
        return ""
    return fingerprint(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def exchange(
    grid: Grid, nodes: Sequence[int], letters: Sequence[bytes], timeout: float, most: Sequence[int]
) -> tuple[list[str], list[bytes]]:
    """Send letters and collect the answers: for each its bytes, or none and a sentence."""
    end = time.monotonic() + timeout
    tokens = [secrets.token_hex(16) for _ in letters]
    messages = [
        Message(wrap(data, token), node, f"query.{ORDER}", ttl=timeout)
        for node, data, token in zip(nodes, letters, tokens, strict=True)
    ]
    numbers = [*grid.push_messages(messages)]
    waiting = {  # nothing waits for a node that has gone
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
    """One answer, if it is there. Flower reads it as a whole: what does not fit does not become the relay's end."""
    try:
        with bounded(ROOM + COPIES * most):
            for reply in grid.pull_messages([number]):
                return _read(reply, token, most)
    except MemoryError:
        return f"its reply takes far more memory than the {most:,} bytes allowed", b""
    return None


@contextlib.contextmanager
def bounded(room: int) -> Iterator[None]:
    """Keep this process from taking more memory than so much beside what it has, where the system can do that."""
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
