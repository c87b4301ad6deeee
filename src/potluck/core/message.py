"""Messages: flat, frozen mappings of names to tensors.

A name with a slash belongs to a group: `small/conv1.weight` is `conv1.weight` of the group `small`.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from potluck.core.packed import row_major
from potluck.core.plain_values import printable
from potluck.core.tensor_files import DTYPES, tensors_in
from potluck.errors import MessageError

Content = Mapping[str, "Tensor | Mapping[str, Tensor]"]
Signature = tuple[tuple[str, torch.dtype, torch.Size], ...]

_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}  # the order in which safetensors lays them out


class Message(Mapping[str, Tensor]):
    """Everything a method sends in one direction in one exchange.

    >>> Message({"small": {"w": torch.zeros(2, 3)}, "counts": torch.ones(4)}).scalars
    10
    """

    def __init__(self, content: Content | None = None) -> None:
        flat: dict[str, Tensor] = {}
        for name, value in (content or {}).items():
            if isinstance(value, Tensor):
                flat[name] = row_major(value.detach())
            elif isinstance(value, Mapping):
                flat.update({f"{name}/{key}": row_major(tensor.detach()) for key, tensor in value.items()})
            else:
                raise MessageError(
                    f"{name!r} of a message is a {type(value).__name__}, not a tensor; "
                    "make it one with torch.tensor"
                )
        self._tensors = dict(sorted(flat.items()))  # the same order before and after encoding

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.items())
        return f"Message({inside})"

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors of one group, by their names inside it; empty if the message has no such group."""
        return dict(self._groups.get(name, {}))

    @functools.cached_property
    def _groups(self) -> dict[str, dict[str, Tensor]]:
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._tensors.items():
            group, slash, key = name.partition("/")
            if slash:
                groups.setdefault(group, {})[key] = tensor
        return groups

    @functools.cached_property
    def signature(self) -> Signature:
        """Name, type and shape of every tensor: sizes and most of the contract depend on nothing else."""
        return tuple((name, tensor.dtype, tensor.shape) for name, tensor in self._tensors.items())

    @functools.cached_property
    def scalars(self) -> int:
        """How many numbers the message holds."""
        return sum(self._sizes.values())

    @functools.cached_property
    def nbytes(self) -> int:
        """The length of `encode()`, computed from names, shapes and types alone."""
        return encoded_size(self.signature)

    def sizes(self) -> dict[str, int]:
        """Scalars per declared name or group."""
        return dict(self._sizes)

    @functools.cached_property
    def _sizes(self) -> Mapping[str, int]:
        return _sizes(self.signature)

    def apart_from(self, live: Iterable[Tensor]) -> Message:
        """The message without memory shared with `live`: later training must not change what was sent."""
        places = {value.untyped_storage().data_ptr() for value in live}
        shared = {name for name, value in self.items() if value.untyped_storage().data_ptr() in places}
        if not shared:
            return self
        return Message({name: value.clone() if name in shared else value for name, value in self.items()})

    def not_finite(self) -> str | None:
        """The name of the first tensor with a NaN or an infinity, None if all are finite."""
        for name, tensor in self.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return name
        return None

    def to(self, device: torch.device | str) -> Message:
        """The same message on another device; copies to a GPU do not wait."""
        device = torch.device(device)
        moved = {name: tensor.to(device, non_blocking=device.type == "cuda") for name, tensor in self.items()}
        return Message(moved)

    def encode(self, envelope: Mapping[str, str] | None = None) -> bytes:
        """The message as safetensors, with the envelope in its header."""
        tensors: dict[str, Tensor] = {}
        places: set[int] = set()
        for name, tensor in self.items():
            tensors[name] = tensor.contiguous().cpu()
            place = tensors[name].untyped_storage().data_ptr()
            if place in places:  # safetensors refuses names that share memory
                tensors[name] = tensors[name].clone()
            places.add(place)
        return bytes(safetensors.torch.save(tensors, metadata=dict(envelope) if envelope else None))

    @classmethod
    def decode(cls, data: bytes) -> tuple[Message, dict[str, str]]:
        """The message and its envelope; raises `MessageError` if the bytes are not a message."""
        try:
            tensors, about = tensors_in(data)
            return cls(tensors), about
        except Exception as error:  # bytes of a stranger: whatever they do to a reader
            reason = f"{type(error).__name__}: {printable(str(error), 200)}"
            raise MessageError(
                f"{len(data)} bytes are no message: {reason}; they were cut or changed on the way, so send it again"
            ) from error


class LastMessage:
    """Makes messages of what a method sends; the same tensors as the time before are the same message.

    Most servers send one thing to all clients: it is then put in order, measured and looked through once.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._outline: list[Any] = []
        self._message = Message()

    def of(self, content: Content) -> Message:
        """The content as a message."""
        if isinstance(content, Message):
            return content
        tensors: list[Tensor] = []
        outline: list[
            Any
        ] = []  # names, and what may change in place: where a tensor is, its shape and strides
        for name, value in content.items():
            outline.append(name)
            for key, tensor in value.items() if isinstance(value, Mapping) else (("", value),):
                if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                    return Message(content)
                tensors.append(tensor)
                outline += (key, tensor.data_ptr(), tensor.shape, tensor.stride())
        if outline == self._outline and all(map(operator.is_, tensors, self._tensors)):
            return self._message
        if not all(map(_is_lasting, tensors)):
            return Message(content)
        self._tensors, self._outline, self._message = tensors, outline, Message(content)
        return self._message


def _is_lasting(tensor: Tensor) -> bool:
    """Whether a message shares a tensor's memory, so that what is written into it later is in the message, too."""
    return row_major(tensor) is tensor


@lru_cache(maxsize=4096)
def _sizes(signature: Signature) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, _, shape in signature:
        group = name.split("/", 1)[0]
        sizes[group] = sizes.get(group, 0) + shape.numel()
    return sizes


@lru_cache(maxsize=4096)
def encoded_size(signature: Signature) -> int:
    """The length of a message as safetensors: 8 bytes, a JSON header padded to 8, then the data."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in sorted(signature, key=lambda row: (_RANKS[row[1]], row[0])):
        size = dtype.itemsize * shape.numel()
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + (len(text) + 7) // 8 * 8 + offset
