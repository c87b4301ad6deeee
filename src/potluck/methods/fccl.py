"""FCCL (Huang, Ye & Du, CVPR 2022): clients' logits of public samples are made to correlate, class by class.

    Up:     Z_k, the logits of the round's public samples P_t, |P_t|·C scalars.
    Down:   their mean Z̄ over the clients, |P_t|·C scalars.
    Client: public phase, over batches of B samples, with every column of Z and Z̄ standardised over the batch,
            M = Zᵀ·Z̄ / B,  L = Σ_u (1 − M_uu)² + λ·Σ_{u≠v} (1 + M_uv)²,  λ = 0.0051;
            private phase, CE + KL(σ(o_prev) ‖ σ(o)) + KL(σ(o_pre) ‖ σ(o)), with the models of the last round and of
            the pre-training as teachers. Before its first round a client trains alone and keeps a copy: o_pre.

Off-diagonals go to −1, not to 0 as in Barlow Twins, which the loss resembles.

In the released code clients hear of each other before every public batch (`exchange: batch`), where each batch also
has a new optimiser. A client's own slot in the mean is then what its last round's model says (`own: previous`); the
code of the extended version, FCCL+, takes the plain mean. With `exchange: round` both are the same, as the models
have not moved since.

Deviations: columns are divided by √(variance + 1e-5), the released code has no such guard; a short last public
batch is left out. The code uses Adam at 1e-3 and private epochs by data set; here both phases follow `training`.
Logits that are sent are read in evaluation mode, there in training mode. INFERRED: samples a client lacks do not
count; a client alone in a round learns from its own data only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import Contract, tensor
from potluck.core.message import Content, Message
from potluck.core.method import Down, client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.task import Batch, Task
from potluck.kit.distillation import divergence_of_each
from potluck.kit.public_knowledge import plain_mean, scores
from potluck.kit.score_exchange import Piece, ScoreExchange, ScoreExchangeConfig, fit_epochs

GUARD = 1e-5  # added to a variance before its root is taken


def standardized(z: Tensor, there: Tensor) -> Tensor:
    """Columns with mean 0 and variance 1 over the samples that are there; the rows of others are 0."""
    count = there.sum().clamp_min(2)
    centred = (z - (z * there).sum(0) / count) * there
    variance = centred.square().sum(0) / (count - 1)
    return centred / (variance + GUARD).sqrt()


def correlation_loss(z: Tensor, target: Tensor, there: Tensor, off_diagonal: float) -> Tensor:
    """Σ_u (1 − M_uu)² + λ·Σ_{u≠v} (1 + M_uv)²; 0 where fewer than two samples are there."""
    there = there.float().unsqueeze(1)
    count = there.sum()
    matrix = standardized(z, there).T @ standardized(target, there) / count.clamp_min(2)
    same = torch.eye(len(matrix), device=matrix.device)
    total = ((1 - matrix).square() * same + off_diagonal * (1 + matrix).square() * (1 - same)).sum()
    return total * (count > 1)


class FCCL(ScoreExchange):
    """Correlate the logits of public samples with their mean; do not forget one's own models on private data."""

    name = "fccl"
    citation = "Huang, Ye & Du, CVPR 2022"
    remedy = "lower training.optimizer.lr or method.public_lr, or set training.clip"
    last = "drop"
    usual_batch = 512
    said = "the client's logits of public samples"
    heard = "the mean logits of all clients"

    class Config(ScoreExchangeConfig):
        """Options of FCCL."""

        batch: int | None = option(
            default=None,
            ge=2,
            description="B: public samples in a step; by default the released code's 512, or |P_t| if fewer",
            source="released code",
        )
        pretrain_epochs: PositiveInt = option(
            default=40,
            description="epochs on private data before a client's first round; the released code's 40",
            source="released code",
        )
        private_epochs: Literal["training"] | PositiveInt = option(
            default="training",
            description="epochs on private data in a round: training.epochs, or a number; the released code has "
            "one for each data set",
            source="ours",
        )
        off_diagonal: float = option(
            default=0.0051, ge=0, description="λ, weight of the off-diagonals", source="released code"
        )
        own: Literal["previous", "mean"] = option(
            default="previous",
            description="a client's own slot in the mean: its last round's model, or the model as it is now, "
            "like everybody's (exchange: batch)",
            source="previous: released code; mean: code of FCCL+",
        )
        public_lr: float | None = option(
            default=None,
            gt=0,
            description="learning rate on public data; by default training.optimizer.lr",
            source="code of FCCL+",
        )
        weight_previous: float = option(
            default=1.0,
            ge=0,
            description="weight of the divergence from the last round's model",
            source="released code",
        )
        weight_pretrained: float = option(
            default=1.0,
            ge=0,
            description="weight of the divergence from the pre-trained model",
            source="released code",
        )

        @model_validator(mode="after")
        def _own_slot_is_of_use(self) -> Self:
            self.refuse_idle("own", needs="exchange", among=("batch",))
            return self

    @property
    def replaces_own(self) -> bool:
        """Whether a client puts its last round's model into its own slot, which differs from what it sent."""
        return bool(self.config.exchange == "batch" and self.config.own == "previous")

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The model, and its two teachers."""
        return {"model": model, "previous": copy.deepcopy(model), "pretrained": copy.deepcopy(model)}

    def prepare(self, client: Client) -> None:
        """Pre-training with the task's own loss; the result is kept."""
        fit_epochs(client, super().loss, self.config.pretrain_epochs)
        client["pretrained"].load(client["model"].tensors())

    @client_step(up=lambda method: method.sent())
    def score(self, client: Client) -> Content:
        """The first logits of the round. What the last round left is kept."""
        client["previous"].load(client["model"].tensors())
        return super().score(client)

    def received(self) -> Contract:
        """Z̄, and what one client counts in it where its slot is replaced."""
        if not self.replaces_own:
            return super().received()
        return {**super().received(), "share": tensor("", "1/K, a client's part of the mean", optional=True)}

    def combiner(self, server: Server, first: Replies) -> Callable[[Replies], Down]:
        """The plain mean."""
        return self.mean

    def mean(self, replies: Replies) -> Down:
        """Z̄; nothing for a client that is alone."""
        if len(replies) < 2:
            return {}
        mean = plain_mean(replies, "scores")
        return {"scores": mean} | (
            {"share": mean.new_full((), 1 / len(replies))} if self.replaces_own else {}
        )

    def public_optimizer(self, client: Client) -> OptimizerSettings:
        """The optimiser of `training`, with a rate of its own where there is one."""
        usual = super().public_optimizer(client)
        rate = self.config.public_lr
        return usual if rate is None else usual.model_copy(update={"lr": rate})

    def targets(self, client: Client, piece: Piece, down: Message) -> Tensor:
        """Z̄, with the last round's model in the client's own slot."""
        if not self.replaces_own:
            return down["scores"]
        change = scores(client, piece.rows, "previous") - scores(client, piece.rows)
        return down["scores"] + down["share"] * change

    def agree(self, client: Client, batch: Batch, targets: Tensor) -> dict[str, Tensor]:
        """The loss of the cross-correlation."""
        z, there = client["model"](batch.x).float(), client.public.mask[batch.id]
        with torch.autocast(z.device.type, enabled=False):
            return {"correlation": correlation_loss(z, targets[batch.id], there, self.config.off_diagonal)}

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """CE and the divergences from both teachers."""
        logits = client["model"](batch.x)
        terms = {"task": client.task.loss(logits, batch.y, batch.weight)}
        weights = {"previous": self.config.weight_previous, "pretrained": self.config.weight_pretrained}
        for name, weight in weights.items():
            if weight:
                with torch.no_grad():
                    teacher = client[name](batch.x)
                terms[name] = weight * batch.mean(divergence_of_each(logits, teacher))
        return terms
