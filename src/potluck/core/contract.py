"""The wire contract: which tensors may be in a message, with shape and type.

A contract declares tensors (their shape is a formula) and groups (the tensors of a part of the state), each
with its meaning. A message with anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.core.formulas import formula_value
from potluck.core.low_rank import largest_factors, whole_shapes
from potluck.core.message import Message, Signature, encoded_size
from potluck.errors import MessageError

Shapes = Mapping[str, tuple[int, ...]]
REMEMBERED = 100_000  # kinds of messages a gate remembers before it forgets all


@dataclass(frozen=True)
class Field:
    """One declared name of a message.

    `shape` is a formula over known symbols (`C, d`). An unknown symbol takes its value from the first tensor
    that has it, and must agree afterwards; `C_k<=C, d` also limits it. With `like` the field is a group
    instead: the tensors of that part of the state. What is said of values is checked by `core.values`.
    """

    meaning: str
    shape: str = ""
    like: str | None = None
    dtype: torch.dtype = torch.float32
    optional: bool = False
    partial: bool = False
    low_rank: bool = False  # of a group: a tensor may come in factors, see `core.low_rank`
    at_least: float | None = None
    at_most: str = ""  # a formula over known symbols
    whole: bool = False  # whole numbers, whatever the type
    distinct: bool = False  # no number twice

    @property
    def ranged(self) -> bool:
        """Whether anything is said of its values beside being finite."""
        return self.at_least is not None or bool(self.at_most) or self.whole or self.distinct


Contract = Mapping[str, Field]


def tensor(
    shape: str,
    meaning: str,
    dtype: torch.dtype = torch.float32,
    optional: bool = False,
    *,
    at_least: float | None = None,
    at_most: str = "",
) -> Field:
    """Declare one tensor; `shape` is a formula such as `"C, d"`, `""` for a single number.

    Values from `at_least` to `at_most`, a formula as well, are taken; others are refused.
    """
    return Field(meaning, shape=shape, dtype=dtype, optional=optional, at_least=at_least, at_most=at_most)


def numbers(shape: str, meaning: str, below: str, optional: bool = False, *, distinct: bool = False) -> Field:
    """Declare whole numbers from 0 up to, not including, `below`: `numbers("C_k", "classes held", below="C")`.

    With `distinct` no number may come twice.
    """
    top = f"({below})-1"
    return Field(
        meaning,
        shape=shape,
        dtype=torch.int64,
        optional=optional,
        at_least=0,
        at_most=top,
        whole=True,
        distinct=distinct,
    )


def counts(shape: str, meaning: str, most: str = "", dtype: torch.dtype = torch.float32) -> Field:
    """Declare how many there are of something: whole numbers from 0 to `most`, open where it is empty."""
    return Field(meaning, shape=shape, dtype=dtype, at_least=0, at_most=most, whole=True)


def state_of(
    part: str,
    meaning: str,
    optional: bool = False,
    partial: bool = False,
    dtype: torch.dtype = torch.float32,
    low_rank: bool = False,
) -> Field:
    """Declare the tensors of a part of the state, all of them unless `partial`.

    `"model/head"` is the module `head` inside the part `model`; its tensors are named as in that module. With
    `low_rank` each may be replaced by factors that are smaller than it, of any rank (`kit.low_rank` makes them).
    """
    return Field(meaning, like=part, optional=optional, partial=partial, low_rank=low_rank, dtype=dtype)


def shapes_below(shapes: Shapes, path: str) -> Shapes:
    """The shapes of the tensors below a path, by their names below it.

    >>> shapes_below({"fc.weight": (9, 4), "head.weight": (3, 9), "head.bias": (3,)}, "head")
    {'weight': (3, 9), 'bias': (3,)}
    """
    start = f"{path}." if path else ""
    return {name.removeprefix(start): shape for name, shape in shapes.items() if name.startswith(start)}


def check(
    message: Message,
    contract: Contract,
    symbols: Mapping[str, int],
    shapes: Callable[[str], Shapes | None],
    who: str,
) -> None:
    """Refuse a message that breaks the contract, in one sentence that names the tensor.

    `shapes(part)` returns the shapes of a part of the state, None where this side does not know them.
    """
    known = dict(symbols)
    for name in message:
        if not _is_declared(name, contract):
            raise MessageError(f"{who}: tensor {name!r} is not declared; send only: {_listed(contract)}")
    for name, field in contract.items():
        if field.like is not None:
            _check_group(message.group(name), name, field, shapes(field.like), who)
        elif name in message:
            _check_tensor(message[name], name, field, known, who)
        elif not field.optional:
            raise MessageError(f"{who}: tensor {name!r} is missing; send it, or declare it optional")


class Gate:
    """Enforces the wire contracts of one method, and remembers which kinds of messages have passed.

    A client's symbols and shapes stay the same during a run, so a message with the same signature passes again
    without a check. Values are checked elsewhere.
    """

    def __init__(self) -> None:
        self._passed: set[tuple[Any, ...]] = set()
        self._kinds: dict[Signature, Signature] = {}  # one object for all equal signatures

    def check(
        self,
        message: Message,
        contract: Contract,
        symbols: Callable[[], Mapping[str, int]],
        shapes: Callable[[str], Shapes | None],
        who: tuple[str, ...],
    ) -> None:
        """As `check`, once for each `who` (client, step and direction) and signature."""
        kind = self._kinds.get(message.signature, message.signature)
        if (*who, kind) in self._passed:
            return
        check(message, contract, symbols(), shapes, ", ".join(who))
        if len(self._passed) >= REMEMBERED:
            self._passed.clear()
            self._kinds.clear()
        self._passed.add((*who, self._kinds.setdefault(kind, kind)))


def _check_tensor(value: Tensor, name: str, field: Field, known: dict[str, int], who: str) -> None:
    _check_dtype(value, name, field, who)
    expected = [part.strip() for part in field.shape.split(",")] if field.shape else []
    fits = len(expected) == value.dim() and all(
        _dimension_fits(formula, size, known) for formula, size in zip(expected, value.shape, strict=True)
    )
    if not fits:
        raise MessageError(
            f"{who}: tensor {name!r} has shape {tuple(value.shape)}, "
            f"declared ({field.shape}) with {', '.join(f'{key}={size}' for key, size in known.items())}; "
            "send what is declared, or change the contract"
        )


def _check_group(
    tensors: Mapping[str, Tensor], name: str, field: Field, shapes: Shapes | None, who: str
) -> None:
    if not tensors and (field.optional or (shapes is not None and not shapes)):
        return
    if not tensors:
        raise MessageError(f"{who}: group {name!r} is missing; send it, or declare it optional")
    for key, value in tensors.items():
        _check_dtype(value, f"{name}/{key}", field, who)
    if shapes is None:
        return
    found = _found_shapes(tensors, field, shapes, f"{who}: {name}")
    for key, shape in found.items():
        if key not in shapes:
            raise MessageError(
                f"{who}: tensor '{name}/{key}' is not part of {field.like!r}; leave it out, or declare it"
            )
        if shape != shapes[key]:
            raise MessageError(
                f"{who}: tensor '{name}/{key}' has shape {shape}, declared {shapes[key]}; "
                "send what is declared, or change the contract"
            )
    if not field.partial and len(found) < len(shapes):
        missing = next(key for key in shapes if key not in found)
        raise MessageError(
            f"{who}: tensor '{name}/{missing}' is missing; send it, or declare the group partial"
        )


def _found_shapes(tensors: Mapping[str, Tensor], field: Field, shapes: Shapes, who: str) -> Shapes:
    """The shapes of a group's tensors; of one that comes in factors, what they are put together to."""
    found = shapes_of(tensors)
    if not field.low_rank:
        return found
    try:
        return whole_shapes(found, shapes)
    except MessageError as error:
        raise MessageError(f"{who}: {error}") from error


def _check_dtype(value: Tensor, name: str, field: Field, who: str) -> None:
    if value.dtype != field.dtype:
        raise MessageError(
            f"{who}: tensor {name!r} has type {value.dtype}, declared {field.dtype}; "
            "convert it, or declare its type"
        )


def _is_declared(name: str, contract: Contract) -> bool:
    """A name with a slash must belong to a declared group, one without must be a declared tensor."""
    group, slash, _ = name.partition("/")
    return group in contract and bool(slash) == (contract[group].like is not None)


def _listed(contract: Contract) -> str:
    return ", ".join(contract) if contract else "nothing"


def _dimension_fits(formula: str, size: int, known: dict[str, int]) -> bool:
    symbol, _, bound = (piece.strip() for piece in formula.partition("<="))
    if symbol.isidentifier() and symbol not in known:
        known[symbol] = size
    elif formula_value(symbol, known) != size:
        return False
    return not bound or size <= formula_value(bound, known)


def declared_scalars(
    field: Field, symbols: Mapping[str, int], shapes: Callable[[str], Shapes | None]
) -> int | None:
    """How many numbers a field holds, at most where only a bound is known; None where its size is open."""
    if field.like is not None:
        part = shapes(field.like)
        return None if part is None else sum(torch.Size(shape).numel() for shape in part.values())
    largest = _largest_shape(field, dict(symbols))
    return None if largest is None else largest.numel()


def scalars_formula(field: Field) -> str:
    """How many numbers a field holds, as a formula: `C_k·d`; `|small|` for the tensors of a part.

    >>> scalars_formula(tensor("C_k<=C, d + 1", "means and a bias")), scalars_formula(state_of("model/head", "ω"))
    ('C_k·(d + 1)', '|model/head|')
    """
    if field.like is not None:
        return f"{'≤' if field.low_rank else ''}|{field.like}|"
    sizes = (piece.partition("<=")[0].strip() for piece in field.shape.split(","))
    factors = [size if size.isidentifier() or size.isdigit() else f"({size})" for size in sizes if size]
    return "·".join(factors).replace("*", "·") or "1"


def _largest_shape(field: Field, known: dict[str, int]) -> torch.Size | None:
    """The largest shape a formula allows; a bounded symbol is set to its bound in `known`."""
    sizes: list[int] = []
    for formula in filter(None, (piece.strip() for piece in field.shape.split(","))):
        symbol, _, bound = (piece.strip() for piece in formula.partition("<="))
        size = symbol if not symbol.isidentifier() or symbol in known else bound
        if not size:
            return None
        known[symbol] = formula_value(size, known)
        sizes.append(known[symbol])
    return torch.Size(sizes)


def largest_size(
    contract: Contract, symbols: Mapping[str, int], shapes: Callable[[str], Shapes | None]
) -> int | None:
    """The size of the largest message a contract allows, None where it leaves a size open.

    >>> largest_size({"w": tensor("n<=C, d", "…")}, {"C": 10, "d": 4}, lambda part: None)
    232
    """
    known, signature = dict(symbols), []
    for name, field in contract.items():
        if field.like is None:
            most = _largest_shape(field, known)
            rows: Shapes | None = None if most is None else {name: most}
        else:
            part = shapes(field.like)
            rows = None if part is None else _largest_group(name, field, part)
        if rows is None:
            return None
        signature += [(key, field.dtype, torch.Size(shape)) for key, shape in rows.items()]
    return encoded_size(tuple(signature))


def _largest_group(name: str, field: Field, part: Shapes) -> Shapes:
    """Every tensor that a group may hold, also those of which only one can be there, a tensor or its factors."""
    rows = dict(part)
    for key, shape in part.items() if field.low_rank else ():
        rows |= largest_factors(key, shape)
    return {f"{name}/{key}": shape for key, shape in rows.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shape of each tensor, by name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}
