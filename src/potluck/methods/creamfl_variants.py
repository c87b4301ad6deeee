"""CreamFL with the Muscle loss, as FedMuscle's paper combines them: what `method: creamfl` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Batch
from potluck.errors import ConfigError
from potluck.kit.contrastive import TAU, TAU_PREV, muscle
from potluck.kit.masks import present
from potluck.kit.modality_tables import Tables
from potluck.methods.creamfl import CreamFL


class CreamFLVariants(CreamFL):
    """CreamFL as published by default.

    FedMuscle's paper says that Muscle replaces both the contrast on the clients (`regularizer`) and the scores that
    weight them on the server (`aggregation`); how it does so is INFERRED.
    """

    name = CreamFL.name

    class Config(CreamFL.Config):
        """Options of CreamFL with its combination with FedMuscle."""

        regularizer: Literal["creamfl", "muscle"] = option(
            default="creamfl",
            description="what clients contrast with on public data: CreamFL's two terms, or the Muscle loss with "
            "the batch's rows of all global tables as peers",
            source="FedMuscle's paper; how: inferred",
        )
        aggregation: Literal["creamfl", "muscle"] = option(
            default="creamfl",
            description="how the server scores a client's representation: CreamFL's log softmax, or minus the "
            "Muscle loss, batch by batch",
            source="FedMuscle's paper; how: inferred",
        )
        muscle_tau: float = option(
            default=TAU,
            gt=0,
            description="τ^(N) of the Muscle loss; FedMuscle's 0.2",
            source="FedMuscle's paper",
        )
        muscle_tau_prev: float = option(
            default=TAU_PREV,
            gt=0,
            description="τ^(N−1) of the Muscle loss; FedMuscle's 0.15",
            source="FedMuscle's paper",
        )

        @model_validator(mode="after")
        def _muscle_is_of_use(self) -> Self:
            if "muscle" not in (self.regularizer, self.aggregation):
                reason = "without the Muscle loss; it is for regularizer or aggregation: muscle"
                self.refuse_set("muscle_tau", "muscle_tau_prev", reason=reason)
            self.refuse_idle("tau", needs="regularizer", among=("creamfl",))
            return self

    def check(self, population: Population) -> None:
        """As published; and γ = 1/τ^(N−1) − 1/τ^(N) must not be negative."""
        super().check(population)
        tau, before = self.config.muscle_tau, self.config.muscle_tau_prev
        if before > tau:
            raise ConfigError(
                f"{self.name}: method.muscle_tau_prev is {before} and method.muscle_tau {tau}; the first must not "
                "be larger; lower it"
            )

    def contrast_terms(
        self, client: Client, batch: Batch, z: Tensor, previous: Tensor, tables: Tables
    ) -> dict[str, Tensor]:
        """As published, or the Muscle loss against the global representations of the same samples."""
        if self.config.regularizer == "creamfl":
            return super().contrast_terms(client, batch, z, previous, tables)
        peers, there = [table[batch.id] for table in tables.values()], client.public.mask[batch.id]
        return {"muscle": self.muscle(z, peers, there, reduction="mean")}

    def agreement(self, z: Tensor, name: str, tables: Tables) -> Tensor:
        """As published, or s_ik = −Muscle(z_k,i; G), in pieces of about a batch."""
        if self.config.aggregation == "creamfl" or not tables:
            return super().agreement(z, name, tables)
        pieces = np.array_split(np.arange(len(z)), max(len(z) // self.batch, 1))
        found = []
        for rows in map(torch.from_numpy, pieces):
            peers = [table[rows] for table in tables.values()]
            found.append(-self.muscle(z[rows], peers, present(z[rows]).float(), reduction="none"))
        return torch.cat(found)

    def muscle(
        self, z: Tensor, peers: Sequence[Tensor], there: Tensor, reduction: Literal["mean", "none"]
    ) -> Tensor:
        """The Muscle loss of public samples, with global representations of the same samples as peers."""
        tau, before, has = (
            self.config.muscle_tau,
            self.config.muscle_tau_prev,
            [present(one) for one in peers],
        )
        return muscle(z, peers, tau, before, weight=there, present=has, reduction=reduction)
