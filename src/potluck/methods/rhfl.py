"""RHFL (Fang & Ye, CVPR 2022): clients with noisy labels learn from each other, the more from those that improve.

    Up:     p_j = σ(o_j) of the round's public samples P_t, |P_t|·C scalars, and ℓ_j, the mean loss on own data, 1.
    Down:   the mixture m_k = Σ_{j≠k} w_j·p_j of the others, |P_t|·C scalars.
    Server: q_k = (ℓ_k^{t−1} − ℓ_k^t) / ℓ_k^t,  w = softmax_k( 1/(K−1) + η·q_k/Σ_j q_j ),  at first w = 1/(K−1).
    Client: public phase, Σ_{j≠k} w_j·KL(p_j ‖ p_k); then private phase, and before the first round alone,
            SCE = α·CE + β·RCE,  RCE = −Σ_c σ(o)_c·log max(1[c = y], 1e-4).

The gradient of Σ_j w_j·KL(p_j ‖ p_k) is that of −Σ_c m_k,c·log p_k,c (INFERRED, and exact), so that one mixture is
all a client needs. Weights over j ≠ k do not sum to 1 after the first round, so neither does a mixture; as in the
released code, it is not scaled. K counts the clients of the round.

Deviations: q_k is divided by Σ_j |q_j|, which is Σ_j q_j where all losses fell; elsewhere the sum can be near 0 or
negative and would turn the order around. Where no loss has changed, all weights are 1/K. Clients hear of each other
once a round; the released code does so before every batch, with a new optimiser (`exchange: batch`). It measures ℓ
and p in training mode, here both are in evaluation mode, ℓ as the mean over samples. It uses Adam at 1e-3 in
batches of 256; both phases follow `training` here. INFERRED: a client's ℓ^{t−1} is that of the last round it was
in; without one its q is 0; a client alone in a round learns from its own data only.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from potluck.core.card import ClientId
from potluck.core.client import Client
from potluck.core.contract import tensor
from potluck.core.message import Content, Message
from potluck.core.method import Down, client_step
from potluck.core.options import option
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.task import Batch, Task
from potluck.kit.masks import mean_where
from potluck.kit.public_knowledge import scores
from potluck.kit.score_exchange import ScoreExchange, ScoreExchangeConfig, fit_epochs
from potluck.training.collect import collect
from potluck.training.plan import rows_on

FLOOR = 1e-4  # of a label's probability, so that its logarithm is finite


class RHFL(ScoreExchange):
    """Learn towards a mixture of the other clients' public predictions, weighted by how their losses fall."""

    name = "rhfl"
    citation = "Fang & Ye, CVPR 2022"
    bounds = {"at_least": 0, "at_most": "1"}
    said = "the client's probabilities of public samples; zeros where it lacks one"
    heard = "the other clients' probabilities, weighted and added"

    class Config(ScoreExchangeConfig):
        """Options of RHFL."""

        eta: float = option(
            default=0.5,
            ge=0,
            description="η: how much a client's weight follows the fall of its loss; 0: all alike",
            source="released code",
        )
        alpha: float = option(
            default=0.1, ge=0, description="α, weight of the cross-entropy", source="released code"
        )
        beta: float = option(
            default=1.0, ge=0, description="β, weight of the reverse cross-entropy", source="released code"
        )

        @model_validator(mode="after")
        def _something_is_learned(self) -> Self:
            if not (self.alpha or self.beta):
                raise ValueError("alpha and beta are 0: nothing is learned; let one of them be above 0")
            return self

    def server_state(self, task: Task) -> dict[str, Any]:
        """Who was met, and the loss each client told last."""
        return super().server_state(task) | {"losses": {}}

    def prepare(self, client: Client) -> None:
        """Pre-training with SCE."""
        fit_epochs(client, self.loss, self.config.pretrain_epochs)

    @client_step(up=lambda method: {**method.sent(), "loss": tensor("", "mean loss on own data", at_least=0)})
    def score(self, client: Client) -> Content:
        """The first probabilities of the round, and the loss on private data."""
        return {**super().score(client), "loss": self.private_loss(client)}

    def private_loss(self, client: Client) -> Tensor:
        """The mean SCE over the training samples."""

        def read(batch: Batch) -> Tensor:
            return self.sce(client["model"](batch.x), batch.y).sum()

        sums: list[Tensor] = collect(client, read)
        return torch.stack(sums).sum() / client.samples if sums else torch.zeros((), device=client.device)

    def combiner(self, server: Server, first: Replies) -> Callable[[Replies], Down]:
        """Mixtures with this round's weights."""
        told = {client: reply["loss"] for client, reply in first.items()}
        weights = self.confidence(told, server["losses"].tensors())
        return lambda replies: self.mixtures(replies, weights)

    def confidence(
        self, now: Mapping[ClientId, Tensor], before: Mapping[ClientId, Tensor]
    ) -> dict[ClientId, Tensor]:
        """w of every client of the round."""
        share = 1 / max(len(now) - 1, 1)
        if not any(client in before for client in now):
            return {client: torch.full_like(loss, share) for client, loss in now.items()}
        current = torch.stack([*now.values()]).double()
        earlier = torch.stack([before.get(client, loss) for client, loss in now.items()]).double()
        quality = (earlier - current) / current.clamp_min(1e-12)
        quality = quality / quality.abs().sum().clamp_min(1e-12)
        weights = (share + self.config.eta * quality).softmax(0).float()
        return dict(zip(now, weights, strict=True))

    def keep(self, server: Server, first: Mapping[ClientId, Message]) -> None:
        """Keep ℓ for the next round."""
        server["losses"].load({client: reply["loss"] for client, reply in first.items()})

    def mixtures(self, replies: Replies, weights: Mapping[ClientId, Tensor]) -> Down:
        """What each client hears: the weighted sum without its own part."""
        if len(replies) < 2:
            return {}
        parts = {client: weights[client] * reply["scores"] for client, reply in replies.items()}
        total: Tensor = functools.reduce(operator.add, parts.values())
        return lambda client: {"scores": (total - parts[client]).clamp_min(0)}

    def say(self, client: Client, rows: np.ndarray) -> Tensor:
        """Probabilities of public rows."""
        there = client.public.mask[rows_on(rows, client.device)]
        return scores(client, rows).softmax(1) * there.unsqueeze(1)

    def agree(self, client: Client, batch: Batch, targets: Tensor) -> dict[str, Tensor]:
        """KL to the mixture, the mean over samples."""
        own = client["model"](batch.x).float().log_softmax(1)
        each = F.kl_div(own, targets[batch.id], reduction="none").sum(1)
        return {"agree": mean_where(each, client.public.mask[batch.id])}

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """SCE."""
        return batch.mean(self.sce(client["model"](batch.x), batch.y))

    def sce(self, logits: Tensor, y: Tensor) -> Tensor:
        """Symmetric cross-entropy of every sample."""
        logits = logits.float()
        # The logarithm of a label is 0 for the sample's own class and log(FLOOR) for all others.
        reverse = -math.log(FLOOR) * (1 - logits.softmax(1).gather(1, y[:, None]).squeeze(1))
        plain = F.cross_entropy(logits, y, reduction="none")
        total: Tensor = self.config.alpha * plain + self.config.beta * reverse
        return total
