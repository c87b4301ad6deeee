"""Many modules of one form as one: the heads of all clients on the same input, without a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


class Stacked:
    """Modules like a given one, each with values of its own, called together.

    >>> module, values = nn.Linear(1, 1), [{"weight": torch.ones(1, 1) * n, "bias": torch.zeros(1)} for n in (2, 5)]
    >>> Stacked(module, values)(torch.ones(3, 1)).squeeze(2)
    tensor([[2., 2., 2.],
            [5., 5., 5.]])
    """

    def __init__(
        self, module: nn.Module | None, values: Sequence[Mapping[str, Tensor]], largest: float = torch.inf
    ) -> None:
        """`largest` bounds the size of every number."""
        assert module is not None
        self.module = module
        self.values = {
            name: torch.stack([one[name] for one in values]).clamp(-largest, largest) for name in values[0]
        }

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs of all modules for one input, module by module."""

        def one(values: dict[str, Tensor]) -> Any:
            return functional_call(self.module, values, (x,))

        made: Tensor = vmap(one)(self.values)
        return made
