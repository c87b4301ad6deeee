"""The worker: a process that holds a site and answers orders over a Unix socket.

    python -m potluck.deploy.flower.worker --client ID --model site.py:build --data site.py:load --home FOLDER \
        --socket PATH

It ends when its standard input is closed, so it never outlives its parent process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.deploy.first_try import try_first
from potluck.deploy.flower.watching import ALIVE
from potluck.deploy.record_files import own_folder, stays
from potluck.deploy.resident import load_agreement
from potluck.deploy.site import Site, checked_device, metric_functions, model_entry
from potluck.deploy.site_status import OrderNotes
from potluck.engine import frames
from potluck.errors import MessageError, PotluckError
from potluck.files import clear_unfinished
from potluck.plugins import load_function
from potluck.runs.folder import RunFolder

READY = "ready"  # printed on standard output once the socket is there
SILENCE = (
    60.0  # seconds without a byte of an order, or of its answer taken, after which a connection is dropped
)
PAUSE = 0.2  # seconds after a connection could not be accepted
IDLE = 2.0  # seconds without an order
READERS = 32  # connections that are read, or wait with their order, at the same time


def work(site: Site, path: Path, mode: int = 0o600, idle: Callable[[], None] = lambda: None) -> None:
    """Answer one order after the other, for ever. Threads read them, so that no connection holds the others.

    `idle` is called now and then while there is none.
    """
    orders: queue.Queue[Call] = queue.Queue(1)  # one is at hand, further ones wait with their readers
    with frames.listening(path, mode) as door:
        print(READY, flush=True)
        threading.Thread(target=_accept, args=(door, site, orders), daemon=True).start()
        while True:
            try:
                call = orders.get(timeout=IDLE)
            except queue.Empty:
                idle()
                continue
            with call.channel, contextlib.suppress(EOFError, OSError):  # the other side may have gone
                frames.send(call.channel, {}, [site.answer(call.order)])


@dataclass(frozen=True)
class Call:
    """An order, and the connection its answer goes to."""

    channel: socket.socket
    order: bytes


def _accept(door: socket.socket, site: Site, orders: queue.Queue[Call]) -> None:
    """Have every connection read by a thread of its own; beyond so many one is closed at once."""
    room = threading.BoundedSemaphore(READERS)

    def read(channel: socket.socket) -> None:
        try:
            call = read_one(site, channel)
            if call is None:
                channel.close()
            else:
                orders.put(call)
        except (EOFError, OSError):
            channel.close()
        finally:
            room.release()

    while True:
        try:
            channel, _ = door.accept()
        except OSError:
            if door.fileno() < 0:
                return
            time.sleep(PAUSE)
            continue
        if not room.acquire(blocking=False):
            channel.close()
            continue
        try:
            threading.Thread(target=read, args=(channel,), daemon=True).start()
        except RuntimeError:  # the system has no more threads; the next connection may find one
            room.release()
            channel.close()


def read_one(site: Site, channel: socket.socket) -> Call | None:
    """The one order of a connection; None for a question that is answered already."""
    channel.settimeout(SILENCE)
    try:
        note, pieces = frames.receive(channel, site.most_bytes, "an order")
    except frames.TooLarge as error:
        frames.send(channel, {}, [site.refuse(MessageError(str(error)))])
        return None
    if note.get("ask") == ALIVE:
        frames.send(channel, {})
        return None
    if len(pieces) != 1:
        raise EOFError("an order is one piece")
    return Call(channel, pieces[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="potluck.deploy.flower.worker")
    for name in ("client", "model", "data", "home", "socket"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--accept")
    parser.add_argument("--metric", action="append", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--try-first", action="store_true")  # load the data and build the model once
    parser.add_argument("--shared", action="store_true")  # the group of the socket's folder may connect
    return parser


def _end_with_the_parent() -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):  # without a lock, over which the interpreter could not end
        pass
    os._exit(0)


def main(words: Sequence[str] | None = None) -> int:
    """Build the site from the command line and answer orders."""
    given = _parser().parse_args(words)
    try:
        site = Site(
            given.client,
            model_entry(given.model),
            load_function(given.data),
            Path(given.home),
            load_agreement(Path(given.accept)) if given.accept else None,
            checked_device(given.device),
            given.simulated,
            metric_functions(given.metric),
        )
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        with RunFolder(own_folder(site.home)).locked(), stays(site.home) as site.check_place:
            clear_unfinished(site.home / "runs")
            site.notes = OrderNotes(site.home)
            if given.try_first:
                try_first(site, given.data)
            work(site, Path(given.socket), 0o660 if given.shared else 0o600, site.notes.idle)
    except PotluckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
