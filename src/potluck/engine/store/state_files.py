"""Client states as safetensors files, one per state; checkpoints and states moved out of memory share them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from potluck.core.packed import Layout, Packed, State, views
from potluck.core.tensor_files import tensors
from potluck.errors import RunError
from potluck.files import WRITING, held

_NUMBERED = re.compile(r"clients-([0-9]{1,18})\.safetensors")  # other names are not ours
Packing = tuple[int, Layout]  # length and layout of a packed state's single piece of memory


class StateFiles:
    """A folder of client states, numbered in the order they are written; threads of several stores may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: int | None = None  # the highest number taken, once somebody has looked
        self._one_at_a_time = threading.Lock()

    def _next_number(self) -> int:
        """A number that no file has; two threads must never get the same."""
        with self._one_at_a_time:
            if self._last is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                names = (_NUMBERED.fullmatch(path.name) for path in self.folder.iterdir())
                self._last = max((int(name[1]) for name in names if name), default=0)
            self._last += 1
            return self._last

    def write(self, state: State) -> Path:
        """Write a state to a new file, completely or not at all; after `sync` it also survives a power cut."""
        path = self.folder / f"clients-{self._next_number():08d}.safetensors"
        try:
            with held(self.folder) as place:
                _write(state, place / path.name)
            return path
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"cannot write {path}: {getattr(error, 'strerror', None) or error}; {WRITING}"
            ) from error


def _write(state: State, path: Path) -> None:
    unfinished = path.with_name(f".{path.name}")
    try:
        safetensors.torch.save_file(on_host(state), unfinished)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make sure that a file is on the disk, not only in the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def data_size(path: Path) -> int:
    """How many bytes the tensors in a file have."""
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - head


def read(path: Path, packing: Packing | None = None, pinned: bool = False) -> State:
    """Read a state into new memory, packed as it was."""
    length, layout = packing or (0, ())
    flat = torch.zeros(length, pin_memory=pinned)
    packed, loose = views(flat, layout), dict[str, Tensor]()
    missing = set(packed)
    try:
        for name, value in tensors(path):
            if name in packed:
                packed[name].copy_(value)
                missing.discard(name)
            else:
                loose[name] = value.pin_memory() if pinned else value
        if missing:
            raise ValueError(f"it has no {min(missing)}")
    except (OSError, ValueError) as error:
        raise RunError(f"the client state in {path} cannot be read ({error}); run it again") from error
    return Packed(flat, layout, loose) if packing is not None else loose


def on_host(state: State) -> dict[str, Tensor]:
    """The tensors of a state in host memory, contiguous; a packed state comes from the device in one copy."""
    if isinstance(state, Packed):
        state = Packed(state.flat.cpu(), state.layout, state.loose)
    return {name: tensor.contiguous().cpu() for name, tensor in state.items()}
