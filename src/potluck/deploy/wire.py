"""Orders to a client and its replies as bytes: a message, and all else in its envelope.

What a reply says is not trusted: whatever is malformed is a `MessageError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from potluck.core.card import Card, ClientId
from potluck.core.card_fields import parse_fields
from potluck.core.message import Message
from potluck.core.state import Report
from potluck.core.task import Task
from potluck.engine.protocol import Answer, Examination, Failure, Outcome, Request, Stamp
from potluck.errors import MessageError

KEY = "potluck"  # of the envelope's only entry
LONGEST_REASON = 1000  # characters of a client's sentence that are taken
MOST_SAMPLES = 10**8  # of a client, in each part
LARGEST_ENVELOPE = 1 << 18  # bytes of all that goes beside the tensors of a message
LARGEST_INTRODUCTION = 1 << 22  # bytes of a welcome, or of a card with the names of a model's tensors
LARGEST_OPEN = 1 << 31  # bytes of a message whose size the wire contract leaves open
LOSS_TYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Hello:
    """The server introduces its run and asks for the client's card."""

    welcome: Mapping[str, Any]


@dataclass(frozen=True)
class Enrolment:
    """A client's card, and how many samples its validation and test results are means over."""

    card: Card
    samples: Mapping[str, int] = field(default_factory=dict)


Order = Hello | Request | Examination


def most_bytes(message: int | None) -> int:
    """The most bytes that may come where the largest message has so many, or its size is open."""
    return LARGEST_OPEN if message is None else message + LARGEST_ENVELOPE


def pack_order(order: Order) -> bytes:
    """To the client."""
    if isinstance(order, Hello):
        return _pack(Message(), {"order": "hello", "welcome": dict(order.welcome)})
    about: dict[str, Any] = {"client": order.client, "stamp": asdict(order.stamp)}
    if isinstance(order, Request):
        about |= {"order": "steps", "steps": order.steps, "purpose": order.purpose}
    else:
        about |= {"order": "examine", "modes": order.modes, "on": order.on, "bare": order.down is None}
    return _pack(order.down or Message(), about)


def unpack_order(data: bytes) -> Order:
    """At the client."""
    message, about = _unpack(data)
    try:
        kind = about["order"]
        if kind == "hello":
            return Hello(dict(about["welcome"]))
        client, stamp = str(about["client"]), _stamp(about["stamp"])
        if kind == "steps":
            return Request(client, tuple(map(str, about["steps"])), message, stamp, about["purpose"])
        if kind == "examine":
            down = None if about["bare"] else message
            return Examination(client, down, stamp, tuple(map(str, about["modes"])), str(about["on"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"an order cannot be read: {type(error).__name__}: {error}") from error
    raise MessageError(f"there is no order {kind!r}")


def pack_reply(reply: Outcome | Enrolment) -> bytes:
    """To the server."""
    if isinstance(reply, Failure):
        return _pack(Message(), {"reply": "failure", "client": reply.client, "reason": reply.reason})
    if isinstance(reply, Enrolment):
        return _pack(Message(), {"reply": "card", **told_at_enrolment(reply)})
    report = reply.report
    numbers = {"losses": _listed(report.losses), "metrics": _listed(report.metrics)}
    about = {"reply": "answer", "client": reply.client, "steps": report.steps, **numbers}
    return _pack(reply.up, about)


def told_at_enrolment(enrolment: Enrolment) -> dict[str, Any]:
    """All that a client tells of itself when it joins."""
    card, samples = enrolment.card, dict(enrolment.samples)
    return {
        "client": card.client,
        "samples": samples,
        "task": card.task.to_json(),
        "extra": dict(card.extra),
    }


def unpack_reply(data: bytes) -> Outcome | Enrolment:
    """At the server."""
    message, about = _unpack(data)
    try:
        kind, client = about["reply"], str(about["client"])
        if kind == "failure":
            return Failure(client, _printable(about["reason"]))
        if kind == "card":
            return _enrolment(client, about)
        if kind == "answer":
            if (steps := int(about["steps"])) < 0:
                raise ValueError("a negative number of steps")
            report = Report(steps, _numbers(about["losses"]), _numbers(about["metrics"]))
            return Answer(client, message, report)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MessageError(f"a reply cannot be read: {type(error).__name__}: {error}") from error
    raise MessageError(f"there is no reply {kind!r}")


def _printable(text: Any) -> str:
    """A sentence of somebody else's, fit for a terminal."""
    words = " ".join(str(text).split())[:LONGEST_REASON]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _enrolment(client: ClientId, about: Mapping[str, Any]) -> Enrolment:
    samples = {name: int(about["samples"][name]) for name in ("train", "validation", "test")}
    if not all(0 <= number <= MOST_SAMPLES for number in samples.values()):
        raise ValueError(f"a number of samples that is not from 0 to {MOST_SAMPLES:,}")
    task = Task.from_json(about["task"])
    extra = parse_fields(about["extra"], task)
    return Enrolment(Card(client, samples["train"], task, extra), samples)


def _stamp(values: Mapping[str, Any]) -> Stamp:
    numbers = {
        name: int(values[name]) for name in ("round", "attempt", "exchange", "accepted", "incarnation")
    }
    return Stamp(experiment=str(values["experiment"]), settled=bool(values["settled"]), **numbers)


def _listed(values: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Single numbers with their types: JSON writes a double so that it is read back to the last bit."""
    return {name: [value.item(), str(value.dtype).removeprefix("torch.")] for name, value in values.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        str(name): torch.tensor(float(value), dtype=LOSS_TYPES[kind])
        for name, (value, kind) in values.items()
    }


def _pack(message: Message, about: Mapping[str, Any]) -> bytes:
    return message.encode({KEY: json.dumps(about)})


def _unpack(data: bytes) -> tuple[Message, dict[str, Any]]:
    message, envelope = Message.decode(data)
    try:
        return message, dict(json.loads(envelope[KEY]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"a message came without its envelope: {error}") from error
