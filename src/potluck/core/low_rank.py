"""Low-rank forms: in a message a tensor may be replaced by three smaller factors, u·diag(s)·v.

A tensor of two or more dimensions is seen as a matrix of m rows and n columns, its first dimension by all others,
so that a convolution with m output channels has m rows. Its factors of rank r are called `name:u` (m × r), `name:s`
(r) and `name:v` (r × n). They may replace it only where they are smaller: r(m + n + 1) < mn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from potluck.errors import MessageError

FACTORS = ("u", "s", "v")
Shape = Sequence[int]


def largest_rank(shape: Shape) -> int:
    """The largest rank at which the factors are smaller than the tensor; 0 where none are.

    >>> largest_rank((10, 512)), largest_rank((64, 3, 3, 3)), largest_rank((64,))
    (9, 18, 0)
    """
    if len(shape) < 2 or not math.prod(shape):
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows * columns - 1) // (rows + columns + 1)


def factor_shapes(name: str, shape: Shape, rank: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a tensor's factors.

    >>> factor_shapes("w", (64, 3, 3, 3), 2)
    {'w:u': (64, 2), 'w:s': (2,), 'w:v': (2, 27)}
    """
    sizes = (shape[0], rank), (rank,), (rank, math.prod(shape[1:]))
    return {f"{name}:{factor}": size for factor, size in zip(FACTORS, sizes, strict=True)}


def largest_factors(name: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    """The factors of the largest rank; nothing where a tensor has no smaller factors."""
    rank = largest_rank(shape)
    return factor_shapes(name, shape, rank) if rank else {}


def whole_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a message's tensors with the factors put together again; others are left as they are.

    Factors that belong to no tensor, are not complete or have no common rank in their bounds are refused.
    """
    whole = {name: shape for name, shape in found.items() if name in expected or ":" not in name}
    for name in dict.fromkeys(name.rpartition(":")[0] for name in found if name not in whole):
        sent = {key: shape for key, shape in found.items() if key.rpartition(":")[0] == name}
        shape = expected.get(name)
        if shape is None:
            raise MessageError(
                f"the factor {next(iter(sent))!r} belongs to no tensor; send u, s and v of one"
            )
        rank = (sent.get(f"{name}:s") or (0,))[0]
        if not 1 <= rank <= largest_rank(shape) or sent != factor_shapes(name, shape, rank):
            shown = ", ".join(f"{key} {size}" for key, size in sent.items())
            raise MessageError(
                f"the factors of {name!r} have the shapes {shown}; declared are u, s and v of one rank from 1 to "
                f"{largest_rank(shape)}"
            )
        if name in whole:
            raise MessageError(f"tensor {name!r} comes whole and in factors")
        whole[name] = shape
    return whole
