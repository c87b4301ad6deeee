"""Copies of states between device memory and pinned host memory, for which nobody waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.core.packed import Packed, State


@dataclass(frozen=True)
class Copy:
    """A state in one kind of memory; `ready` says when its values have arrived (None: they are there)."""

    state: State
    ready: torch.cuda.Event | None = None

    def wait(self) -> State:
        """The state for the host to read, once it has arrived."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.state


class Transfers:
    """Moves states between a device and pinned memory, up and down each on a stream of its own.

    A stream that reads a state waits for its arrival first, and tells the allocator that it reads: memory that is
    given up is not used again before its last reader is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, state: State) -> bool:
        """Whether a state lies on a device."""
        return any(tensor.is_cuda for tensor in pieces(state))

    def made_here(self, state: State) -> Copy:
        """A state that the current stream has made, or waited for."""
        return Copy(state, torch.cuda.current_stream(self._index).record_event())

    def use(self, copy: Copy) -> State:
        """The state, to be read on the current stream."""
        return _read_on(torch.cuda.current_stream(self._index), copy)

    def lower(self, copy: Copy) -> Copy:
        """Start a copy from the device to pinned memory."""
        return self._moved(copy, self._down, _pinned)

    def lift(self, copy: Copy) -> Copy:
        """Start a copy from pinned memory to the device."""
        return self._moved(copy, self._up, lambda tensor: tensor.to(self.device, non_blocking=True))

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """For another thread: copies that the host waits for, apart from the streams that train."""
        return torch.cuda.stream(self._down)

    def _moved(self, copy: Copy, stream: torch.cuda.Stream, move: Callable[[Tensor], Tensor]) -> Copy:
        before = torch.cuda.current_stream(self._index)
        torch.cuda.set_stream(stream)
        try:
            state = moved(_read_on(stream, copy), move)
            return Copy(state, stream.record_event())
        finally:
            torch.cuda.set_stream(before)


def moved(state: State, move: Callable[[Tensor], Tensor]) -> State:
    """The same state with every piece of its memory moved."""
    if isinstance(state, Packed):
        loose = {name: move(tensor) for name, tensor in state.loose.items()}
        return Packed(move(state.flat), state.layout, loose)
    return {name: move(tensor) for name, tensor in state.items()}


def pieces(state: State) -> list[Tensor]:
    """The pieces of memory a state lies in."""
    return [state.flat, *state.loose.values()] if isinstance(state, Packed) else list(state.values())


def size(state: State) -> int:
    """The bytes a state takes."""
    return sum(tensor.nbytes for tensor in pieces(state))


def _read_on(stream: torch.cuda.Stream, copy: Copy) -> State:
    if copy.ready is not None:
        stream.wait_event(copy.ready)
    for tensor in pieces(copy.state):
        if tensor.is_cuda:
            tensor.record_stream(stream)
    return copy.state


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
