"""Flower's two apps, which carry bytes. Flower starts a new process for every message: no torch in here.

`client` hands an order to the worker beside its SuperNode and brings back the reply. `server` hands the letters of
`potluck serve`, which holds the run, to the Grid and brings back the answers; it ends when `potluck serve` does.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from potluck.engine.flower import frames

ORDER = "order"
KEY = "potluck"
WORKER_WAIT = 60.0  # seconds a worker that is starting again has to be there
PULL = 0.3  # seconds between two looks for answers

client = ClientApp()
server = ServerApp()


def wrap(data: bytes) -> RecordDict:
    """Bytes as Flower carries them: an array, which it cuts into pieces if it is large."""
    array = Array(dtype="uint8", shape=(len(data),), stype="potluck", data=data)
    return RecordDict({KEY: ArrayRecord(OrderedDict({KEY: array}))})


def unwrap(content: RecordDict) -> bytes:
    """The bytes in a record."""
    return bytes(content.array_records[KEY][KEY].data)


@client.query(ORDER)
def carry(message: Message, context: Context) -> Message:
    """Hand an order to the worker and bring back its reply."""
    reply = ask_worker(str(context.node_config["socket"]), unwrap(message.content))
    return Message(wrap(reply), reply_to=message)


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
            frames.send(channel, {}, [order])
            _, (reply,) = frames.receive(channel)
        except (EOFError, OSError) as error:
            raise ConnectionError("its worker process ended over the order") from error
    return reply


@server.main()
def relay(grid: Grid, context: Context) -> None:
    """Do what `potluck serve` asks until it is gone."""
    with frames.connect(str(context.run_config["socket"])) as channel:
        while True:
            try:
                note, letters = frames.receive(channel)
            except (EOFError, OSError):
                return
            if note["ask"] == "nodes":
                frames.send(channel, {"nodes": list(grid.get_node_ids())})
            else:
                failures, answers = exchange(grid, note["to"], letters, note["timeout"])
                frames.send(channel, {"failures": failures}, answers)


def exchange(
    grid: Grid, nodes: Sequence[int], letters: Sequence[bytes], timeout: float
) -> tuple[list[str], list[bytes]]:
    """Send letters and collect the answers: for each its bytes, or none and a sentence."""
    end = time.monotonic() + timeout
    pairs = zip(nodes, letters, strict=True)
    messages = [Message(wrap(data), node, f"query.{ORDER}", ttl=timeout) for node, data in pairs]
    numbers = [*grid.push_messages(messages)]
    found: dict[str, Message] = {}
    waiting = [number for number in numbers if number]  # none for a node that has gone
    while waiting and time.monotonic() < end:
        time.sleep(PULL)
        found |= {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(waiting)}
        waiting = [number for number in waiting if number not in found]
    outcomes = [_read(found.get(number), timeout) for number in numbers]
    return [sentence for sentence, _ in outcomes], [data for _, data in outcomes]


def _read(reply: Message | None, timeout: float) -> tuple[str, bytes]:
    if reply is None:
        return f"no answer within {timeout:g} s", b""
    if reply.has_error():
        error: Any = reply.error
        lines = str(error.reason or "").strip().splitlines() or ["no reason given"]
        return f"Flower reports error {error.code}: {lines[-1][:500]}", b""
    try:
        return "", unwrap(reply.content)
    except (KeyError, AttributeError, TypeError):
        return "its reply holds no message", b""
