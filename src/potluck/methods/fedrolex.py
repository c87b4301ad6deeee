"""FedRolex (Alam et al., NeurIPS 2022): HeteroFL whose window of channels moves on by one every round.

    Up, down, loss: as HeteroFL.
    Slice:  in round t (from 0) a layer of w of W channels holds the channels t, t + 1, …, t + w − 1 modulo W: the
            same for all clients of one width, and for the outputs of a layer and the inputs of the next.
    Server: the plain mean of every entry over its holders, as in HeteroFL.

So all of the parent is trained even where no client can hold it (`parent: {name: resnet18, width: 128}`).
`window: random` takes channels in an order that is drawn anew every round; the released code's option `overlap`
comes to that, as it shuffles again in almost every round.

The released code rolls the other way, which changes nothing but names. Its `--weighting avg` holds for convolutions
alone, the classifier and vectors are weighted by how often an entry was trained so far; here all means are plain. A
client is evaluated with the window of the last round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from potluck.core.options import option
from potluck.core.rng import Rng
from potluck.kit.width_slices import Window
from potluck.methods.heterofl import HeteroFL


class FedRolex(HeteroFL):
    """Slices of one network by width: a window of channels that rolls on."""

    name = "fedrolex"
    citation = "Alam et al., NeurIPS 2022"

    class Config(HeteroFL.Config):
        """Options of FedRolex."""

        window: Literal["rolling", "random"] = option(
            default="rolling",
            description="channels of a round: the next ones in turn, or drawn anew",
            source="paper; random: released code (overlap)",
        )

    def window(self, round_: int, rng: Rng) -> Window:
        """One channel further every round."""
        return Rolling(max(round_ - 1, 0)) if self.config.window == "rolling" else Shuffled(rng)


@dataclass(frozen=True)
class Rolling:
    """Channels from `start` on, beginning again after the last."""

    start: int

    def __call__(self, own: int, channels: int) -> Tensor:
        """The numbers of `own` of the channels."""
        return (torch.arange(own) + self.start) % channels


@dataclass(frozen=True)
class Shuffled:
    """The first channels of an order that depends on their number and on the round."""

    rng: Rng

    def __call__(self, own: int, channels: int) -> Tensor:
        """The numbers of `own` of the channels."""
        return torch.randperm(channels, generator=self.rng.child(channels).generator())[:own]
