"""Bounds on models that somebody else has described: a server to a site, or a run folder to whoever opens it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from potluck.errors import ConfigError

MOST_WIDTH = 1 << 16  # of a representation, or any other size of a model
MOST_SIDE = 1024  # pixels to which a model enlarges an image, or of a patch
STRIDE = 1 << 26  # bytes that are made between two looks at what is free


class Modest(TorchFunctionMode):
    """Refuses to make tensors of more than `most` bytes; by default, half of the machine's memory.

    A quarter of what is free at the start stays free, on the machine and within the bound of its unit or container.
    Without this the system would end the process, as memory is given before it is there. `tensors` is how many may
    be made in all, copies and those without memory (on the device `meta`) included: models of very many layers take
    long.
    """

    MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.eye)
    COPIERS = (
        torch.clone,
        torch.Tensor.clone,  # of parameters that are copied too
        torch.Tensor.__deepcopy__,
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
        torch.full_like,
    )

    def __init__(self, most: int | None = None, tensors: int | None = None) -> None:
        super().__init__()
        self.tensors, self.made, self.unseen = tensors, 0, 0
        self.reserve = (free_bytes() or 0) // 4
        self.most = (
            most if most is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the size before a tensor is made."""
        kwargs = kwargs or {}
        if func in self.MAKERS:
            self._count()
            if str(kwargs.get("device")) != "meta":
                self.refuse_size(_size(func, args, kwargs), 4)
        elif func in self.COPIERS:
            self._count()
            if args[0].device.type != "meta":
                self.refuse_size(args[0].numel(), args[0].element_size())
        return func(*args, **kwargs)

    def refuse_size(self, size: int, width: int) -> None:
        """Refuse a tensor of so many numbers, each of so many bytes, for which there is no room."""
        if width * size > self.most or not self._fits(width * size):
            raise ConfigError(
                f"a model as it is described would have a tensor of {size:,} numbers, more than there is room "
                "for here; ask who described it for smaller sizes"
            )

    def _fits(self, size: int) -> bool:
        """Whether there is room for all that was made since the last look, and as much again, or the reserve."""
        self.unseen += size
        if self.unseen < STRIDE:
            return True
        made, self.unseen = self.unseen, 0
        free = free_bytes()
        return free is None or made + max(made, self.reserve) <= free

    def _count(self) -> None:
        self.made += 1
        if self.tensors is not None and self.made > self.tensors:
            raise ConfigError(
                f"the models as they are described, with all that the method keeps, would have more than "
                f"{self.tensors:,} tensors; ask who described them for fewer or smaller ones"
            )


class ModestResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds the results of all operations to the same bounds: a model can enlarge what it is given.

    A dry run without memory tells how large a result is before it is made.
    """

    def __init__(self, bounds: Modest) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bounds = bounds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the size before an operation is done."""
        kwargs = kwargs or {}
        for result in _dry(func, args, kwargs):
            self.bounds.refuse_size(result.numel(), result.element_size())
        return func(*args, **kwargs)


def _dry(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Results of an operation without memory; none of one that changes or views what is there, or draws numbers."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    known = not (func._schema.is_mutable or func.is_view or torch.Tag.nondeterministic_seeded in func.tags)
    if not (given and known) or any(one.is_meta for one in given):
        return []
    try:
        dry = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        with torch._C.DisableTorchFunction():  # what is made here does not count
            found = func(*dry[0], **dry[1])
        return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
    except (RuntimeError, NotImplementedError):
        return []  # its size follows from values, which a dry run has not


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def free_bytes() -> int | None:
    """The memory that this process can still have, as Linux tells; elsewhere it is not known."""
    found = [room for room in (_free_here(), *_free_in_groups()) if room is not None]
    return min(found, default=None)


def _free_here() -> int | None:
    """What the machine has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _free_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What is left of the bounds of the unit or container that this process runs in, and of those around it."""
    try:
        place = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = root / place.lstrip("/")
    return [room for one in (group, *group.parents) if (room := _free_in_group(one)) is not None]


def _free_in_group(group: Path) -> int | None:
    """What is left of one group's bound; files that are only cached make room."""
    try:
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return most - used + int(counted.get("inactive_file", 0))
    except (OSError, ValueError):  # "max" where there is no bound
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
