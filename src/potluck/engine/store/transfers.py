"""Asynchronous copies of states between device memory and pinned host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.core.packed import Packed, State


@dataclass(frozen=True)
class Copy:
    """A state in one kind of memory; `ready` is recorded when its values have arrived (None: they have)."""

    state: State
    ready: torch.cuda.Event | None = None

    def wait(self) -> State:
        """Wait for the state to arrive, so that the host can read it."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.state


class Transfers:
    """Copies states between a device and pinned memory: up on one stream, down on another.

    A stream that reads a state first waits for it to arrive, and tells the allocator that it reads, so that freed
    memory is not used again before its last reader is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, state: State) -> bool:
        """Whether a state is on a device."""
        return any(tensor.is_cuda for tensor in pieces(state))

    def made_here(self, state: State) -> Copy:
        """A state that the current stream has computed, or waited for."""
        return Copy(state, torch.cuda.current_stream(self._index).record_event())

    def use(self, copy: Copy) -> State:
        """The state, for the current stream to read."""
        return _read_on(torch.cuda.current_stream(self._index), copy)

    def lower(self, copy: Copy) -> Copy:
        """Start a copy from the device to pinned memory."""
        return self._moved(copy, self._down, _pinned)

    def lift(self, copy: Copy) -> Copy:
        """Start a copy from pinned memory to the device."""
        return self._moved(copy, self._up, lambda tensor: tensor.to(self.device, non_blocking=True))

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """For another thread: do copies that the host waits for on a stream apart from those that train."""
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
    """The same state with every piece of its memory replaced by `move` of it."""
    if isinstance(state, Packed):
        loose = {name: move(tensor) for name, tensor in state.loose.items()}
        return Packed(move(state.flat), state.layout, loose)
    return {name: move(tensor) for name, tensor in state.items()}


def pieces(state: State) -> list[Tensor]:
    """The pieces of memory of a state."""
    return [state.flat, *state.loose.values()] if isinstance(state, Packed) else list(state.values())


def size(state: State) -> int:
    """How many bytes a state takes."""
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
