"""Finds a method that seeds torch's default generator, or uses those of NumPy and Python, and says where."""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  (to see who uses it)
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from potluck.core.rng import Rng


@contextlib.contextmanager
def watching_generators() -> Iterator[list[str]]:
    """One sentence for every `round`, step and `predict` inside that touches a global generator.

    The engine seeds torch's default generator for each of them, so drawing from it is allowed, seeding it is not.
    NumPy's and Python's generators are put back afterwards.
    """
    found: list[str] = []
    original = Rng.as_default

    @contextlib.contextmanager
    def watched(rng: Rng, device: torch.device | str = "cpu") -> Iterator[None]:
        before = _global_states()
        with original(rng, device):
            yield
            if rng.path[:1] == ("training",):
                found.extend(f"{_where(rng)} {sentence}" for sentence in _faults(rng, before))

    states = (np.random.get_state(), random.getstate())  # noqa: NPY002
    try:
        with mock.patch.object(Rng, "as_default", watched):
            yield found
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])


def _faults(rng: Rng, before: dict[str, Any]) -> Iterator[str]:
    if torch.default_generator.initial_seed() != rng.integer:
        yield "seeds torch's default generator (torch.manual_seed): all rounds and seeds then get the same numbers"
    for name, state in _global_states().items():
        if state != before[name]:
            yield f"uses the global generator of {name}"


def _global_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {"NumPy": (kind, keys.tobytes(), *rest), "Python's random": random.getstate()}  # type: ignore[attr-defined]


def _where(rng: Rng) -> str:
    """What the engine seeded for, read off the path of the randomness."""
    path = rng.path
    if "exchange" in path:
        steps = path[path.index("exchange") + 2 :]
        return f"the step {'+'.join(map(str, steps))}"
    return "predict" if "examine" in path else "round"
