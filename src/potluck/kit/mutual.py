"""Mutual learning: a private model and a shared small one train on the same batches and on each other's scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor

from potluck.core.client import Client
from potluck.core.message import Content
from potluck.core.method import client_step
from potluck.core.model import Model
from potluck.core.options import option
from potluck.core.streams import Stream
from potluck.core.task import Batch, Task
from potluck.kit.compressed_small import SMALL_UP, CompressedSmall
from potluck.training.fit import Fit, fit
from potluck.training.optimizers import Group


def learn_from(scores: Tensor, other: Tensor, batch: Batch) -> Tensor:
    """KL(σ(other) ‖ σ(scores)), the mean over samples; only `scores` gets a gradient.

    >>> import torch
    >>> batch = Batch(torch.zeros(1, 1), torch.zeros(1))
    >>> learn_from(torch.zeros(1, 2), torch.tensor([[99.0, 0.0]]), batch)  # all on one class: log 2
    tensor(0.6931)
    """
    wanted = other.detach().log_softmax(1)
    return batch.mean(F.kl_div(scores.log_softmax(1), wanted, reduction="none", log_target=True).sum(1))


class MutualSmall(CompressedSmall):
    """A private model and the shared small one, both trained in each step; a subclass writes the loss of both.

    The papers take two backward passes with two optimisers. Where every target is detached, one pass through the
    sum of both losses gives the same gradients, and each part has its own moments and clipping here, too.
    """

    stays: tuple[str, ...] = ("data", "labels", "model", "representations")
    modes: tuple[str, ...] = ("model", "small")
    trained: tuple[str, ...] = ("model", "small")

    class Config(CompressedSmall.Config):
        """The shared model, its average and the learning rates."""

        weights: Literal["samples", "uniform"] = option(
            default="uniform",
            description="what the average weighs a client by: all alike, or its training samples",
            source="released code; samples: ours",
        )
        small_lr: PositiveFloat | None = option(
            default=None,
            description="learning rate of the small model; default: that of training.optimizer",
            source="released code has one rate for both; another: ours",
        )

    def client_state(self, task: Task, model: Model) -> dict[str, Any]:
        """The private model and a working copy of the small one."""
        small = self.build_small(task)
        return {"model": model, "small": small, **self.kept(small)}

    @client_step(up=SMALL_UP)
    def train(self, client: Client) -> Content:
        """Local epochs of both models, then the small one."""
        self.fit(client)
        return self.uploaded(client)

    def fit(
        self, client: Client, streams: Mapping[str, Stream] | None = None, clip: float | None = None
    ) -> Fit:
        """Train both models, by default on all samples; `clip` is the largest gradient norm of each part."""
        rates = {"small": self.config.small_lr}
        parts = [part for part in self.trained if client[part].trainable()]
        groups = {part: Group(lr=rates.get(part), clip=clip) for part in parts}
        return fit(client, self.loss, train=parts, groups=groups, streams=streams)

    def predict(self, client: Client, batch: Batch, mode: str) -> Tensor:
        """The scores of the private model, or of the small one."""
        scores: Tensor = client["small" if mode == "small" else "model"](batch.x)
        return scores
