"""FedRE's other mechanisms and distributions, weights that stay fixed, and two protections of ours.

The mechanism says what is mixed and how. Only RAP (random average prototype) is spelled out in the text that was
at hand; the other five are INFERRED from their names and the order of their results:

    units               one at random   all, equally   all, with normalised random weights
    representations     RSR             VAR            RAR
    class means         RSP             VAP            RAP
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.options import option
from potluck.kit.shared_head import SharedHead

Mechanism = Literal["RAP", "VAP", "RSP", "RAR", "VAR", "RSR"]
Distribution = Literal["uniform", "gaussian", "laplace"]

# The paper names the distributions; that negative values count by their size is INFERRED. The size of a Laplace
# variable is exponential, so those weights, once normalised, are Dirichlet(1); the uniform ones are not.
DISTRIBUTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "uniform": lambda place, draw: place.uniform_(generator=draw),
    "gaussian": lambda place, draw: place.normal_(generator=draw),
    "laplace": lambda place, draw: place.exponential_(generator=draw),
}


class Variants(SharedHead.Config):
    """Options that change what is mixed, how it is weighted, and what a message gives away."""

    mechanism: Mechanism = option(
        default="RAP",
        description="what is mixed and how: a random (RA), vanilla (VA) or single (RS) average of prototypes, "
        "which are class means (P), or of representations (R); RAP is the paper's, the others are inferred from "
        "their names",
        source="paper; all but RAP inferred from their names",
    )
    weights: Distribution = option(
        default="uniform",
        description="distribution of the random weights before they are normalised; the paper's",
        source="paper; how negative values count: inferred",
    )
    fixed: bool = option(
        default=False,
        description="keep the weights of a client's first round; as published they are drawn every round",
        source="paper's ablation",
    )
    noise: float = option(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Gaussian noise on the mixture, in standard deviations of its entries",
        source="ours",
    )
    levels: int | None = option(
        default=None,
        ge=1,
        description="send the label in whole multiples of 1/levels; exact by default",
        source="ours",
    )

    @model_validator(mode="after")
    def _has_random_weights(self) -> Self:
        self.refuse_idle("weights", needs="mechanism", among=("RAP", "RAR"))
        self.refuse_idle("fixed", needs="mechanism", among=("RAP", "RSP", "RAR", "RSR"))
        return self


def draw_weights(client: Client, units: int, mechanism: Mechanism, distribution: Distribution) -> Tensor:
    """One-hot (RS), equal (V), or random and normalised (RA) weights, drawn from the client's own secret."""
    if mechanism.startswith("V"):
        return torch.full((units,), 1 / units, device=client.device)
    draw = client.draw_private("weights")
    if mechanism.startswith("RS"):
        chosen = torch.randint(units, (1,), generator=draw, device=client.device)
        return torch.zeros(units, device=client.device).index_fill_(0, chosen, 1.0)
    drawn = DISTRIBUTIONS[distribution](torch.empty(units, device=client.device), draw)
    positive = drawn.abs().clamp_min(torch.finfo(drawn.dtype).tiny)
    return positive / positive.sum()


def disturbed(client: Client, mixed: Tensor, noise: float) -> Tensor:
    """The mixture with private noise, if any is asked for."""
    if not noise:
        return mixed
    drawn = torch.randn(mixed.shape, generator=client.draw_private("noise"), device=mixed.device)
    return mixed + noise * mixed.std(correction=0) * drawn


def coarsened(label: Tensor, levels: int | None) -> Tensor:
    """A label in whole multiples of 1/levels that still add up to one: the largest remainders are rounded up.

    >>> coarsened(torch.tensor([0.55, 0.05, 0.4]), 4)
    tensor([0.5000, 0.0000, 0.5000])
    """
    if levels is None:
        return label
    whole = (label * levels).floor()
    remainders = label * levels - whole
    ranks = remainders.argsort(descending=True, stable=True).argsort()
    return (whole + (ranks < levels - whole.sum())) / levels
