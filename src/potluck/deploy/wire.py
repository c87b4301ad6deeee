"""Orders to a client and its replies as bytes: an encoded message, with a note as its envelope.

`potluck.engine.wire` has the notes of requests and answers. This module adds what only a federation of strangers
needs: introductions, size limits, and distrust. Anything malformed is a `MessageError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.core.card import Card, ClientId
from potluck.core.card_fields import parse_fields
from potluck.core.message import Message
from potluck.core.plain_values import mapping, printable, read_json, short_name, shown, whole
from potluck.core.task import Task
from potluck.data.client_splits import PARTS
from potluck.engine.protocol import Examination, Failure, Outcome, Request
from potluck.engine.wire import REQUESTS, read_reply, read_request, reply_note, request_note
from potluck.errors import MessageError

SAME_VERSION = "use the same version of potluck on both sides"
KEY = "potluck"  # the name of the envelope's only entry
MOST_SAMPLES = 10**8  # of a client, in each split
MOST_FACTS = 32  # entries of an envelope, or of a task
LARGEST_ENVELOPE = 1 << 18  # bytes beside the tensors of a message
LARGEST_INTRODUCTION = 1 << 22  # bytes of a welcome, or of a card with the names of a model's tensors
LARGEST_OPEN = 1 << 31  # bytes of a message whose size the wire contract leaves open


@dataclass(frozen=True)
class Hello:
    """The server introduces its run and asks for the client's card.

    `refused` is why it has not taken the client in after the greeting before, if so.
    """

    welcome: Mapping[str, Any]
    refused: str = ""


@dataclass(frozen=True)
class Enrolment:
    """A client's card, and the sizes of its splits: its results are means over that many samples."""

    card: Card
    samples: Mapping[str, int] = field(default_factory=dict)


Order = Hello | Request | Examination


def most_bytes(message: int | None) -> int:
    """The most bytes an order or reply may have if its message has at most so many (None: no known limit)."""
    return LARGEST_OPEN if message is None else message + LARGEST_ENVELOPE


def pack_order(order: Order) -> bytes:
    """An order on its way to the client."""
    if isinstance(order, Hello):
        refused = {"refused": order.refused} if order.refused else {}
        return _pack(Message(), {"order": "hello", "welcome": dict(order.welcome), **refused})
    return _pack(order.down or Message(), request_note(order))


def unpack_order(data: bytes) -> Order:
    """The order in bytes that came from the server."""
    message, about = _unpack(data)
    with _reading("an order"):
        kind = about["order"]
        if kind == "hello":
            return Hello(dict(about["welcome"]), printable(str(about.get("refused", ""))))
        if kind in REQUESTS:
            return read_request(about, message)
    raise MessageError(f"there is no order {shown(kind)}; {SAME_VERSION}")


def pack_reply(reply: Outcome | Enrolment) -> bytes:
    """A reply on its way to the server."""
    if isinstance(reply, Enrolment):
        return _pack(Message(), {"reply": "card", **told_at_enrolment(reply)})
    return _pack(Message() if isinstance(reply, Failure) else reply.up, reply_note(reply))


def told_at_enrolment(enrolment: Enrolment) -> dict[str, Any]:
    """Everything a client tells about itself when it joins."""
    card, samples = enrolment.card, dict(enrolment.samples)
    return {
        "client": card.client,
        "samples": samples,
        "task": card.task.to_json(),
        "extra": dict(card.extra),
    }


def unpack_reply(data: bytes) -> Outcome | Enrolment:
    """The reply in bytes that came from a client."""
    message, about = _unpack(data)
    with _reading("a reply"):
        kind, client = about["reply"], short_name(about["client"], "a client's id")
        if message and kind != "answer":
            raise ValueError("only an answer has tensors")
        if kind == "card":
            return _enrolment(client, about)
        if kind in ("failure", "answer"):
            reply = read_reply(about, message)
            if isinstance(reply, Failure):
                return dataclasses.replace(reply, reason=printable(reply.reason) or "it gave no reason")
            errors = {name: printable(error) for name, error in reply.report.errors.items()}
            return dataclasses.replace(reply, report=dataclasses.replace(reply.report, errors=errors))
    raise MessageError(f"there is no reply {shown(kind)}; {SAME_VERSION}")


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn the errors of reading a malformed note into one sentence."""
    try:
        yield
    except MessageError:
        raise
    except Exception as error:  # a stranger's note: whatever it does to a reader
        raise MessageError(
            f"{what} cannot be read: {type(error).__name__}: {printable(str(error))}; {SAME_VERSION}"
        ) from error


def _enrolment(client: ClientId, about: Mapping[str, Any]) -> Enrolment:
    told = mapping(about["samples"], len(PARTS), "the numbers of samples")
    samples: dict[str, int] = {
        part: whole(told[part], 0, MOST_SAMPLES, f"the number of {part} samples") for part in PARTS
    }
    task = Task.from_json(mapping(about["task"], MOST_FACTS, "a task"))
    extra = parse_fields(about["extra"], task)
    return Enrolment(Card(client, samples["train"], task, extra), samples)


def _pack(message: Message, about: Mapping[str, Any]) -> bytes:
    return message.encode({KEY: json.dumps(about)})


def _unpack(data: bytes) -> tuple[Message, dict[str, Any]]:
    message, envelope = Message.decode(data)
    try:
        if len(envelope[KEY]) > LARGEST_INTRODUCTION:
            raise ValueError(f"it has more than {LARGEST_INTRODUCTION:,} letters")
        return message, dict(mapping(read_json(envelope[KEY]), MOST_FACTS, "an envelope"))
    except Exception as error:  # a stranger's note: whatever it does to a reader
        raise MessageError(
            f"a message came without its envelope: {printable(str(error))}; {SAME_VERSION}"
        ) from error
