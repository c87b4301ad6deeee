"""FjORD (Horváth et al., NeurIPS 2021): nested slices of one network, and ordered dropout among them.

    Up:     the client's slice θ_k = θ[:⌈p_max·W⌉, …] after training, and running statistics of batch norm per
            width.
    Down:   the same of the newest θ.
    Client: every batch draws one width p ≤ p_max for all layers, all alike likely, and trains the first ⌈pW⌉ units
            of each: CE(o_p, y). With `distil` CE(o_pmax, y) + (1 − α)·CE(o_p, y) + α·KL(sg σ(o_pmax/T) ‖ σ(o_p/T)).
    Server: every entry of θ becomes the mean over the clients that hold it, weighed by samples; others stay.

The widths are those of the models in the pool (`models: [{name: resnet18, width: 64}, {name: resnet18, width:
32}]`, p = 1 and ½) and of `widths`; a client trains its own and all narrower ones. Slices are masks: a layer
reads only the first channels of its input, which gives what a narrower network gives. Batch norm has running
statistics of its own for every width and shares scale and offset; they are averaged like weights, over the
clients that hold the width. A client is evaluated with its own slice.

α and T are recalled from the paper and not confirmed, and so is the second half of the loss with `distil`. Its
first term, which trains the teacher, is that of Flower's baseline; at α = T = 1 the gradient is that baseline's.
Flower averages from wide to narrow and overwrites the inner block last, which is the same mean. Its other
settings (SGD at 0.1 without momentum, weight decay 1e-4, batches of 32, one epoch) are for `training`. Deviation:
batches of one sample are normalised by the statistics of the client's own width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from potluck.core.client import Client
from potluck.core.contract import state_of
from potluck.core.message import Content
from potluck.core.method import client_step
from potluck.core.options import option
from potluck.core.task import Batch
from potluck.kit.ordered_widths import STATISTICS, OrderedWidths
from potluck.training.fit import fit


class FjORD(OrderedWidths):
    """Nested slices by width; every batch trains one that fits into the client's."""

    name = "fjord"
    citation = "Horváth et al., NeurIPS 2021"

    class Config(OrderedWidths.Config):
        """Options of FjORD."""

        weights: Literal["uniform", "samples"] = option(
            default="samples",
            description="what the average weighs a client by: its training samples, or all alike",
            source="Flower's baseline",
        )
        distil: bool = option(
            default=False,
            description="train the client's own width in every batch, and let it teach the width that is drawn",
            source="paper; Flower's baseline",
        )
        alpha: float = option(
            default=1.0,
            ge=0,
            le=1,
            description="α, the share of the teacher against the label",
            source="recalled, not confirmed",
        )
        temperature: float = option(
            default=1.0, gt=0, description="T of teacher and student", source="recalled, not confirmed"
        )

        @model_validator(mode="after")
        def _teaches(self) -> Self:
            self.refuse_idle("alpha", "temperature", needs="distil", among=(True,))
            return self

    @client_step(
        up={
            "model": state_of("model", "the client's slice after local training", partial=True),
            "statistics": STATISTICS,
        }
    )
    def train(self, client: Client) -> Content:
        """Local epochs, then the slice and its statistics."""
        fit(client, self.loss)
        return self.held(client)

    def loss(self, client: Client, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """CE at a width that is drawn; with `distil` also at the client's own, which teaches it."""
        widths = self.widths_of(client)
        if widths == 1:
            return super().loss(client, batch)
        drawn = torch.randint(widths, (1,), device=client.device)
        if not self.config.distil:
            return client.task.loss(self.scores(client, batch, drawn), batch.y, batch.weight)
        own: Tensor = client["model"](batch.x)
        scores, alpha, warmth = self.scores(client, batch, drawn), self.config.alpha, self.config.temperature
        student, teacher = ((one.float() / warmth).log_softmax(1) for one in (scores, own.detach()))
        gap = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        return {
            "own": client.task.loss(own, batch.y, batch.weight),
            "drawn": (1 - alpha) * client.task.loss(scores, batch.y, batch.weight),
            "distil": alpha * batch.mean(gap),
        }
