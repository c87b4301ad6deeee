"""The codec of requests and replies: a small JSON note, and tensors beside it.

Worker processes and real federations use the same notes. They differ in how the tensors travel: between
processes of one machine as raw memory (`TensorFrame`), in a federation as an encoded message
(`potluck.deploy.wire`).

The functions that read a note raise `KeyError`, `TypeError`, `ValueError`, `AttributeError` or `OverflowError`
if it is malformed.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from potluck.core.message import Message
from potluck.core.method import Purpose
from potluck.core.packed import Packed, State
from potluck.core.plain_values import mapping, short_name, shown, whole
from potluck.core.state import Report
from potluck.engine import frames
from potluck.engine.protocol import Answer, Examination, Failure, Outcome, Request, Stamp
from potluck.engine.transactions import Done, Errand

REQUESTS = ("steps", "examine")  # the kinds of requests a note can describe
NUMBER_TYPES = {"float32": torch.float32, "float64": torch.float64}
MOST = 1 << 53  # of anything that is counted
MOST_NUMBERS = 10_000  # in a report
FLAT = ""  # the name of a packed state's single piece of memory in a frame; no tensor is called so


# --- notes ----------------------------------------------------------------------------------------------


def request_note(request: Request | Examination) -> dict[str, Any]:
    """Everything about a request except the tensors of its downlink."""
    about: dict[str, Any] = {"client": request.client, "stamp": asdict(request.stamp)}
    if isinstance(request, Request):
        return about | {"order": "steps", "steps": request.steps, "purpose": request.purpose}
    asked = {"modes": request.modes, "on": request.on, "bare": request.down is None}
    further = {"metrics": request.metrics, "predictions": request.predictions}
    return about | {"order": "examine"} | asked | further


def read_request(note: Mapping[str, Any], down: Message) -> Request | Examination:
    """The request a note describes, with its downlink."""
    client, stamp = short_name(note["client"], "a client's id"), _stamp(note["stamp"])
    if note["order"] == "steps":
        if note["purpose"] not in get_args(Purpose):
            raise ValueError(f"there is no purpose {shown(note['purpose'])}")
        return Request(client, tuple(map(str, note["steps"])), down, stamp, note["purpose"])
    if note["order"] != "examine":
        raise ValueError(f"there is no order {note['order']!r}")
    modes, metrics = (tuple(map(str, note[name])) for name in ("modes", "metrics"))
    received = None if note["bare"] else down
    return Examination(client, received, stamp, modes, str(note["on"]), metrics, bool(note["predictions"]))


def reply_note(outcome: Outcome) -> dict[str, Any]:
    """Everything about a reply except the tensors that go up."""
    if isinstance(outcome, Failure):
        lost = {"lost": True} if outcome.lost else {}
        return {"reply": "failure", "client": outcome.client, "reason": outcome.reason, **lost}
    report = outcome.report
    numbers = {"losses": _listed(report.losses), "metrics": _listed(report.metrics)}
    failed = {"errors": report.errors} if report.errors else {}
    return {"reply": "answer", "client": outcome.client, "steps": report.steps, **numbers, **failed}


def read_reply(note: Mapping[str, Any], up: Message) -> Outcome:
    """The reply a note describes, with what goes up."""
    kind, client = note["reply"], short_name(note["client"], "a client's id")
    if kind == "failure":
        return Failure(client, str(note["reason"]), note.get("lost") is True)
    if kind != "answer":
        raise ValueError(f"there is no reply {shown(kind)}")
    steps = whole(note["steps"], 0, MOST, "the number of steps")
    told = mapping(note.get("errors", {}), MOST_NUMBERS, "the errors of a report")
    if not all(isinstance(error, str) for error in told.values()):
        raise ValueError("an error in a report that is no text")
    errors = {key: str(error) for key, error in told.items()}
    return Answer(client, up, Report(steps, _numbers(note["losses"]), _numbers(note["metrics"]), errors))


def _stamp(values: Mapping[str, Any]) -> Stamp:
    numbers = {
        key: whole(values[key], 0, MOST, f"the {key} of a stamp")
        for key in ("round", "attempt", "exchange", "accepted", "incarnation")
    }
    return Stamp(experiment=str(values["experiment"]), settled=bool(values["settled"]), **numbers)


def _listed(values: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Single numbers with their types: JSON writes a double so that it is read back to the last bit."""
    return {name: [value.item(), str(value.dtype).removeprefix("torch.")] for name, value in values.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, (value, kind) in mapping(values, MOST_NUMBERS, "the numbers of a report").items():
        if type(value) not in (int, float):
            raise ValueError(f"{shown(key)} is {shown(value)}, no number")
        found[key] = torch.tensor(float(value), dtype=NUMBER_TYPES[kind])
    return found


# --- between processes of one machine -------------------------------------------------------------------


@dataclass(frozen=True)
class TensorFrame:
    """A note and named groups of tensors; they cross a socket as raw memory, without being encoded."""

    note: Mapping[str, Any]
    groups: Mapping[str, State] = field(default_factory=dict)

    def send(self, channel: socket.socket) -> None:
        """Send the note, the form of every tensor, and then the memory of each."""
        frames.send(channel, self._head(), self._memories())

    @classmethod
    def receive(cls, channel: socket.socket) -> TensorFrame:
        """Receive the next frame, each tensor straight into its own memory; `EOFError` if the sender is gone."""
        head, _ = frames.receive_head(channel)
        return cls._filled(head, lambda place: frames.fill(channel, place))

    def pack(self) -> list[np.ndarray]:
        """The same as flat arrays of bytes: the head, then the memory of each tensor, which is not copied."""
        head = np.frombuffer(json.dumps(self._head()).encode(), np.uint8)
        return [head, *map(np.asarray, self._memories())]

    @classmethod
    def unpack(cls, arrays: Sequence[np.ndarray]) -> TensorFrame:
        """The frame in flat arrays; all is copied, as other processes may read the same memory."""
        rest = iter(arrays)

        def fill(place: memoryview) -> None:
            np.asarray(place)[:] = next(rest)

        return cls._filled(json.loads(next(rest).tobytes()), fill)

    def _head(self) -> dict[str, Any]:
        forms = {
            name: [
                [key, str(value.dtype).removeprefix("torch."), value.shape] for key, value in _pieces(group)
            ]
            for name, group in self.groups.items()
        }
        layouts = {name: group.layout for name, group in self.groups.items() if isinstance(group, Packed)}
        return {"note": self.note, "groups": forms, "layouts": layouts}

    def _memories(self) -> list[memoryview]:
        return [_memory(value.contiguous()) for group in self.groups.values() for _, value in _pieces(group)]

    @classmethod
    def _filled(cls, head: Mapping[str, Any], fill: Callable[[memoryview], None]) -> TensorFrame:
        """The frame with this head; `fill` writes the bytes of the next tensor."""
        groups: dict[str, State] = {}
        for name, forms in head["groups"].items():
            group = {key: torch.empty(shape, dtype=getattr(torch, kind)) for key, kind, shape in forms}
            for value in group.values():
                fill(_memory(value))
            layout = head["layouts"].get(name)
            groups[name] = group if layout is None else Packed(group.pop(FLAT), _as_tuple(layout), group)
        return cls(head["note"], groups)


def errand_frame(errand: Errand) -> TensorFrame:
    """An errand on its way to a worker process."""
    groups = {"state": errand.state, "down": errand.request.down}
    present = {name: group for name, group in groups.items() if group is not None}
    note = {
        "request": request_note(errand.request),
        "counters": dict(errand.counters),
        "first": errand.first,
    }
    return TensorFrame(note, present)


def read_errand(frame: TensorFrame) -> Errand:
    """The errand in a frame."""
    request = read_request(frame.note["request"], Message(frame.groups.get("down", {})))
    return Errand(request, frame.groups.get("state"), frame.note["counters"], frame.note["first"])


def done_frame(done: Done) -> TensorFrame:
    """Finished work on its way back to the parent process."""
    groups: dict[str, State] = {"up": done.answer.up}
    if done.state is not None:
        groups["state"] = done.state
    return TensorFrame({"reply": reply_note(done.answer), "counters": dict(done.counters)}, groups)


def read_done(frame: TensorFrame) -> Done:
    """The finished work in a frame."""
    answer = read_reply(frame.note["reply"], Message(frame.groups["up"]))
    assert isinstance(answer, Answer)
    return Done(answer, frame.groups.get("state"), frame.note["counters"])


def _pieces(group: State) -> list[tuple[str, Tensor]]:
    named = {FLAT: group.flat, **group.loose} if isinstance(group, Packed) else group
    return [(name, value.detach()) for name, value in named.items()]


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _as_tuple(value: Any) -> Any:
    """Turn JSON's lists back into the tuples they were."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
