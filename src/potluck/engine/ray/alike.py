"""What the last bits of a number depend on at a machine, and whether the machines of a cluster are alike in it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

import torch

from potluck.errors import ConfigError
from potluck.training.full_width import cpu_maker
from potluck.version import __version__

SAME = "install the same potluck[ray] on all machines"


def fingerprint(device: torch.device, count: int) -> dict[str, str]:
    """What the last bits of a number depend on here."""
    found = {
        "potluck": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "CPU": cpu_maker(),  # libraries of one instruction set have other code for another maker's
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(count),
    }
    if device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(device)
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


class Machines:
    """Holds machines against the first of them, and their potluck against that of the driver."""

    def __init__(self, mixed: bool, notice: Callable[[str], None]) -> None:
        self.mixed, self.notice = mixed, notice
        self._driver = platform.node(), {"potluck": __version__}
        self._first: tuple[str, Mapping[str, str]] | None = None

    def check_version(self, node: str, version: str) -> None:
        """Refuse a machine with another potluck than the driver has: they would not understand each other."""
        self._compare(*self._driver, node, {"potluck": version})

    def check(self, node: str, found: Mapping[str, str]) -> None:
        """Refuse a machine that is unlike the first; say so where that is allowed."""
        self._compare(*self._driver, node, found)
        if self._first is None:
            self._first = node, found
        self._compare(*self._first, node, found)

    def _compare(self, first: str, its: Mapping[str, str], node: str, found: Mapping[str, str]) -> None:
        for key in [key for key in found if key in its and its[key] != found[key]]:
            unlike = f"{first} has {key} {its[key]}, {node} has {found[key]}"
            if key == "potluck":
                raise ConfigError(f"engine.name: {unlike}; {SAME}")
            if not self.mixed:
                raise ConfigError(
                    f"engine.mixed: {unlike}, so numbers would depend on who plays whom; use machines that are "
                    "alike, or allow it with engine.mixed=true"
                )
            self.notice(f"numbers may differ from those of other machines: {unlike}")
