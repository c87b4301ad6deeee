"""The worker: a process that holds a site and answers orders over a Unix socket.

    python -m potluck.deploy.flower.worker --client ID --model site.py:build --data site.py:load --home FOLDER \
        --socket PATH

It ends when its standard input is closed, so it never outlives its parent process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from potluck.deploy.resident import load_agreement
from potluck.deploy.site import Site, metric_functions, model_entry
from potluck.engine import frames
from potluck.errors import MessageError, PotluckError
from potluck.plugins import load_function
from potluck.runs.folder import RunFolder

READY = "ready"  # printed on standard output once the socket is there
SILENCE = 60.0  # seconds without a byte of an order after which a connection is dropped


def work(site: Site, path: Path, mode: int = 0o600) -> None:
    """Answer one order after the other, for ever."""
    with frames.listening(path, mode) as door:
        print(READY, flush=True)
        while True:
            channel, _ = door.accept()
            with channel, contextlib.suppress(EOFError, OSError):  # the other side may have gone
                answer_one(site, channel)


def answer_one(site: Site, channel: socket.socket) -> None:
    """Answer the one order of a connection."""
    channel.settimeout(SILENCE)
    try:
        _, pieces = frames.receive(channel, site.most_bytes, "an order")
    except frames.TooLarge as error:
        frames.send(channel, {}, [site.refuse(MessageError(str(error)))])
        return
    if len(pieces) != 1:
        raise EOFError("an order is one piece")
    channel.settimeout(None)
    frames.send(channel, {}, [site.answer(pieces[0])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="potluck.deploy.flower.worker")
    for name in ("client", "model", "data", "home", "socket"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--accept")
    parser.add_argument("--metric", action="append", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--shared", action="store_true")  # the group of the socket's folder may connect
    return parser


def _end_with_the_parent() -> None:
    sys.stdin.buffer.read()
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
            given.device,
            given.simulated,
            metric_functions(given.metric),
        )
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        site.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with RunFolder(site.home).locked():
            work(site, Path(given.socket), 0o660 if given.shared else 0o600)
    except PotluckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
