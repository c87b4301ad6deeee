"""Early stopping on a watched loss, with a learning rate that falls along a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from potluck.core.settings import OptimizerSettings
from potluck.core.state import Holder, Moments
from potluck.core.streams import Stream
from potluck.training.fit import Loss, fit


def fit_patiently(
    holder: Holder,
    loss: Loss,
    part: str,
    stream: Stream,
    *,
    optimizer: OptimizerSettings,
    every: int,
    scalars: Mapping[str, Tensor],
    watch: Callable[[], float] | None = None,
    patience: int,
) -> int:
    """Train one part over a stream, `every` steps at a time; returns the number of steps done.

    The learning rate of a piece is lr·(1 + cos(π·done/total))/2. `watch` gives a loss after each piece. Training
    stops after `patience` steps without a smaller one, and the state with the smallest is restored. One optimiser
    goes through all pieces. This reads values back from the device, so it is for the server only.
    """
    moments, place, best = Moments(), holder.fits, _Best(holder, part)
    done = 0
    while done < len(stream) and done - best.at < patience:
        piece = replace(stream, order=stream.order[done : done + every])
        rate = optimizer.lr * (1 + math.cos(math.pi * done / len(stream))) / 2
        holder.fits = place  # the same workspace for every piece
        fit(
            holder,
            loss,
            train=[part],
            streams={"public": piece},
            optimizer=optimizer.model_copy(update={"lr": rate}),
            scalars=scalars,
            moments=moments,
        )
        done += len(piece)
        best.note(done, watch() if watch is not None else -done)
    best.restore()
    return done


class _Best:
    """The best state of a part so far, and the number of steps it took."""

    def __init__(self, holder: Holder, part: str) -> None:
        self.part, self.value, self.at = holder[part], math.inf, 0
        self.state: dict[str, Tensor] | None = None

    def note(self, at: int, value: float) -> None:
        if value < self.value:
            self.value, self.at = value, at
            self.state = {name: tensor.detach().clone() for name, tensor in self.part.tensors().items()}

    @torch.no_grad()
    def restore(self) -> None:
        for name, tensor in self.part.tensors().items() if self.state is not None else ():
            assert self.state is not None
            tensor.copy_(self.state[name])
