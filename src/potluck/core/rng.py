"""All randomness: a tree of random streams, the same for every engine and every order of clients.

A node is a seed and a path of keys; its numbers depend on these alone, never on what was drawn elsewhere. Shared
randomness (cohort, batch order, initial weights) comes from the experiment's seeds, which everyone knows. Private
randomness (noise, mixing weights) comes from a client's own secret, which is never sent.

>>> Rng(0).child("client", 3, "shuffle").numpy().permutation(4).tolist()
[0, 1, 2, 3]
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from dataclasses import dataclass

import numpy as np
import torch

Key = str | int


@dataclass(frozen=True)
class Rng:
    """A node of the tree of random numbers. Two generators from the same node give the same numbers."""

    seed: int
    path: tuple[Key, ...] = ()

    def child(self, *keys: Key) -> Rng:
        """The node below this one along `keys`."""
        return Rng(self.seed, self.path + tuple([key if isinstance(key, str) else int(key) for key in keys]))

    @property
    def integer(self) -> int:
        """A hash of seed and path, 63 bits."""
        text = "\x1f".join([_written(key) for key in (self.seed, *self.path)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def numpy(self) -> np.random.Generator:
        """A fresh NumPy generator at this node."""
        return np.random.Generator(np.random.PCG64(self.integer))

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh torch generator at this node."""
        return self.reseed(torch.Generator(device))

    def reseed(self, generator: torch.Generator) -> torch.Generator:
        """Seed an existing generator from this node; a captured step always uses the same generator object."""
        return generator.manual_seed(self.integer)

    def as_default(self, device: torch.device | str = "cpu") -> contextlib.AbstractContextManager[None]:
        """Seed torch's default generators, which `nn.init` and dropout use, and restore them afterwards."""
        return _DefaultSeed(self.integer, torch.device(device))


class _DefaultSeed(contextlib.AbstractContextManager[None]):
    """Inside, torch's default generators, of the CPU and of a GPU, have a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._generators = seed, [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def __enter__(self) -> None:
        self._before = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)


def _written(key: Key) -> str:
    """A key with its type, so that 1 and "1" differ; the sign between keys is doubled inside one."""
    return f"{type(key).__name__}:{key}".replace("\x1f", "\x1f\x1f")


@dataclass(frozen=True)
class Seeds:
    """The four seeds of an experiment; each can be held fixed while the others vary."""

    split: int
    init: int
    cohort: int
    training: int

    def tree(self, name: str) -> Rng:
        """The root of one seed's tree."""
        return Rng(int(getattr(self, name)), (name,))

    def secret(self, client: str) -> Rng:
        """The secret of a simulated client. A deployed client makes its own with `new_secret` and keeps it."""
        return Rng(self.training, ("secret", client))


def new_secret() -> int:
    """A secret for a real client, from the operating system."""
    return secrets.randbits(63)
