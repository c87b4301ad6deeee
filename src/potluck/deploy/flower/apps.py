"""Flower's two apps, which only carry bytes. Flower starts a process for every message, so torch is not imported.

`client` hands an order to the worker beside its SuperNode and returns the worker's reply. `server` hands letters
from `potluck serve`, which holds the run, to Flower's Grid and returns the answers; it ends with `potluck serve`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from potluck.deploy.fingerprints import fingerprint
from potluck.deploy.flower.pulling import KEY, TOKEN, Read, Reply, outcomes, unwrap
from potluck.engine import frames

ORDER = "order"
WORKER_WAIT = 60.0  # seconds to wait for a worker that is being restarted
PULL = 0.3  # seconds between two polls for answers
GRACE = 10.0  # seconds that a relay has to end by itself when its server is gone

client = ClientApp()
server = ServerApp()


def wrap(data: bytes, token: str) -> RecordDict:
    """Bytes as a Flower record: an array, which Flower sends in pieces if it is large."""
    array = Array(dtype="uint8", shape=(len(data),), stype="potluck", data=data)
    about = ConfigRecord({TOKEN: token})
    return RecordDict({KEY: ArrayRecord(OrderedDict({KEY: array})), TOKEN: about})


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
                raise ConnectionError(
                    "there is no worker at its site"
                ) from error  # no path: the server hears it
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
    serve_relay(grid, str(context.run_config["socket"]), end_with)


def serve_relay(grid: Grid, path: str, watch: Callable[[socket.socket], None] = lambda channel: None) -> None:
    """Answer requests from the socket at a path, for nodes or for an exchange, until it is closed.

    `watch` is called beside it, in a thread of its own.
    """
    with frames.connect(path) as channel, contextlib.suppress(EOFError, BrokenPipeError, ConnectionError):
        threading.Thread(target=watch, args=(channel,), daemon=True).start()
        while True:
            note, letters = frames.receive(channel)
            if note["ask"] == "nodes":
                there = [*grid.get_nodes()]
                keys = [key_of(node.public_key) for node in there]
                frames.send(channel, {"nodes": [node.node_id for node in there], "keys": keys})
            else:
                gone = partial(is_closed, channel)
                told = exchange(grid, note["to"], letters, note["timeout"], note["most"], gone)
                failures, answers, seconds = told
                frames.send(channel, {"failures": failures, "seconds": seconds}, answers)


def end_with(channel: socket.socket) -> None:
    """End this process soon after its server is gone.

    The SuperLink ends with a killed server, and Flower repeats a call to it for minutes.
    """
    hung_up = select.poll()
    hung_up.register(channel, getattr(select, "POLLRDHUP", select.POLLHUP))
    hung_up.poll()
    time.sleep(GRACE)
    os._exit(1)


def is_closed(channel: socket.socket) -> bool:
    """Whether the server is gone: it says nothing while it waits for answers."""
    return bool(select.select([channel], [], [], 0)[0])


def key_of(public_key: bytes) -> str:
    """The fingerprint of a node's registered key, or an empty string."""
    try:
        key = load_pem_public_key(public_key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return ""
    return fingerprint(key)


def exchange(
    grid: Grid,
    nodes: Sequence[int],
    letters: Sequence[bytes],
    timeout: float,
    most: Sequence[int],
    gone: Callable[[], bool] = lambda: False,
) -> tuple[list[str], list[bytes], list[float | None]]:
    """Send letters and collect the answers: for each a sentence if it failed, the bytes, and how long it took.

    Whatever is wrong with a reply costs that reply alone. Ends early when `gone` says that nobody waits any more.
    """
    start = time.monotonic()
    end = start + timeout
    tokens = [secrets.token_hex(16) for _ in letters]
    messages = [
        Message(wrap(data, token), node, f"query.{ORDER}", ttl=timeout)
        for node, data, token in zip(nodes, letters, tokens, strict=True)
    ]
    numbers = [str(number or "") for number in grid.push_messages(messages)] or [""] * len(letters)
    replies = {
        number: Reply(grid, number, token, limit)
        for number, token, limit in zip(numbers, tokens, most, strict=True)
        if number  # a letter to a node that has gone gets none
    }
    found: dict[str, Read] = {}
    took: dict[str, float] = {}
    while len(found) < len(replies) and time.monotonic() < end and not gone():
        time.sleep(PULL)
        for number, reply in replies.items():
            if number not in found and time.monotonic() < end:
                read = reply.turn()
                if read:
                    found[number], took[number] = read, round(time.monotonic() - start, 3)
    told = outcomes(numbers, replies, found, timeout)
    return [sentence for sentence, _ in told], [data for _, data in told], [*map(took.get, numbers)]
