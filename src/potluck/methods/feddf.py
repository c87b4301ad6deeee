"""FedDF (Lin et al., NeurIPS 2020): the server distils all clients' models into one per architecture.

    Up:     the weights, |θ_k| scalars.
    Down:   the distilled weights of the client's architecture, |θ_k| scalars.
    Client: the task's own loss.
    Server: per architecture, start from the mean of its clients and minimise, over public x,
            KL( σ(ō(x)/T) ‖ σ(o(x)/T) ), ō = mean of the logits of all clients of the round, without a factor T².

Public data is on the server alone. It trains with Adam and a cosine over at most `steps` steps, looks at a
validation set every `every` steps, keeps the best, and stops after `patience` steps without a better one.

The released code has batch 128, 10⁴ steps, 100, 1,000 (its scripts; its default is 2,000) and T = 1. That the
rate is 1e-3 is recalled and not confirmed. By default it averages the teachers' losses, in all published commands
their logits: logits here. Deviations: the server has no labelled set to validate on, so a share of the public
data is held back and the distillation loss on it is watched; `validation: 0` does neither. The cosine falls in
stairs of `every` steps. Teachers below chance are not dropped.

INFERRED: teachers are read once, in evaluation mode, which gives the same as reading them in every step; an
architecture without a client in the round stays as it is; a client whose logits are not finite is left out of the
round, its weights too; batch-norm statistics must travel with the weights, so `buffers` is `average`.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from potluck.core.contract import state_of
from potluck.core.method import Clients
from potluck.core.options import option
from potluck.core.replies import Replies
from potluck.core.server import Server
from potluck.core.settings import OptimizerSettings
from potluck.core.task import Batch
from potluck.kit.distillation import divergence, held_back
from potluck.kit.early_stopping import fit_patiently
from potluck.kit.public_knowledge import scores
from potluck.kit.server_models import (
    BY_ARCHITECTURE,
    STATISTICS_TRAVEL,
    ClientModelsOnServer,
    steps_on_public_data,
)
from potluck.methods.fedavg import FedAvg


class FedDF(ClientModelsOnServer, FedAvg):
    """FedAvg within each architecture, then distillation on public data: all clients teach every architecture."""

    name = "feddf"
    citation = "Lin et al., NeurIPS 2020"
    remedy = "lower training.optimizer.lr or method.lr, or set training.clip"
    usual_batch = 128
    down = {
        "model": state_of(
            "model", "the distilled weights of the client's architecture", optional=True, partial=True
        )
    }

    class Config(FedAvg.Config):
        """Options of FedDF."""

        share: Literal["groups"] = BY_ARCHITECTURE
        buffers: Literal["average"] = STATISTICS_TRAVEL
        steps: int = option(
            default=10_000,
            ge=1,
            description="most distillation steps per round and architecture; the released code's 10,000",
            source="released code",
        )
        every: int = option(
            default=100,
            ge=1,
            description="steps between two looks at the validation share; the code's 100",
            source="released code",
        )
        patience: int = option(
            default=1000,
            ge=1,
            description="steps without improvement before it stops; the scripts' 1,000",
            source="released scripts",
        )
        batch: int | None = option(
            default=None,
            ge=1,
            description="public samples in a step; by default the released code's 128, or all if fewer",
            source="released code",
        )
        lr: float = option(
            default=1e-3,
            gt=0,
            description="Adam's rate, before the cosine; recalled, not confirmed",
            source="recalled, not confirmed",
        )
        temperature: float = option(
            default=1.0, gt=0, description="T of teachers and student; the code's 1", source="released code"
        )
        validation: float = option(
            default=0.1,
            ge=0,
            lt=1,
            description="share of the public data held back to decide when to stop",
            source="ours",
        )

        @model_validator(mode="after")
        def _stops_early(self) -> Self:
            if not self.validation:
                self.refuse_set(
                    "patience", reason="at validation: 0; without samples held back nothing can stop it"
                )
            return self

    def round(self, server: Server, clients: Clients) -> None:
        """Train everywhere, average within architectures, distil into each."""
        self.introduce(server, clients)
        replies = clients.ask(self.train)
        teachers = self.teach(server, clients, replies)
        replies = replies.among(clients.ids)
        means = self.mean(replies, "model", self.config.weights)
        for architecture in self.represented(replies):
            student = server[self.model(architecture)]
            student.load(self.weights_of(means, architecture))
            self.distil(server, self.model(architecture), teachers)
            self.keep(server, architecture, student.state())

    def teach(self, server: Server, clients: Clients, replies: Replies) -> Tensor:
        """The mean logits of all public samples over the clients that stay in the round."""
        total = torch.zeros(len(server.public), server.task.classes, device=server.device)
        for logits in self.opinions(server, clients, replies):
            total += logits
        return total / len(replies.among(clients.ids))

    def distil(self, server: Server, name: str, teachers: Tensor) -> None:
        """Train one model towards the teachers' mean, with early stopping on the share held back."""
        config = self.config
        watched, rows = held_back(server.public, config.validation)

        def loss(server: Server, batch: Batch, teachers: Tensor) -> Tensor:
            return divergence(server[name](batch.x), teachers[batch.id], config.temperature)

        def watch() -> float:
            targets = teachers[server.numbers(watched.tolist())]
            return float(divergence(scores(server, watched, name), targets, config.temperature))

        fit_patiently(
            server,
            loss,
            name,
            steps_on_public_data(server, rows, self.batch, config.steps, "distil", name),
            optimizer=OptimizerSettings(name="adam", lr=config.lr),
            every=config.every,
            scalars={"teachers": teachers},
            watch=watch if len(watched) else None,
            patience=config.patience,
        )
