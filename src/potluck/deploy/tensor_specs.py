"""Type and shape of tensors: of a message, and of what a wire contract allows for one client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BeforeValidator, PlainSerializer

from potluck.core.client import Client
from potluck.core.contract import Contract, Field
from potluck.core.formulas import formula_value
from potluck.core.low_rank import factor_shapes, largest_rank
from potluck.core.message import Message
from potluck.errors import MessageError

_SPEC = re.compile(r"([a-z][a-z0-9_]*)\[((?:\d+|<=\d+|\*)(?:, ?(?:\d+|<=\d+|\*))*)?\]")


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor, written `float32[<=10, 64]`: a size is exact, at most (`<=`) or open (`*`).

    >>> TensorSpec.read("float32[<=10, 64]").holds(TensorSpec.read("float32[3, 64]"))
    True
    """

    dtype: str
    shape: tuple[str, ...]

    @classmethod
    def read(cls, text: object) -> TensorSpec:
        """Parse the text form; the inverse of `str`."""
        if isinstance(text, TensorSpec):
            return text
        found = _SPEC.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError("write type and shape of a tensor as in float32[<=10, 64]")
        return cls(found[1], tuple(size.strip() for size in found[2].split(",")) if found[2] else ())

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Type and exact shape of a tensor."""
        return cls(_name(tensor.dtype), tuple(map(str, tensor.shape)))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.shape)}]"

    def holds(self, other: TensorSpec) -> bool:
        """Whether everything that `other` allows is allowed here too."""
        alike = self.dtype == other.dtype and len(self.shape) == len(other.shape)
        return alike and all(map(_size_holds, self.shape, other.shape))

    @property
    def is_exact(self) -> bool:
        """Whether every size is known."""
        return all(size.isdigit() for size in self.shape)

    def largest(self) -> torch.Tensor:
        """A meta tensor (without memory) of the largest shape allowed; open sizes count as 0."""
        sizes = [0 if size == "*" else int(size.removeprefix("<=")) for size in self.shape]
        return torch.empty(sizes, dtype=getattr(torch, self.dtype), device="meta")


def _size_holds(agreed: str, other: str) -> bool:
    if agreed == "*" or agreed == other:
        return True
    most = agreed.removeprefix("<=")
    return most != agreed and other != "*" and int(other.removeprefix("<=")) <= int(most)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Spec = Annotated[TensorSpec, BeforeValidator(TensorSpec.read), PlainSerializer(str)]
Specs = Mapping[str, TensorSpec]


def specs_of(message: Message) -> dict[str, TensorSpec]:
    """Type and shape of every tensor of a message."""
    return {name: TensorSpec.of(tensor) for name, tensor in message.items()}


def specs_allowed(
    contract: Contract, client: Client, symbols: Mapping[str, int]
) -> Iterator[tuple[str, TensorSpec]]:
    """Every tensor that a wire contract allows, with this client's names and sizes.

    A part that the client has not, such as statistics of a model without batch norm, allows none.
    """
    for name, field in contract.items():
        if field.like is None:
            yield name, TensorSpec(_name(field.dtype), _sizes(field, symbols))
        elif field.like in client:
            tensors = client[field.like].wire()
            for key, tensor in tensors.items():
                yield f"{name}/{key}", TensorSpec.of(tensor)
                if field.low_rank:
                    yield from _factors(f"{name}/{key}", tensor)


def _factors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, TensorSpec]]:
    """The factors that may replace a tensor, of any rank up to the largest."""
    rank = largest_rank(tensor.shape)
    for key, shape in factor_shapes(name, tensor.shape, -1).items() if rank else ():
        sizes = tuple(f"<={rank}" if size == -1 else str(size) for size in shape)
        yield key, TensorSpec(_name(tensor.dtype), sizes)


def _sizes(field: Field, symbols: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(_size(formula.strip(), symbols) for formula in field.shape.split(",") if formula.strip())


def _size(formula: str, symbols: Mapping[str, int]) -> str:
    """One size of a shape: exact if its symbols are known, else its upper bound, else open (`*`)."""
    symbol, _, bound = (piece.strip() for piece in formula.partition("<="))
    try:
        return str(formula_value(symbol, symbols))
    except MessageError:
        return f"<={formula_value(bound, symbols)}" if bound else "*"
