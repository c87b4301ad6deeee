"""The memory budget of stored client states."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from potluck.engine.store.transfers import size
from potluck.errors import ConfigError
from potluck.federation.builder import ClientBuilder

DEVICE_SHARE = 0.6  # of the device memory free at the start; live clients and graphs need the rest
HOST_SHARE = 0.5  # of the machine's memory


@dataclass(frozen=True)
class Budget:
    """How many bytes stored states may take in memory; the rest goes to disk, which has no limit."""

    device: int = sys.maxsize
    host: int = sys.maxsize

    @classmethod
    def of(cls, total: int | None, device: torch.device, share: float = 1.0) -> Budget:
        """A budget of `total` bytes, as much of it as fits on the device; None: a share of the machine's memory.

        With several devices, `share` is the part of one of them.
        """
        free = int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
        if total is None:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return cls(free, int(share * HOST_SHARE * memory))
        total = int(share * total)
        return cls(min(total, free), total - min(total, free))


def check_memory(total: int | None, clients: ClientBuilder) -> None:
    """Refuse a budget that cannot hold the largest client."""
    if total is None:
        return
    first = {clients.kind(client): client for client in reversed(clients.population.ids)}
    for client in first.values():
        needed = size(clients.build_client(client).snapshot())
        if needed > total:
            raise ConfigError(
                f"engine.memory: {total} bytes are too few for client {client} ({clients.label(client)}), "
                f"whose state takes {needed}; give at least that much, or auto"
            )
