"""The `engine` block of an experiment."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

import torch
from pydantic import (
    Field,
    field_validator,
)

from potluck.core.settings import Settings
from potluck.core.state import Precision
from potluck.errors import ConfigError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B|)", re.IGNORECASE)  # a number and its unit


class EngineSettings(Settings):
    """Where the clients run."""

    name: Literal["local", "flower-simulation"] = "local"  # the latter: on Flower's simulation with Ray
    device: str | tuple[str, ...] = (
        "auto"  # `cpu`, `cuda:0`; several GPUs share the clients: `[cuda:0, cuda:1]`
    )
    precision: Precision = "float32"
    threads: int = Field(default=1, ge=1)  # per client; the number of threads changes the last bits
    workers: int | Literal["auto"] = "auto"  # processes on a CPU; their number changes nothing but the time

    @field_validator("workers", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError("give a number of processes, 1 or more, or auto")
        return value

    streams: int | Literal["auto"] = "auto"  # on a GPU: queues the clients of a cohort are spread over
    deadline: float = Field(default=600.0, gt=0)  # of a federation: seconds a client has for an exchange
    patience: float = Field(default=600.0, gt=0)  # of a federation: seconds to wait for clients to join
    memory: str = "auto"  # for stored client states, device and host together; the rest goes to disk

    @field_validator("memory", mode="before")
    @classmethod
    def _a_size(cls, value: Any) -> Any:
        """`20GB`, `512MiB`, a number of bytes, or `auto`."""
        text = str(value).strip()
        if text != "auto" and (isinstance(value, bool) or not SIZE.fullmatch(text)):
            raise ValueError("give a size such as 20GB or 512MB, a number of bytes, or auto")
        return text

    def memory_bytes(self) -> int | None:
        """The bytes stored client states may take, None for `auto`."""
        found = SIZE.fullmatch(self.memory)
        if found is None:
            return None
        unit = found[2].upper().removesuffix("B")
        return int(float(found[1]) * (1024 if unit.endswith("I") else 1000) ** " KMGT".index(unit[:1] or " "))

    def torch_device(self) -> torch.device:
        """The server's device: the first one."""
        return self.torch_devices()[0]

    def torch_devices(self) -> tuple[torch.device, ...]:
        """The devices, found now, and able to do what `precision` asks."""
        # The driver's default is eight queues; with 32 the streams of a cohort hardly wait for each other. The
        # driver reads it once, when CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        names = (self.device,) if isinstance(self.device, str) else self.device
        if not names:
            raise ConfigError("engine.device: name at least one device, or auto")
        found = tuple(self._found_device(name) for name in names)
        if len(found) > 1 and any(device.type != "cuda" for device in found):
            raise ConfigError("engine.device: only GPUs can be named together; for a CPU see engine.workers")
        for device in found:
            self._check_precision(device)
        return found

    def _check_precision(self, device: torch.device) -> None:
        if device.type == "cuda" and self.precision != "float32":
            major, minor = torch.cuda.get_device_capability(device)
            if major < 8:
                raise ConfigError(
                    f"engine.precision: {device} has compute capability {major}.{minor}, {self.precision} needs "
                    "8.0; use float32"
                )

    @staticmethod
    def _found_device(name: str) -> torch.device:
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(
                f"engine.device: there is no device {name!r}; use auto, cpu or cuda:0"
            ) from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"engine.device: {name} is not there, this machine has {torch.cuda.device_count()} GPUs"
            )
        return device
