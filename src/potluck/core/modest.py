"""Bounds on models that somebody else has described: a server to a site, or a run folder to whoever opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from potluck.errors import ConfigError

MOST_WIDTH = 1 << 16  # of a representation, or any other size of a model
STRIDE = 1 << 26  # bytes that are made between two looks at what is free


class Modest(TorchFunctionMode):
    """Refuses to make tensors of more than `most` bytes; by default, half of the machine's memory.

    Nor does it go on where little is free any more. Without this the system would end the process, as memory is
    given before it is there. `tensors` is how many may be made in all, those without memory (on the device `meta`)
    included: models of very many layers take long.
    """

    MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.eye)

    def __init__(self, most: int | None = None, tensors: int | None = None) -> None:
        super().__init__()
        self.tensors, self.made, self.unseen = tensors, 0, 0
        self.most = (
            most if most is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the size before a tensor is made."""
        kwargs = kwargs or {}
        if func in self.MAKERS:
            self._count()
        if func in self.MAKERS and str(kwargs.get("device")) != "meta":
            size = _size(func, args, kwargs)
            if 4 * size > self.most or not self._fits(4 * size):
                raise ConfigError(
                    f"a model as it is described would have a tensor of {size:,} numbers, more than there is room "
                    "for here; ask who described it for smaller sizes"
                )
        return func(*args, **kwargs)

    def _fits(self, size: int) -> bool:
        """Whether there is room for all that was made since the last look, and as much again."""
        self.unseen += size
        if self.unseen < STRIDE:
            return True
        made, self.unseen = self.unseen, 0
        free = free_bytes()
        return free is None or 2 * made <= free

    def _count(self) -> None:
        self.made += 1
        if self.tensors is not None and self.made > self.tensors:
            raise ConfigError(
                f"the models as they are described would have more than {self.tensors:,} tensors; ask who "
                "described them for fewer or smaller ones"
            )


def free_bytes() -> int | None:
    """The memory that programs can still have, as Linux tells; elsewhere it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _size(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    given = kwargs.get("size", args[0] if args and isinstance(args[0], list | tuple) else args)
    given = args[:1] if func is torch.full and args and isinstance(args[0], int) else given
    sizes = [one for one in given if isinstance(one, int)] if isinstance(given, list | tuple) else []
    if func is torch.eye and len(sizes) == 1:
        sizes *= 2
    total = 1
    for one in sizes:
        total *= max(one, 0)
    return total if sizes else 0
