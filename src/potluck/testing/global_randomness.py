"""Finds a method that seeds a generator itself, or uses those of NumPy and Python, and says where."""

from __future__ import annotations

import contextlib
import random  # noqa: TID251  (to see who uses it)
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch

from potluck.core.method import Method
from potluck.core.rng import Rng

_UNUSUAL = 1_618_033


@contextlib.contextmanager
def watching_generators(method: Method) -> Iterator[list[str]]:
    """One sentence for every `round`, step and `predict` inside that touches a global generator or fixes a seed.

    The engine seeds torch's default generator for each of them, so drawing from it is allowed, seeding it is not.
    NumPy's and Python's generators begin where no method has left them, and are put back afterwards.
    """
    found: list[str] = []
    seeds = _Seeds(method)
    original = Rng.as_default

    @contextlib.contextmanager
    def watched(rng: Rng, device: torch.device | str = "cpu") -> Iterator[None]:
        before, seeds.path = _global_states(), rng.path
        with original(rng, device):
            yield
            if rng.path[:1] == ("training",):
                found.extend(f"{_where(rng)} {sentence}" for sentence in _faults(rng, before))

    states = (np.random.get_state(), random.getstate())  # noqa: NPY002
    np.random.seed(_UNUSUAL)  # noqa: NPY002, TID251
    random.seed(_UNUSUAL)
    try:
        with mock.patch.object(Rng, "as_default", watched), seeds.watched():
            yield found
        found.extend(seeds.faults())
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])


class _Seeds:
    """The seeds a method's own code gives to new generators, and the rounds in which it does.

    The same seed in two rounds means the same numbers in both. One that is an option of the method is meant so.
    """

    def __init__(self, method: Method) -> None:
        kinds = [kind for kind in type(method).__mro__ if issubclass(kind, Method)]
        self.modules = {kind.__module__ for kind in kinds}
        self.options = [repr(value) for name, value in method.config if "seed" in name]
        self.path: tuple[str | int, ...] = ()
        self.rounds: dict[tuple[str, str], set[str | int]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """See who seeds a `torch.Generator` or asks for `numpy.random.default_rng`."""
        note, default_rng, modules, real = self._note, np.random.default_rng, self.modules, torch.Generator

        class Kind(type(torch.Generator)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, real)

        class Generator(torch.Generator, metaclass=Kind):
            def __new__(cls, *args: Any) -> torch.Generator:  # type: ignore[misc]
                """A plain generator for everybody else: CUDA takes no generator of another class."""
                own = sys._getframe(1).f_globals.get("__name__") in modules
                return super().__new__(cls, *args) if own else real(*args)

            def manual_seed(self, seed: int) -> torch.Generator:
                note(seed, sys._getframe(1))
                return super().manual_seed(seed)

        def numpy_generator(seed: Any = None) -> np.random.Generator:
            note(seed, sys._getframe(1))
            return default_rng(seed)

        with (
            mock.patch.object(torch, "Generator", Generator),
            mock.patch.object(np.random, "default_rng", numpy_generator),
        ):
            yield

    def _note(self, seed: Any, caller: FrameType) -> None:
        if caller.f_globals.get("__name__") not in self.modules or seed is None or repr(seed) in self.options:
            return
        if "round" in self.path:
            code = caller.f_code
            place = f"{code.co_name} ({Path(code.co_filename).name}, line {caller.f_lineno})"
            round_ = self.path[self.path.index("round") + 1]
            self.rounds.setdefault((place, repr(seed)), set()).add(round_)

    def faults(self) -> Iterator[str]:
        """A sentence for each place that used one seed in several rounds."""
        for (place, seed), rounds in self.rounds.items():
            if len(rounds) > 1:
                yield f"{place} seeds a generator with {seed} in every round, so the numbers are always the same"


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
