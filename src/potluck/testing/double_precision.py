"""Double precision for a whole federation, so that a test can tell a wrong number from rounding.

Two correct ways of computing the same training step differ by rounding, and batch norm over a few values lets
that grow. In float32 it reaches the size of a real mistake on some processors. In float64 it stays many orders of
magnitude below one on all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DTYPE_OF = Tensor.dtype.__get__  # type: ignore[attr-defined]


class _Doubled(TorchFunctionMode):
    """Computes in float64 wherever float32 is asked for, and still calls it float32.

    So nothing has to know: contracts that declare float32 accept the tensors, and states are packed as usual.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DTYPE_OF:
            dtype = func(*args)
            return torch.float32 if dtype == torch.float64 else dtype
        if func is Tensor.float:
            func = Tensor.double
        named = {key: _double(value) for key, value in (kwargs or {}).items()}
        result = func(*map(_double, args), **named)
        # Data that was loaded outside is float32: a batch taken from it becomes float64 here.
        is_single = isinstance(result, Tensor) and _DTYPE_OF(result) == torch.float32
        return result.double() if is_single else result


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Everything made or computed inside is in float64, whatever type the code asks for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(before)
