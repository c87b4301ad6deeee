"""ScaleFL (Ilhan, Su, Liu, CVPR 2023): parts of one network with early exits, cut by width and by depth."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import Shapes, state_of
from potluck.core.message import Content
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.population import Population
from potluck.core.task import Batch, Task
from potluck.core.trial import sample_batch
from potluck.errors import ConfigError
from potluck.kit.requirements import named, one_per_architecture
from potluck.kit.subnetworks import OTHERS, SubNetworks
from potluck.kit.width_slices import is_slice
from potluck.training.fit import fit


class ScaleFL(SubNetworks):
    """A client holds the first channels of the parent's layers, up to one of its exits.

    Up: the client's part of the network after training. Down: that part of the newest one. Loss, over its J exits,

        L = Σ_j j·ℓ_j / (J(J + 1)/2),  ℓ_J = CE(o_J, y),
        ℓ_j = CE(o_j, y) + γT²·KL(σ(o_J/T) ‖ σ(o_j/T)) for j < J, the second term after `warmup` rounds.

    Server: every entry becomes the mean over the clients that hold it, all weighted alike; one that nobody held
    stays. A client predicts by its last exit (mode `last`), or by the mean of all exits' probabilities (`ensemble`,
    ours).

    The pool `scalefl` has the four levels of the paper on a ResNet; a model of your own has a function
    `exit_scores(x)` that gives the scores of each exit. In the released code the teacher o_J is not detached and
    the divergence is the mean over samples and classes: `compat` brings that back. By default the teacher is
    detached and the mean is over samples, which is as many times larger as there are classes. γ is 0 in the
    released code and 0.05 in its script for AgNews; the paper's for images was not seen. It distils after a quarter
    of the rounds, a number that a method does not know: set `warmup`. Its settings (SGD 0.1, momentum 0.9, weight
    decay 5e-4, batches of 16, 5 epochs) are for `training`.
    """

    name = "scalefl"
    citation = "Ilhan, Su, Liu, CVPR 2023"
    models = "one network with early exits in several widths and depths (the pool `scalefl`)"
    modes = ("last", "ensemble")

    class Config(SubNetworks.Config):
        """Options of ScaleFL."""

        gamma: float = option(
            default=0.05,
            ge=0,
            description="γ, the weight of self-distillation; 0: none",
            source="released script for AgNews, there on the mean over samples and classes",
        )
        temperature: float = option(
            default=3.0, gt=0, description="T, the temperature of self-distillation", source="released code"
        )
        warmup: int = option(
            default=12,
            ge=0,
            description="rounds before self-distillation begins; a quarter of all in the released code",
            source="released code; 12 is a quarter of 50",
        )
        compat: bool = option(
            default=False,
            description="the divergence as the released code has it: a mean over classes too, no detached teacher",
            source="released code",
        )

        @model_validator(mode="after")
        def _has_no_idle_option(self) -> ScaleFL.Config:
            if not self.gamma:
                self.refuse_set("temperature", "warmup", "compat", reason="with gamma: 0")
            return self

    def check(self, population: Population) -> None:
        """Every model must have exits, and be a part of the parent."""
        for client in one_per_architecture(population):
            if not hasattr(population.build_model(client), "exit_scores"):
                raise ConfigError(
                    f"{self.name} needs parts of one network with early exits, as the pool scalefl has; "
                    f"{named(population, client)} has no function exit_scores; {OTHERS}"
                )
        super().check(population)

    def misfit(self, shapes: Shapes) -> str:
        """A part may lack tensors: what is behind its last exit."""
        return super().misfit({**self.slices.shapes, **shapes})

    def agrees(self, parent: Model, part: Model, task: Task) -> bool:
        """Whether the exits of a part give what the same exits of the parent give on these channels alone."""
        exits = len(_exits(part.eval(), sample_batch(task, part)))

        def scores(model: Model, x: Tensor) -> Tensor:
            return torch.cat(_exits(model, x)[:exits], 1)

        return is_slice(parent, part, self.slices, None, task, scores)

    @client_step(up={"model": state_of("model", "the client's part of the network after local training")})
    def train(self, client: Client) -> Content:
        """Local epochs, then the weights."""
        strength = self.config.gamma * self.config.temperature**2 * (client.round > self.config.warmup)
        scalars = {"strength": torch.full((), strength, device=client.device)} if self.config.gamma else {}
        fit(client, self.loss, scalars=scalars)
        return {"model": client["model"].state()}

    def loss(self, client: Client, batch: Batch, strength: Tensor | None = None) -> dict[str, Tensor]:
        """The weighted losses of all exits, and what the early ones learn from the last."""
        scores = client["model"].exit_scores(batch.x)
        shares = [2 * (place + 1) / (len(scores) * (len(scores) + 1)) for place in range(len(scores))]
        losses = [client.task.loss(one, batch.y, batch.weight) for one in scores]
        if strength is None or len(scores) == 1:
            return {"exits": _sum(shares, losses)}
        far = [self.distance(one, scores[-1], batch) for one in scores[:-1]]
        return {"exits": _sum(shares, losses), "distil": strength * _sum(shares[:-1], far)}

    def distance(self, scores: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
        """KL(σ(teacher/T) ‖ σ(scores/T))."""
        wanted = teacher if self.config.compat else teacher.detach()
        mine, wanted = ((one.float() / self.config.temperature).log_softmax(1) for one in (scores, wanted))
        each = F.kl_div(mine, wanted, reduction="none", log_target=True).sum(1)
        return batch.mean(each / scores.shape[1] if self.config.compat else each)

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """The last exit's scores, or the logarithm of the mean probability over exits."""
        if mode == "last":
            scores: Tensor = client["model"](batch.x)
            return scores
        exits = [one.log_softmax(1) for one in client["model"].exit_scores(batch.x)]
        return torch.stack(exits).logsumexp(0) - math.log(len(exits))


def _exits(model: Any, x: Tensor) -> list[Tensor]:
    """The scores of each exit."""
    scores: list[Tensor] = model.exit_scores(x)
    return scores


def _sum(shares: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Σ share·value."""
    return reduce(operator.add, (share * value for share, value in zip(shares, values, strict=True)))
