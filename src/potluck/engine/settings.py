"""The `engine` block of an experiment."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

import torch
from pydantic import ByteSize, Field, field_validator, model_validator

from potluck.core.settings import Settings
from potluck.core.state import Precision
from potluck.engine.registry import LOCAL, RAY, engine_names
from potluck.errors import ConfigError

COMPILED_FROM = 1000  # rounds that repay compiling, which takes some 10 to 40 s for an architecture
SIZE = re.compile(r"\d+(?:\.\d+)?\s*(?:(?:[KMGT]i?)?B|)", re.IGNORECASE)  # a number and its unit


def as_size(value: Any, such: str) -> str:
    """A size for pydantic's `ByteSize`, which alone would also take -3 and True; `such` says what to give."""
    if isinstance(value, bool) or not SIZE.fullmatch(str(value).strip()):
        raise ValueError(f"give a size such as {such}")
    return str(value).strip()


class EngineSettings(Settings):
    """Where the clients run."""

    name: str = LOCAL  # `ray`: on a Ray cluster; `flower-simulation`: on Flower's simulation with Ray
    device: str | tuple[str, ...] = (
        "auto"  # `cpu`, `cuda:0`; several GPUs share the clients: `[cuda:0, cuda:1]`
    )
    precision: Precision = "float32"
    threads: int = Field(default=1, ge=1, le=1024)  # per client; the number of threads changes the last bits
    workers: int | Literal["auto"] = (
        "auto"  # processes, or homes on a cluster; they change nothing but the time
    )
    streams: int | Literal["auto"] = "auto"  # on a GPU: queues the clients of a cohort are spread over
    compile: Literal["auto", "on", "off"] = (
        "auto"  # on a GPU: fuse the small operations of models by torch.compile; auto: from 1,000 rounds on
    )
    deadline: float = Field(default=600.0, gt=0)  # of federations and clusters: seconds without an answer
    patience: float = Field(default=600.0, gt=0)  # of a federation: seconds to wait for clients to join
    memory: ByteSize | Literal["auto"] = "auto"  # for stored states on device and host; the rest goes to disk
    address: str | None = None  # of `ray`: the head of a cluster, `10.0.0.5:6379`; none: one on this machine
    mixed: bool = False  # of `ray`: whether machines may be unlike, so that numbers depend on who plays whom

    @field_validator("name", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value != LOCAL and value not in (known := engine_names()):
            raise ValueError(f"must be {' or '.join(map(repr, known))}")
        return value

    @field_validator("workers", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError("give a number of processes, 1 or more, or auto")
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _a_size(cls, value: Any) -> Any:
        """`20GB`, `512MiB`, a number of bytes, or `auto`."""
        return (
            "auto"
            if str(value).strip() == "auto"
            else as_size(value, "20GB or 512MB, a number of bytes, or auto")
        )

    @field_validator("compile", mode="before")
    @classmethod
    def _a_switch(cls, value: Any) -> Any:
        """YAML reads a bare `on` as true."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _address_of_a_cluster(self) -> Self:
        if self.address is not None and self.name != RAY:
            raise ValueError(
                f"address is that of a Ray cluster; set engine.name to {RAY} as well, or engine.address to null"
            )
        return self

    def memory_bytes(self) -> int | None:
        """The bytes that stored client states may take in device and host memory together, None for `auto`."""
        return None if self.memory == "auto" else int(self.memory)

    def for_rounds(self, rounds: int) -> Self:
        """The same with `compile` decided for a run of so many rounds."""
        if self.compile != "auto":
            return self
        return self.model_copy(update={"compile": "on" if rounds >= COMPILED_FROM else "off"})

    def on_cpu(self) -> Self:
        """The same on the CPU, which has no tf32."""
        precision = "float32" if self.precision == "tf32" else self.precision
        return self.model_copy(update={"device": "cpu", "precision": precision})

    def torch_device(self) -> torch.device:
        """The server's device: the first one."""
        return self.torch_devices()[0]

    def torch_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process, checked now: each is there and can compute with `precision`.

        On a Ray cluster the homes have the devices; server and stored states are in this machine's memory.
        """
        if self.name == RAY:
            return (torch.device("cpu"),)
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
        if (
            device.type == "cpu" and self.precision == "tf32" and self.device != "auto"
        ):  # advice tells the others
            raise ConfigError(
                "engine.precision: tf32 is for GPUs, on a CPU it changes nothing; use float32, or name a GPU in "
                "engine.device"
            )
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
                f"engine.device: {name} is not there, this machine has {torch.cuda.device_count()} GPUs; "
                "use auto, or cpu"
            )
        return device
