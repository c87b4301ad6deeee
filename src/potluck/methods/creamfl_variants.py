"""CreamFL with the Muscle loss, as FedMuscle's paper combines them; how it does so is INFERRED.

It says that Muscle replaces both the contrast on the clients and the scores that weight them on the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from potluck.core.method import MethodConfig
from potluck.errors import ConfigError
from potluck.kit.contrastive import TAU, TAU_PREV, muscle
from potluck.kit.masks import present


class Variants(MethodConfig):
    """Options of the combination with FedMuscle."""

    regularizer: Literal["creamfl", "muscle"] = Field(
        default="creamfl",
        description="what clients contrast with on public data: CreamFL's two terms, or the Muscle loss with the "
        "batch's rows of all global tables as peers",
    )
    aggregation: Literal["creamfl", "muscle"] = Field(
        default="creamfl",
        description="how the server scores a client's representation: CreamFL's log softmax, or minus the "
        "Muscle loss, batch by batch",
    )
    muscle_tau: float = Field(default=TAU, gt=0, description="τ^(N) of the Muscle loss; FedMuscle's 0.2")
    muscle_tau_prev: float = Field(
        default=TAU_PREV, gt=0, description="τ^(N−1) of the Muscle loss; FedMuscle's 0.15"
    )


def require_ordered_temperatures(method_name: str, config: Any) -> None:
    """Refuse temperatures for which γ = 1/τ^(N−1) − 1/τ^(N) is negative."""
    tau, before = config.muscle_tau, config.muscle_tau_prev
    if before > tau:
        raise ConfigError(
            f"{method_name}: method.muscle_tau_prev is {before} and method.muscle_tau {tau}; the first must not "
            "be larger"
        )


def muscle_regularizer(config: Any, z: Tensor, peers: Sequence[Tensor], there: Tensor) -> Tensor:
    """The mean Muscle loss of a public batch against the global representations of the same samples."""
    return _muscle(config, z, peers, there, reduction="mean")


def muscle_agreement(config: Any, z: Tensor, tables: Mapping[str, Tensor], batch: int) -> Tensor:
    """s_ik = −Muscle(z_k,i; G) of each public sample, in pieces of about a batch."""
    pieces = np.array_split(np.arange(len(z)), max(len(z) // batch, 1))
    found = [
        -_muscle(
            config,
            z[rows],
            [table[rows] for table in tables.values()],
            present(z[rows]).float(),
            reduction="none",
        )
        for rows in map(torch.from_numpy, pieces)
    ]
    return torch.cat(found)


def _muscle(
    config: Any, z: Tensor, peers: Sequence[Tensor], there: Tensor, reduction: Literal["mean", "none"]
) -> Tensor:
    return muscle(
        z,
        peers,
        config.muscle_tau,
        config.muscle_tau_prev,
        weight=there,
        present=[present(peer) for peer in peers],
        reduction=reduction,
    )
