"""FedHeNN (Makhija et al., ICML 2022): clients agree on which public samples are alike.

R are public samples drawn for each round, A = f_k(R) a client's representations of them, and K_k = A·Aᵀ.

    Up:     K_k of the next round's R, |R|² scalars, or A where that is smaller (`send`): min(|R|², |R|·d_k).
    Down:   K̄, |R|² scalars.
    Client: in every step CE + η_t·(1 − CKA(K̄, K_k)), K̄ a constant,
            η_t = η₀·√t for t = 0, 1, …, so that the first round has no second term,
            CKA(K, L) = ⟨HKH, HLH⟩ / √(⟨HKH, HKH⟩·⟨HLH, HLH⟩), H = I − 1·1ᵀ/|R|.
    Server: K̄ = mean of K_k over the cohort, on the next round's R, with the models as this round left them.

Deviations: the released scripts swap features and log-probabilities, so that CE acts on features and CKA on
log-probabilities; not here. They train with SGD 0.01, momentum 0.5, weight decay 1e-4 on weights, batches of 10,
10 epochs, a fifth of 50 clients over 100 rounds, and let every client train in the last round; `training` decides
that here. Their R comes from the pool of training images; here it is public data.

INFERRED: batch norm uses but does not remember the statistics of R; K_k is computed in evaluation mode; a sample
that a client or K̄ lacks is left out of CKA, and K̄_ij is a mean over the clients that have i and j (A is zero
where a sample is missing); a constant K has CKA 0 and no gradient.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from potluck.core.card import Card
from potluck.core.client import Client
from potluck.core.contract import tensor
from potluck.core.message import Content, Message
from potluck.core.method import Clients, PrivateModelConfig, client_step
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.server import Server
from potluck.core.state import Holder
from potluck.core.task import Batch, Task
from potluck.kit.kernels import cka, mean_kernel
from potluck.kit.public_knowledge import (
    OnPublicData,
    by_row,
    drawn_rows,
    foreign_features,
    public_samples,
    public_stream,
    representations,
    require_public_samples,
)
from potluck.kit.requirements import require_representation
from potluck.training.fit import fit


class FedHeNN(OnPublicData):
    """A proximal term on kernels: representations may have any width, but must find the same samples alike."""

    name = "fedhenn"
    citation = "Makhija et al., ICML 2022"
    tasks = "any"
    models = "any, of any width"
    card_fields = ("width",)
    stays = ("data", "labels", "model")

    class Config(PrivateModelConfig):
        """Options of FedHeNN."""

        weight: float = option(
            default=0.01,
            ge=0,
            description="η₀, on the distance of kernels; the scripts' 0.01",
            source="released scripts",
        )
        samples: int | None = option(
            default=None,
            ge=2,
            description="|R|; by default the scripts' 1,000, or all public samples if fewer",
            source="released scripts",
        )
        batch: int | None = option(
            default=None,
            ge=2,
            description="samples of R in one step; by default all of R, as published",
            source="paper for all of R; fewer: ours",
        )
        send: Literal["smaller", "kernel", "representations"] = option(
            default="smaller",
            description="what goes up: K, A, or the smaller of both; K̄ is the same",
            source="ours",
        )

    def setup(self, population: Population) -> None:
        """The size of R, and how much of it a step sees."""
        super().setup(population)
        self.samples = public_samples(population, self.config.samples, 1000)
        self.batch = min(public_samples(population, self.config.batch, self.samples), self.samples)

    def check(self, population: Population) -> None:
        """R must fit into the public data, and there must be a representation to train."""
        require_public_samples(population, "samples", self.config.samples)
        require_public_samples(population, "batch", self.config.batch)
        require_representation(population)

    def symbols(self, card: Card) -> dict[str, int]:
        """R, the number of samples, and m, how many columns a client sends for each."""
        known = super().symbols(card) | {"R": self.samples}
        return known | ({"m": self.columns(card.width)} if "width" in card.extra else {})

    def columns(self, width: int) -> int:
        """|R| for K, d_k for A."""
        return self.samples if self.sends_kernel(width) else width

    def sends_kernel(self, width: int) -> bool:
        """Whether a client with this width sends K."""
        return self.config.send == "kernel" or (self.config.send == "smaller" and self.samples <= width)

    def server_state(self, task: Task) -> dict[str, Any]:
        """K̄; nothing until the first round is over."""
        return {"kernel": {}}

    def round(self, server: Server, clients: Clients) -> None:
        """Train towards K̄, then average the kernels on the next R."""
        replies = clients.ask(self.train, down=server["kernel"].state())
        sent = ((replies.cards[client].width, message["aligned"]) for client, message in replies.items())
        server["kernel"].load(
            {"kernel": mean_kernel(x if self.sends_kernel(width) else x @ x.T for width, x in sent)}
        )

    @client_step(
        up={"aligned": tensor("R, m", "K = A·Aᵀ of the next round's samples, or A where that is smaller")},
        down={"kernel": tensor("R, R", "K̄, the mean kernel of this round's samples", optional=True)},
    )
    def train(self, client: Client, down: Message) -> Content:
        """Local epochs with R beside every step; then the kernel of the next R."""
        if "kernel" in down:
            self.fit_aligned(client, down["kernel"])
        else:
            fit(client, self.loss)
        z = representations(client, self.rows(client, client.round + 1))
        return {"aligned": z @ z.T if self.sends_kernel(z.shape[1]) else z}

    def fit_aligned(self, client: Client, kernel: Tensor) -> None:
        """Train on private batches, with R (or a part of it) beside each."""
        rows = self.rows(client, client.round)
        place = by_row(client, rows, torch.arange(len(rows), device=client.device))
        eta = self.config.weight * math.sqrt(client.round - 1)
        fit(
            client,
            self.aligned_loss,
            streams={
                "private": client.batches(),
                "public": public_stream(client, rows, self.batch, 1, "align", "wrap"),
            },
            scalars={"kernel": kernel, "place": place, "eta": torch.full((), eta, device=client.device)},
        )

    def aligned_loss(
        self, client: Client, batch: Batch, public: Batch, kernel: Tensor, place: Tensor, eta: Tensor
    ) -> dict[str, Tensor]:
        """The task's own loss and η_t·(1 − CKA(K̄, K_k))."""
        z, at = foreign_features(client, public), place[public.id]
        target = kernel[at][:, at]
        there = client.public.mask[public.id] & (target.diagonal() > 0)
        with torch.autocast(z.device.type, enabled=False):
            gap = 1 - cka(target, z @ z.T, there.to(z.dtype))
        task = client.task.loss(client["model"](batch.x), batch.y, batch.weight)
        return {"task": task, "alignment": eta * gap}

    def rows(self, holder: Holder, round_: int) -> np.ndarray:
        """R of a round."""
        return drawn_rows(holder.public, round_, self.samples)
