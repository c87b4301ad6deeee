"""How much memory stored client states may take."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

from potluck.engine.store.transfers import size
from potluck.errors import ConfigError
from potluck.federation.builder import ClientBuilder

DEVICE_SHARE = 0.6  # of the device memory that is free at the start; the rest is for live clients and graphs
HOST_SHARE = 0.5  # of the machine's memory


@dataclass(frozen=True)
class Budget:
    """How many bytes stored states may take; what does not fit goes to disk, which has no limit."""

    device: int = sys.maxsize
    host: int = sys.maxsize

    @classmethod
    def of(cls, total: int | None, device: torch.device, share: float = 1.0) -> Budget:
        """So much in all, as much of it as there is room for on the device; None: what the machine has to give.

        `share` is the device's part of both where there are several.
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
                f"engine.memory: {total} bytes are too few for client {client} ({clients.population.label(client)}), "
                f"whose state takes {needed}; give at least that much, or auto"
            )
