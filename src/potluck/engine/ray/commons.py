"""Downlinks that many clients get: each travels once to every machine."""

from __future__ import annotations

from typing import Any

import ray
import torch
from torch import Tensor

from potluck.core.message import Message
from potluck.engine.wire import TensorFrame


class Commons:
    """The messages of one exchange that were sent before, one of each kind of client."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, Message]] = {}
        self._copies: dict[int, Message] = {}
        self.refs: list[Any] = []

    def place(self, kind: str, message: Message | None) -> int | None:
        """Where a message lies among those that are shared; None if it goes to one client alone."""
        if not message:
            return None
        if kind not in self._places:
            self._places[kind] = len(self.refs), message
            self.refs.append(ray.put(TensorFrame({}, {"down": message}).pack()))
        place, first = self._places[kind]
        return place if _same(first, message) else None

    def lasting(self, message: Message, place: int | None) -> Message:
        """A copy that nobody writes into, one for all who get the same: servers may send what they change later."""
        if place is None:
            return _copied(message)
        if place not in self._copies:
            self._copies[place] = _copied(message)
        return self._copies[place]


def _copied(message: Message) -> Message:
    return Message({name: value.clone() for name, value in message.items()})


def _same(one: Message, other: Message) -> bool:
    return one.keys() == other.keys() and all(_same_bits(value, other[name]) for name, value in one.items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(value: Tensor) -> Tensor:
    """The bytes of a tensor: -0.0 equals 0.0, but not bit for bit."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)
