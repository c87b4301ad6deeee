"""Compiled models: `torch.compile` fuses the small operations of a training step into fewer kernels.

What is compiled is how methods call a model: `model(x)`, `model.features(x)`, `model.stem(x)` and `model.body(s)`.
torch keeps the code by architecture, batch size and mode, so all clients of an architecture share it. The numbers
are those of the plain model within rounding: dropout draws the same numbers, sums are taken in another order. A
model with kernels of our own is left as it is where these are used.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

from potluck.core.model import Model
from potluck.core.state import Holder

ENTRIES = ("forward", "features", "stem", "body")
FORMS = 256  # of one function that torch keeps; every architecture and batch size is one

_in_use: contextvars.ContextVar[bool] = contextvars.ContextVar("compiled models", default=False)


class CompiledModels:
    """The models of a client or the server, compiled at their first call."""

    def __init__(self, holder: Holder, backend: str | Callable[..., Any] = "inductor") -> None:
        self._entries = [
            (module, name, torch.compile(getattr(module, name), dynamic=False, backend=backend))
            for module in holder.modules().values()
            if isinstance(module, Model) and not (module.own_kernels and holder.precision != "bfloat16")
            for name in ENTRIES
            if name not in vars(module)
        ]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, a call of a model runs its compiled code."""
        token = _in_use.set(True)
        for module, name, compiled in self._entries:
            setattr(module, name, compiled)
        try:
            with _settings():
                yield
        finally:
            for module, name, _ in self._entries:
                delattr(module, name)
            _in_use.reset(token)


def is_compiled() -> bool:
    """Whether models run compiled here: then what replaces the layers of a model must leave them alone."""
    return _in_use.get()


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Settings of the compiler: one function serves many architectures, and random numbers are those of torch."""
    import torch._dynamo.config as tracing
    import torch._functorch.config as differentiating
    import torch._inductor.config as generating

    limits = {"recompile_limit": FORMS, "accumulated_recompile_limit": FORMS}
    known = {name: value for name, value in limits.items() if hasattr(tracing, name)}
    with (
        tracing.patch(known),
        generating.patch({"fallback_random": True}),
        differentiating.patch({"donated_buffer": False}),
    ):  # without donated buffers a graph can be differentiated term by term
        yield
